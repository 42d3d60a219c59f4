"""Files that many processes write: appending under a lock, with advice to the user where writing fails."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

_POLL_S = 0.005  # an append takes about a millisecond; filelock's own 50 ms would leave the lock idle
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_A_FILE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


class LogError(ValueError):
    """A log that cannot be written. The message names the path and what to do."""


def _advice(error: OSError) -> str:
    """What the user can do about an error of the system."""
    if error.errno in _FULL:
        return "free some space there, or choose another folder for the logs"
    if error.errno in _FORBIDDEN:
        return "choose a folder for the logs that you may write, or change its permissions"
    if error.errno in _A_FILE:
        return "there is a file where a folder belongs, or the reverse: choose another folder for the logs"
    return "choose another folder for the logs"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that turns errors of the system into a LogError with advice."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # filelock raises the latter on a file system without locks
        reason, advice = (error.strerror, _advice(error)) if isinstance(error, OSError) else (error, _advice(OSError()))
        raise LogError(f"cannot write `{path}` ({reason}): {advice}.") from error


@contextlib.contextmanager
def locked(lock_path: Path, timeout_s: float = 30.0) -> Iterator[None]:
    """A context that holds a lock file, which any number of processes may request. Its folder is created.

    Raises:
        LogError: the folder cannot be written, or another process holds the lock for longer than `timeout_s` seconds.
    """
    with writing(lock_path.parent):
        lock_path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_path, timeout=timeout_s)
    with writing(lock_path):
        try:
            lock.acquire(poll_interval=_POLL_S)
        except Timeout as error:
            waited = f"was held by another process for {timeout_s:g} s"
            raise LogError(f"`{lock_path}` {waited}: wait until that one is done, or end it.") from error
    try:
        yield
    finally:
        lock.release()


def write_lines(path: Path, lines: bytes) -> None:
    """Appends whole lines in one write, or nothing at all; the caller holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size:
            os.lseek(descriptor, size - 1, os.SEEK_SET)
            if os.read(descriptor, 1) != b"\n":  # a killed writer left a broken line, which must not merge with this one
                lines = b"\n" + lines
        try:
            while lines:  # one iteration, unless the disk is full
                lines = lines[os.write(descriptor, lines) :]
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
