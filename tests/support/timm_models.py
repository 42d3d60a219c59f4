"""timm, also where torchvision's operators do not load."""

from __future__ import annotations

import functools
from typing import Any

from im2win.bench.zoo_networks import vision


@functools.cache
def timm() -> Any:
    """The package."""
    return vision("timm")
