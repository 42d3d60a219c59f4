"""From a problem, a schedule and a tile to scheduled CUDA kernels."""

from __future__ import annotations

from typing import Any

import tvm

from im2win.codegen import reconstructed
from im2win.codegen.cuda import kernel_module
from im2win.codegen.llvm import TileError
from im2win.device.gpu import Gpu
from im2win.registry.schedules import Schedule
from im2win.spec.conv2d import Conv2d


def lower(conv: Conv2d, row: Schedule, tile: Any, gpu: Gpu) -> tvm.IRModule:
    """The kernels: `conv2d` over flat tensors in the order of `conv.arguments`; `transform` (data, lowered) where the schedule has one.

    Where windows are stored a part at a time, `conv2d` makes them itself: it takes the input first, then a part's tensor as "data";
    `transform_parts` (data, lowered) then is for measuring.

    Raises:
        TileError: the tile is not legal. ReconstructError: a rule of a tile's does not match its kernels.
    """
    if row.cuda is None:
        raise TileError(f"{row.key} has no CUDA schedule.")
    broken = row.cuda.violations(conv, tile, gpu)
    if broken:
        raise TileError(f"{row.key} on {conv}: " + "; ".join(broken) + ".")
    return emit(conv, row, tile, gpu)


def emit(conv: Conv2d, row: Schedule, tile: Any, gpu: Gpu) -> tvm.IRModule:
    """The kernels of `lower`; whether the tile is legal is not asked."""
    functions, reconstruction = row.on_gpu.kernels(conv, tile, gpu), row.on_gpu.reconstruction(tile)
    return kernel_module(functions) if reconstruction is None else reconstructed.lower(functions, reconstruction, gpu)
