"""The folder of the cache, and atomic writing of files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def default_folder() -> Path:
    """The default folder of artefacts: `IM2WIN_CACHE`, else the platform's cache folder."""
    if given := os.environ.get("IM2WIN_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "im2win"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "im2win"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "im2win"


def replace_text(path: Path, text: str) -> Path:
    """Writes UTF-8 text to `path` atomically. Creates the folder and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def replace_json(path: Path, value: Any) -> Path:
    """Writes JSON to `path` atomically, indented by one as committed results are."""
    return replace_text(path, json.dumps(value, indent=1) + "\n")
