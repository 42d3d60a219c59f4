"""Options that name what a verb writes: checked before any work begins, so that no result is lost at the end. Nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import typer


class OutputError(ValueError):
    """An option that names a file or a folder which cannot be written."""


def file(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """The callback of an option for a file that is written; missing folders on the way to it may be made."""
    if value is not None:
        _check(param, value, "a file")
    return value


def folder(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """The callback of an option for a folder that is written into, or made."""
    if value is not None:
        _check(param, value, "a folder")
    return value


def _check(param: typer.CallbackParam, path: Path, kind: str) -> None:
    """Raises OutputError, which names the option, unless `path` can be written."""
    option = max(param.opts, key=len)
    is_folder = os.path.isdir(path)
    if os.path.exists(path) and is_folder != (kind == "a folder"):
        raise OutputError(f"`{option}` (={str(path)!r}) must be {kind}; it {'is a folder' if is_folder else 'exists and is a file'}.")
    try:
        _try(path)
    except OSError as error:
        raise OutputError(f"`{option}` (={str(path)!r}) must be {kind} that can be written: {error.strerror}.") from None


def _try(path: Path) -> None:
    """Raises OSError unless the file can be opened for writing, or something can be made in the nearest folder above that exists."""
    if os.path.isfile(path):
        os.close(os.open(path, os.O_WRONLY))
        return
    if os.path.exists(path) and not os.path.isdir(path):
        return  # a device or a pipe
    while not os.path.exists(path):
        path = path.parent
    # A trial, because permissions do not tell everything: nobody makes files in /proc, whatever its mode says.
    os.rmdir(tempfile.mkdtemp(prefix=".im2win-", dir=path))
