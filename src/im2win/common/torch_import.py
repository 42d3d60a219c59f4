"""Keeps TVM from importing PyTorch.

TVM imports it wherever it is installed. That takes longer than everything that compiling for a CPU needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

BEGIN = "from im2win.common.torch_import import keep_from_tvm; keep_from_tvm(); "  # with which code for a new interpreter begins

_TVM = {"tvm", "tvm_ffi"}
_IMPORTERS = {"importlib", "_frozen_importlib", "_frozen_importlib_external"}
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")  # files of NVIDIA's driver: of Linux, of Windows' subsystem, of Jetson


class _Finder(PathFinder):
    """Finds no PyTorch for TVM. A None in `sys.modules` would do as well, but breaks libraries that look for PyTorch's classes there."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if fullname == "torch" and _asked_by() in _TVM else super().find_spec(fullname, path, target)


def _asked_by() -> str:
    """The package of the module that imports."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _package(frame.f_globals) in _IMPORTERS:
        frame = frame.f_back
    return _package(frame.f_globals)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]


def keep_from_tvm() -> None:
    """From now on TVM finds no PyTorch in this process; all others do. It has no effect where PyTorch or TVM is loaded already.

    TVM still takes PyTorch's tensors.
    """
    if _Finder not in sys.meta_path:
        sys.meta_path = [_Finder if one is PathFinder else one for one in sys.meta_path]


def needed() -> bool:
    """Whether TVM may need PyTorch, which brings CUDA's libraries: NVIDIA's driver is here."""
    return any(Path(one).exists() for one in _DRIVERS)
