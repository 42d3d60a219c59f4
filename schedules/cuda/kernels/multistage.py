"""The multistage kernel: packed filters times windows. Loaders gather windows on their way to shared memory; a block computes one tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.numerics.winograd_tiling import row_problem, tiles_of
from im2win.packing.cpu_blocked import FilterPack
from im2win.packing.mma_fragments import CudaPack
from im2win.schedules.cuda.epilogue.store import Epilogue, run_length
from im2win.schedules.cuda.loaders import channel_planes, filters, halo_tile, im2col_taps
from im2win.schedules.cuda.loaders.channel_planes import Planes
from im2win.schedules.cuda.loaders.filters import BulkFilters, Filters
from im2win.schedules.cuda.loaders.halo_tile import HaloLoader
from im2win.schedules.cuda.loaders.im2col_taps import Gather
from im2win.schedules.cuda.mma.fma import FmaProduct
from im2win.schedules.cuda.mma.mma_sync import MatrixProduct
from im2win.schedules.cuda.mma.wgmma import WarpgroupProduct
from im2win.schedules.cuda.primitives import Arena, Expr, barrier, call, named
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.schedules.cuda.winograd.rows import RowProduct, TileRows
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import STORED

Place = Callable[[Any], tuple[Conv2d, Any]]
"""operand of a part -> (the whole convolution, what says where its windows lie in the output)"""


def filters_of(tile: MultistageTile) -> type[Filters]:
    """The loader of filters for a tile."""
    return BulkFilters if tile.warpgroup else Filters


def operand_of(tile: MultistageTile) -> type[Gather] | type[HaloLoader] | type[Planes]:
    """The loader of windows for a tile."""
    if tile.in_rows:
        return TileRows
    return Planes if tile.planes else HaloLoader if tile.halo else Gather


def windows_of(conv: Conv2d, tile: MultistageTile) -> Conv2d:
    """The problem whose windows one launch reads; for Winograd along rows that of whole Winograd tiles, see `row_problem`."""
    return row_problem(conv, tile.outputs) if tile.in_rows else conv


def product_of(conv: Conv2d, tile: MultistageTile) -> tuple[Conv2d, MultistageTile]:
    """The problem and the tile of one launch of the product.

    They are the given ones, but for Winograd in bands, where the problem is the product of transformed tiles.
    """
    if not tile.outputs or tile.in_rows:
        return conv, tile
    return tiles_of(conv, tile.outputs, tile.band).problem, replace(tile, outputs=0, band=0)


def pack_of(conv: Conv2d, tile: MultistageTile) -> CudaPack | FilterPack:
    """The packing of filters for a tile."""
    if tile.outputs:
        one = (row_problem(conv, tile.outputs), replace(tile, outputs=0)) if tile.in_rows else product_of(conv, tile)
        pack = pack_of(*one)
        assert isinstance(pack, CudaPack)  # products of Winograd tiles use no channel planes
        return replace(pack, outputs=tile.outputs)
    if tile.planes:
        return FilterPack(tile.block_m, "cuv")
    if tile.product == "fma":
        return CudaPack("rows", tile.block_m, tile.order, tile.slabs)
    run = run_length(conv, tile, operand_of(tile).run(conv, tile)) if conv.layout == "NHWC" else 1
    form = "columns" if tile.warpgroup else "products"
    return CudaPack(form, tile.block_m, tile.order, tile.slabs, run, parts=tile.arithmetic.parts)


def shared_bytes(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> int:
    """Bytes of shared memory that a block takes. `conv` is the problem of `windows_of`."""
    halo = halo_tile.shared_bytes
    parts = {Gather: im2col_taps.shared_bytes, HaloLoader: halo, TileRows: halo, Planes: channel_planes.shared_bytes}
    return parts[operand_of(tile)](conv, tile, plan) + filters.shared_bytes(tile, step_filters(conv, tile))


def step_filters(conv: Conv2d, tile: MultistageTile) -> int:
    """Elements of a block's filters in one step of the sum."""
    depth = tile.slabs * conv.kernel[1] if tile.planes else tile.block_k
    return tile.block_m * depth * tile.positions * max(tile.arithmetic.parts, 1)


def arguments(conv: Conv2d, pack: CudaPack | FilterPack, made: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Declares the kernel's tensors and returns flat views of them by name.

    Args:
        made: shape of the workspace that "data" stands for, a tensor that a transform stores; it is an argument as a flat buffer. None if
            "data" is the input.
    """
    shapes = {"data": (math.prod(made),) if made else conv.input_shape, "filter": pack.shape(conv)}
    shapes |= {name: (conv.out_channels,) for name in ("bias", "scale")}
    buffers = {}
    for name in conv.arguments:
        shape, dtype = shapes.get(name, conv.output_shape), STORED[conv.dtypes[name]]
        buffers[name] = T.arg(name, T.buffer(shape, dtype)), (math.prod(shape),), dtype
    views = {name: (named(name, buffer), flat, dtype) for name, (buffer, flat, dtype) in buffers.items()}
    return {name: named(name, T.decl_buffer(flat, dtype, data=buffer.data)) for name, (buffer, flat, dtype) in views.items()}


def thread_blocks(conv: Conv2d, tile: MultistageTile) -> tuple[int, int]:
    """(thread blocks along channels, of all groups; thread blocks along windows)."""
    return pack_of(conv, tile).blocks(conv), operand_of(tile).blocks(windows_of(conv, tile), tile)


def product_kernel(conv: Conv2d, tile: MultistageTile, plan: WindowSource, name: str = "conv2d") -> Any:
    """The kernel over the tensors of `conv.arguments`. "data" is the tensor that windows are read from: the input, or a stored tensor."""
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        launch_product(conv, tile, plan, arguments(conv, pack_of(conv, tile), plan.source(conv) if plan.axes else None))
    return builder.get()


def launch_product(conv: Conv2d, tile: MultistageTile, plan: WindowSource, tensors: dict[str, Any], place: Place | None = None) -> None:
    """Emits a launch of the product.

    Args:
        tensors: flat views by name, see `arguments`.
        place: where the windows of a part of a convolution lie in the whole output; None if the launch computes all of it.
    """
    blocks, pack, source = thread_blocks(conv, tile), pack_of(conv, tile), windows_of(conv, tile)
    steps = math.prod(pack.shape(conv)) // blocks[0] // step_filters(conv, tile)
    with T.launch_thread("blockIdx.x", math.prod(blocks)) as bx, T.launch_thread("threadIdx.x", tile.threads) as tid:
        per_group = blocks[0] // conv.groups
        channels, windows = bx % blocks[0], bx // blocks[0]
        group = channels // per_group
        arena = Arena(shared_bytes(source, tile, plan), tile.dtype)
        filter_ = filters_of(tile)(tile, arena, tensors["filter"], channels, steps, step_filters(conv, tile), tid)
        operand = operand_of(tile)(source, tile, plan, arena, tensors["data"], windows, group, tid)
        whole, outputs = place(operand) if place else (conv, operand.outputs_of(conv) if isinstance(operand, TileRows) else operand)
        product = _product(source, tile, operand, tid, run_length(whole, tile, outputs.run(whole, tile)))
        _pipeline(tile, steps, filter_, operand, product)
        Epilogue(whole, tile, tensors, outputs, channels % per_group * tile.block_m, group).write(product)


def _product(conv: Conv2d, tile: MultistageTile, operand: Any, tid: Expr, run: int) -> FmaProduct | MatrixProduct | WarpgroupProduct:
    if tile.in_rows:
        return RowProduct(conv, tile, operand, tid, run=run)
    if tile.product == "fma":
        return FmaProduct(tile, operand, tid, run=run)
    return (WarpgroupProduct if tile.warpgroup else MatrixProduct)(conv, tile, operand, tid, run=run)


def _pipeline(tile: MultistageTile, steps: int, filter_: Filters, operand: Any, product: Any) -> None:
    """Emits the mainloop. Copies run `ahead` steps ahead of the product.

    One barrier a step is enough. Behind it this step's copies are complete for all threads, and all threads have read the stage that the
    next copies overwrite: the stage of the step before, or with `wgmma`, whose last products may still run, that of the step before that.
    """
    ahead = tile.ahead
    copies = operand.copies or not tile.warpgroup  # whether threads issue asynchronous copies

    def commit() -> None:
        if copies:
            call("commit_copies")

    for step in range(min(ahead, steps)):
        filter_.begin(step, step)
        operand.prologue(step)
        commit()
    for _ in range(steps, ahead):
        commit()

    def one(step: Expr, register_set: int) -> None:
        if copies:
            call(f"wait_copies<{max(ahead - 1, 0)}>")
        barrier()
        stage = (step + ahead) % tile.stages
        more = step + ahead < steps
        if steps > ahead:
            with T.If(more), T.Then():
                filter_.renew(step + ahead, stage)
                if not tile.halo:
                    operand.advance(step, ahead, stage)
        if tile.halo:
            operand.advance(step, ahead, stage)
        commit()
        filter_.wait(step)
        product.multiply(filter_.shared, step, register_set)
        if tile.halo:
            operand.settle(step, stage)
        elif steps > ahead:
            with T.If(more), T.Then():
                operand.settle(step, stage)

    unrolled = 2 if tile.warpgroup and tile.slabs % 2 else 1  # its register set alternates with every slab: indices must be constants
    with T.serial(-(-steps // unrolled)) as step:
        for register_set in range(unrolled):
            if register_set and steps % unrolled:
                with T.If(step * unrolled + register_set < steps), T.Then():
                    one(step * unrolled + register_set, register_set)
            else:
                one(step * unrolled + register_set, register_set)
    product.finish()
