"""Where what can be made again is kept, and files that a reader sees whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def default_folder() -> Path:
    """Where artefacts are kept unless told: `IM2WIN_CACHE`, else the platform's folder for what can be made again."""
    if given := os.environ.get("IM2WIN_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "im2win"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "im2win"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "im2win"


def replace_text(path: Path, text: str) -> Path:
    """Writes UTF-8 text beside `path`, then puts it in the place of `path`; makes the folder, returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def replace_json(path: Path, value: Any) -> Path:
    """The same with JSON, indented by one as committed results are."""
    return replace_text(path, json.dumps(value, indent=1) + "\n")
