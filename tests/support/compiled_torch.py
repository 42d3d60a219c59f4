"""The library that PyTorch's calls go through, for processes that tests start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def with_compiled(folder: Path) -> Path:
    """The folder, with the library that PyTorch's calls go through: a process with that cache need not compile it."""
    from im2win.frontends.torch import native

    native.load()
    for path in Path(os.environ["IM2WIN_CACHE"]).glob("operator-*.so"):
        shutil.copy(path, folder)
    native.unload()
    return folder
