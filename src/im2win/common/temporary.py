"""Temporary folders that do not stay for good where a process is killed: the next one that makes such a folder removes them.

A process holds a lock on its folder, which the system releases however the process ends. Neither the clock nor the numbers of processes
matter, which may change or belong to another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

YOUNG_S = 60.0  # age up to which a folder is left alone: its maker may be about to lock it


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A folder for a purpose, one word; what killed processes of this user left of such folders is removed first."""

    def __init__(self, purpose: str) -> None:
        prefix, folder = f"im2win-{purpose}-held-", Path(tempfile.gettempdir())
        for left in folder.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # in use, or being removed by another process
                _remove_abandoned(left)
        super().__init__(prefix=prefix, dir=folder)
        held = os.open(self.name, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        self._release = weakref.finalize(self, os.close, held)

    def cleanup(self) -> None:
        """Removes the folder."""
        super().cleanup()
        self._release()


@contextlib.contextmanager
def temporaries_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A context in which this process and the programs that it starts make their temporary files in a folder.

    A compiler that is killed leaves its files; who owns the folder removes them with it.
    """
    before, own = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = os.fspath(folder)
    try:
        yield
    finally:
        tempfile.tempdir = own
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _remove_abandoned(path: Path) -> None:
    """Removes a folder of this user that no process holds.

    Raises:
        OSError: a process holds it.
    """
    facts = path.lstat()
    if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < YOUNG_S:
        return
    tried = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(tried, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(tried)
