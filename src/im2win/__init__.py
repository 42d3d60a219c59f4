"""im2win: generates, tunes and deploys 2-D convolution kernels on Apache TVM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from im2win.spec.conv2d import Conv2d, ConvError

if TYPE_CHECKING:
    from im2win.builder.build import build as build
    from im2win.export.c_abi import export_c as export_c
    from im2win.export.runtime import export_runtime as export_runtime
    from im2win.frontends.models.compiler import compile_model as compile_model
    from im2win.frontends.onnxruntime.operators import for_onnxruntime as for_onnxruntime
    from im2win.frontends.torch.capturing import capture as capture
    from im2win.registry.ranking import default_tile as default_tile
    from im2win.runtime.load import load as load
    from im2win.runtime.load import load_model as load_model
    from im2win.runtime.model import Model as Model
    from im2win.runtime.op import Layer as Layer
    from im2win.runtime.op import Op as Op
    from im2win.schedules.cpu.tile import Tile as Tile
    from im2win.tuner.tuning import tune as tune

__version__ = "0.1.0"

# Loaded when first used: `im2win.load` must not pull in the compiler.
_LAZY = {
    "build": "builder.build",
    "capture": "frontends.torch.capturing",
    "compile_model": "frontends.models.compiler",
    "default_tile": "registry.ranking",
    "export_c": "export.c_abi",
    "export_runtime": "export.runtime",
    "for_onnxruntime": "frontends.onnxruntime.operators",
    "Layer": "runtime.op",
    "Op": "runtime.op",
    "load": "runtime.load",
    "load_model": "runtime.load",
    "Model": "runtime.model",
    "Tile": "schedules.cpu.tile",
    "tune": "tuner.tuning",
}

__all__ = [
    "Conv2d", "ConvError", "Layer", "Model", "Op", "Tile", "build", "capture", "compile_model", "default_tile", "export_c",
    "export_runtime", "for_onnxruntime", "load", "load_model", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "torch":  # a package of its own, which needs PyTorch
        return importlib.import_module("im2win.torch")
    if name not in _LAZY:
        raise AttributeError(f"module 'im2win' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"im2win.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
