"""timm, also where torchvision's operators do not load: beside a PyTorch for CPUs alone, while its wheel is built for another."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch

LIBRARIES: list[torch.library.Library] = []  # what they define lasts as long as they do


@functools.cache
def timm() -> Any:
    """The package."""
    try:
        return importlib.import_module("timm")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
        del sys.modules[name]
    LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("timm")
