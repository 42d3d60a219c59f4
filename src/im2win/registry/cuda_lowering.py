"""From a problem, a schedule and a tile to scheduled CUDA kernels."""

from __future__ import annotations

from typing import Any

import tvm

from im2win.codegen import reconstructed
from im2win.codegen.cuda import kernel_module, overlapping_module
from im2win.codegen.llvm import TileError
from im2win.device.gpu import Gpu
from im2win.registry.schedules import Schedule
from im2win.schedules.cuda.legality.launch_overlap import no_overlap
from im2win.schedules.cuda.model import launch_overlap
from im2win.spec.conv2d import Conv2d


def lower(conv: Conv2d, row: Schedule, tile: Any, gpu: Gpu, overlap: bool | None = None) -> tvm.IRModule:
    """The kernels: `conv2d` over flat tensors in the order of `conv.arguments`; `transform` (data, lowered) where the schedule has one.

    Where windows are stored a part at a time, `conv2d` makes them itself: it takes the input first, then a part's tensor as "data";
    `transform_parts` (data, lowered) then is for measuring.

    Args:
        overlap: whether kernels begin before the kernel before them in the stream has completed, see `schedules.cuda.launch_overlap`.
            Results are the same. None: as `overlaps` says.

    Raises:
        TileError: the tile is not legal, or `overlap` is not. ReconstructError: a rule of a tile's does not match its kernels.
    """
    if row.cuda is None:
        raise TileError(f"{row.key} has no CUDA schedule.")
    broken = row.cuda.violations(conv, tile, gpu)
    if broken:
        raise TileError(f"{row.key} on {conv}: " + "; ".join(broken) + ".")
    module = emit(conv, row, tile, gpu)
    if not (overlaps(conv, row, tile, gpu) if overlap is None else overlap):
        return module
    if (reason := no_overlap(gpu)) is not None:
        raise TileError(f"{row.key} on {conv}: {reason}.")
    return overlapping_module(module)


def overlaps(conv: Conv2d, row: Schedule, tile: Any, gpu: Gpu) -> bool:
    """Whether the kernels of a legal tile are launched with overlap by default.

    It is no part of the tile, so that a record gains by it, too, whose kernel was timed without it and is the best one otherwise.
    """
    if not launch_overlap.BY_DEFAULT or no_overlap(gpu) is not None:
        return False
    return launch_overlap.gains(row.on_gpu.estimate(conv, tile, gpu))


def emit(conv: Conv2d, row: Schedule, tile: Any, gpu: Gpu) -> tvm.IRModule:
    """The kernels of `lower` without overlap; whether the tile is legal is not asked."""
    functions, reconstruction = row.on_gpu.kernels(conv, tile, gpu), row.on_gpu.reconstruction(tile)
    return kernel_module(functions) if reconstruction is None else reconstructed.lower(functions, reconstruction, gpu)
