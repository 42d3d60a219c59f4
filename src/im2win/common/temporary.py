"""Temporary folders that do not stay for good where a process is killed: the next one that makes such a folder removes them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

_NAME = re.compile(r"im2win-[a-z]+-p(\d+)-(\d+)-\w+")


def temporary_folder(purpose: str) -> tempfile.TemporaryDirectory[str]:
    """A folder of this process for a purpose, one word; what earlier processes of this user left for it is removed first."""
    folder = Path(tempfile.gettempdir())
    for left in folder.glob(f"im2win-{purpose}-p*"):
        with contextlib.suppress(OSError):  # another process may be removing it
            if _abandoned(left):
                shutil.rmtree(left)
    return tempfile.TemporaryDirectory(prefix=f"im2win-{purpose}-p{os.getpid()}-{_started(os.getpid())}-", dir=folder)


def _abandoned(path: Path) -> bool:
    """Whether the process that made a folder has ended. A folder of another user is not asked."""
    found = _NAME.fullmatch(path.name)
    if found is None or (hasattr(os, "getuid") and path.lstat().st_uid != os.getuid()):
        return False
    return _started(int(found[1])) != int(found[2])


def _started(process: int) -> int:
    """When a process started, in whole seconds; 0 if there is none. Numbers of processes are used again, but not at once."""
    try:
        return int(psutil.Process(process).create_time())
    except psutil.Error:
        return 0
