"""A convolution as one CUDA kernel: the product of packed filters with windows, which take their shape on the way to shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.cuda_packing import CudaPack
from im2win.packing import FilterPack
from im2win.problem import Conv2d
from im2win.schedules.cuda import gather, patch, planes
from im2win.schedules.cuda.epilogue import Epilogue, output_dtype, run_length
from im2win.schedules.cuda.filters import Filters
from im2win.schedules.cuda.gather import Gather
from im2win.schedules.cuda.patch import Patch
from im2win.schedules.cuda.plan import CudaPlan
from im2win.schedules.cuda.planes import Planes
from im2win.schedules.cuda.product import FmaProduct, MatrixProduct
from im2win.schedules.cuda.shared import Arena, Expr, barrier, call, named, padded
from im2win.schedules.cuda.tile import CudaTile

PARTS = {"tf32": 1, "tf32x3": 2}  # of a packed filter
Place = Callable[[Any], tuple[Conv2d, Any]]
"""operand of a part -> (the whole convolution, what says where its windows lie in the output)"""


def operand_of(tile: CudaTile) -> type[Gather] | type[Patch] | type[Planes]:
    """Where a tile takes its windows from, in shared memory."""
    return Planes if tile.planes else Patch if tile.patch else Gather


def pack_of(conv: Conv2d, tile: CudaTile) -> CudaPack | FilterPack:
    """How filters are packed for a tile."""
    if tile.planes:
        return FilterPack(tile.block_m, "cuv")
    if tile.product == "fma":
        return CudaPack("rows", tile.block_m, tile.order, tile.slabs)
    run = run_length(conv, tile, operand_of(tile).run(conv, tile)) if conv.layout == "NHWC" else 1
    return CudaPack("products", tile.block_m, tile.order, tile.slabs, run, parts=PARTS.get(tile.product, 0))


def shared_bytes(conv: Conv2d, tile: CudaTile, plan: CudaPlan) -> int:
    """Bytes of shared memory that a block takes."""
    parts = {Gather: gather.shared_bytes, Patch: patch.shared_bytes, Planes: planes.shared_bytes}
    return parts[operand_of(tile)](conv, tile, plan) + padded((tile.stages, step_filters(conv, tile)), tile.dtype)


def step_filters(conv: Conv2d, tile: CudaTile) -> int:
    """Elements of a block's filters that one step of the sum takes."""
    return tile.block_m * (tile.slabs * conv.kernel[1] if tile.planes else tile.block_k) * max(PARTS.get(tile.product, 0), 1)


def arguments(conv: Conv2d, pack: CudaPack | FilterPack, plan: CudaPlan) -> dict[str, Any]:
    """The kernel's tensors by name, as flat views; a tensor made from the input comes flat as it is."""
    made = (math.prod(plan.source(conv)),) if plan.axes else conv.input_shape
    shapes = {"data": made, "filter": pack.shape(conv), "bias": (conv.out_channels,)}
    dtypes = {"data": conv.dtype, "filter": conv.dtype}
    buffers = {}
    for name in conv.arguments:
        shape, dtype = shapes.get(name, conv.output_shape), dtypes.get(name, output_dtype(conv))
        buffers[name] = T.arg(name, T.buffer(shape, dtype)), (math.prod(shape),), dtype
    views = {name: (named(name, buffer), flat, dtype) for name, (buffer, flat, dtype) in buffers.items()}
    return {name: named(name, T.decl_buffer(flat, dtype, data=buffer.data)) for name, (buffer, flat, dtype) in views.items()}


def thread_blocks(conv: Conv2d, tile: CudaTile) -> tuple[int, int]:
    """Thread blocks along channels, of all groups, and along windows."""
    return pack_of(conv, tile).blocks(conv), operand_of(tile).blocks(conv, tile)


def product_kernel(conv: Conv2d, tile: CudaTile, plan: CudaPlan, name: str = "conv2d") -> Any:
    """The kernel over the tensors of `conv.arguments`; "data" is the tensor that the plan takes windows from."""
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        launch_product(conv, tile, plan, arguments(conv, pack_of(conv, tile), plan))
    return builder.get()


def launch_product(conv: Conv2d, tile: CudaTile, plan: CudaPlan, tensors: dict[str, Any], place: Place | None = None) -> None:
    """Emits a launch.

    Args:
        tensors: see `arguments`.
        place: where a part of a convolution lies in the whole; None for all of it.
    """
    blocks, pack = thread_blocks(conv, tile), pack_of(conv, tile)
    steps = math.prod(pack.shape(conv)) // blocks[0] // step_filters(conv, tile)
    with T.launch_thread("blockIdx.x", math.prod(blocks)) as bx, T.launch_thread("threadIdx.x", tile.threads) as tid:
        per_group = blocks[0] // conv.groups
        channels, windows, group = bx % blocks[0], bx // blocks[0], bx % blocks[0] // per_group
        arena = Arena(shared_bytes(conv, tile, plan), tile.dtype)
        filters = Filters(tile, arena, tensors["filter"], channels, steps, step_filters(conv, tile), tid)
        operand = operand_of(tile)(conv, tile, plan, arena, tensors["data"], windows, group, tid)
        whole, outputs = place(operand) if place else (conv, operand)
        product = _product(tile, operand, tid, conv.layout, run_length(whole, tile, outputs.run(whole, tile)))
        _pipeline(tile, steps, filters, operand, product)
        Epilogue(whole, tile, tensors, outputs, channels % per_group * tile.block_m, group).write(product)


def _product(tile: CudaTile, operand: Any, tid: Expr, layout: str, run: int) -> FmaProduct | MatrixProduct:
    if tile.product == "fma":
        return FmaProduct(tile, operand, tid, run=run)
    return MatrixProduct(tile, operand, tid, along_channels=layout == "NHWC", run=run)


def _pipeline(tile: CudaTile, steps: int, filters: Filters, operand: Any, product: Any) -> None:
    """Copies run `stages - 1` steps ahead of the product.

    One barrier a step is enough: behind it, this step's copies have landed for all threads, and all have read what the next ones overwrite.
    """
    ahead = tile.stages - 1
    for step in range(min(ahead, steps)):
        filters.begin(step, step)
        operand.prologue(step)
        call("commit_copies")
    for _ in range(steps, ahead):
        call("commit_copies")
    with T.serial(steps) as step:
        call(f"wait_copies<{max(ahead - 1, 0)}>")
        barrier()
        slot = (step + ahead) % tile.stages
        more = step + ahead < steps
        if steps > ahead:
            with T.If(more), T.Then():
                filters.begin(step + ahead, slot)
                if not tile.patch:
                    operand.advance(step, ahead, slot)
        if tile.patch:
            operand.advance(step, ahead, slot)
        call("commit_copies")
        product.multiply(filters.shared, step)
        if tile.patch:
            operand.settle(step, slot)
        elif steps > ahead:
            with T.If(more), T.Then():
                operand.settle(step, slot)
