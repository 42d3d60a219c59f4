"""Digests of the package's source, kept in the cache folder: reading the source takes milliseconds, parsing it takes a second.

What was computed once is found again while every file of the package holds the same bytes, in any process of this user.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from im2win.common.files import default_folder, not_ours, replace_text
from im2win.common.locking import LogError, locked

FOLDER = "digests"
KEPT = 16  # states of the source
WAIT_S = 10.0  # for another process that computes digests
_log = logging.getLogger(__name__)
_SUFFIXES = (".py", ".hpp", ".h", ".c")
_DIGEST = re.compile(r"[0-9a-f]+")


def kept(root: Path, name: str, compute: Callable[[], str]) -> str:
    """The digest of this name of the package in `root`; computed, and kept, where it is not there yet."""
    path = default_folder() / FOLDER / f"{_state(root)}.json"
    found = _read(path)
    if name not in found:
        with _alone(path.parent):
            _read.cache_clear()
            found = _read(path)
            if name not in found:
                found[name] = compute()
                _write(path, found)
    return found[name]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context in which no other process computes digests: several that start at once wait for one, and read what it found."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "lock", WAIT_S))
        except LogError as error:
            _log.debug("digests of the source are computed beside other processes: %s", error)
        yield


@functools.cache
def _state(root: Path) -> str:
    """Digest of every source file of a package, and of the version of Python, whose parser the digests come from."""
    made = hashlib.sha256(repr(sys.version_info[:2]).encode())
    for path in sorted(_files(str(root))):
        with open(path, "rb") as file:
            content = file.read()
        made.update(f"{os.path.relpath(path, root)} {len(content)}\n".encode())
        made.update(content)
    return made.hexdigest()[:32]


def _files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for one in entries:
            if one.name.endswith(_SUFFIXES):
                yield one.path
            elif not one.name.startswith((".", "_")) and one.is_dir():
                yield from _files(one.path)


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> dict[str, str]:
    """The digests of a file; none where it cannot be read, does not hold digests, or another user could have written it."""
    if not path.exists() or not_ours(path) is not None:
        return {}
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(read, dict) and all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in read.values())
    return read if whole else {}


def _write(path: Path, digests: dict[str, str]) -> None:
    """Keeps digests for other processes; one that writes without the lock may drop some of them, which are computed again."""
    try:
        replace_text(path, json.dumps(digests, indent=1, sort_keys=True) + "\n")
        for old in sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)[:-KEPT]:
            old.unlink()
    except OSError as error:
        _log.debug("digests of the source are not kept: %s", error)
