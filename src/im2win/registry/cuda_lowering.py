"""From a problem, an algorithm and a tile to scheduled CUDA kernels."""

from __future__ import annotations

from typing import Any

import tvm

from im2win.codegen import winograd_tc
from im2win.codegen.cuda import kernel_module
from im2win.codegen.llvm import TileError
from im2win.device.gpu import Gpu
from im2win.registry.schedules import Schedule
from im2win.schedules.cuda.families.base import CudaFamily
from im2win.schedules.cuda.kernels import multistage as kernel
from im2win.schedules.cuda.kernels.output_parts import InParts, parts_kernel, parts_transform
from im2win.schedules.cuda.kernels.winograd_bands import winograd_kernel, winograd_transform
from im2win.schedules.cuda.legality.multistage import problems
from im2win.schedules.cuda.loaders.stored_windows import transform_kernel
from im2win.schedules.cuda.plan import CudaPlan, WinogradPlan
from im2win.schedules.studies.winograd_tc.plan import TensorCorePlan
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL, TRANSFORM, TRANSFORM_PARTS


def lower(conv: Conv2d, algorithm: Schedule, tile: Any, gpu: Gpu) -> tvm.IRModule:
    """The kernels: `conv2d` over flat tensors in the order of `conv.arguments`; `transform` (data, lowered) where the algorithm has one.

    Where windows are stored a part at a time, `conv2d` makes them itself: it takes the input first, then a part's tensor as "data";
    `transform_parts` (data, lowered) then is for measuring.

    Raises:
        TileError: the tile is not legal. ReconstructError: a rule of a tile's does not match its kernels.
    """
    plan = algorithm.cuda
    if plan is None:
        raise TileError(f"{algorithm.key} has no CUDA schedule.")
    broken = plan.problems(conv, tile, gpu) if isinstance(plan, CudaFamily) else problems(conv, tile, gpu, plan)
    if broken:
        raise TileError(f"{algorithm.key} on {conv}: " + "; ".join(broken) + ".")
    return emit(conv, plan, tile, gpu)


def emit(conv: Conv2d, plan: CudaPlan, tile: Any, gpu: Gpu) -> tvm.IRModule:
    """The kernels of `lower`; whether the tile is legal is not asked."""
    if isinstance(plan, TensorCorePlan):
        return winograd_tc.lower(conv, tile, gpu)
    if isinstance(plan, CudaFamily):
        return kernel_module(plan.kernels(conv, tile, gpu))
    if tile.in_rows:
        functions = {SYMBOL: kernel.product_kernel(conv, tile, CudaPlan(staged="rows"), SYMBOL)}
    elif isinstance(plan, WinogradPlan):
        functions = {SYMBOL: winograd_kernel(conv, tile, SYMBOL), TRANSFORM_PARTS: winograd_transform(conv, tile, TRANSFORM_PARTS)}
    elif isinstance(plan, InParts):
        functions = {SYMBOL: parts_kernel(conv, tile, plan, SYMBOL), TRANSFORM_PARTS: parts_transform(conv, plan, TRANSFORM_PARTS)}
    else:
        functions = {SYMBOL: kernel.product_kernel(conv, tile, plan, SYMBOL)}
        if plan.axes:
            functions[TRANSFORM] = transform_kernel(conv, plan.oriented(conv), TRANSFORM)
    return kernel_module(functions)
