"""The folder of the cache, and atomic writing of files."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

ABANDONED_S = 600.0  # a partial file that nobody has written to for so long has no writer any more


def default_folder() -> Path:
    """The default folder of artefacts: `IM2WIN_CACHE`, else the platform's cache folder."""
    if given := os.environ.get("IM2WIN_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "im2win"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "im2win"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "im2win"


def not_ours(path: Path) -> str | None:
    """Why a file's content could be another user's, who could have it run here; None if only this user, or root, can write it.

    Both the file and its folder count. Windows, whose permissions are other ones, is not examined.
    """
    if not hasattr(os, "getuid"):
        return None
    for one in (path.parent, path):
        try:
            facts = one.stat()
        except OSError as error:  # removed since it was found, or in a folder that this user may not enter
            return f"{one} cannot be examined ({error.strerror})"
        if facts.st_uid not in (os.getuid(), 0):
            return f"{one} belongs to another user ({facts.st_uid})"
        if facts.st_mode & stat.S_IWOTH:
            return f"every user can write {one}"
    return None


def replace_bytes(path: Path, content: bytes) -> Path:
    """Writes a file atomically, whoever else writes it at the same time. Creates the folder and returns the path.

    What a process left that was killed while it wrote this file is removed.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.*-*.partial"):
        with contextlib.suppress(OSError):  # its writer is done, or another process removes it
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return path


def replace_text(path: Path, text: str) -> Path:
    """Writes UTF-8 text; see `replace_bytes`."""
    return replace_bytes(path, text.encode())


def replace_json(path: Path, value: Any) -> Path:
    """Writes JSON to `path` atomically, indented by one as committed results are."""
    return replace_text(path, json.dumps(value, indent=1) + "\n")
