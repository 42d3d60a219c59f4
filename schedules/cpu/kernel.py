"""The production schedule for CPUs, one for every algorithm; it extends Alg. 6 of the im2win thesis (Lu 2023; arXiv 2306.14320).

A parallel step computes a block of output rows of one image for a pass of channel blocks. It stages what the algorithm transforms (padded
input rows, their im2win rows, their im2col block). For every channel block a register tile then sweeps over the block of output rows. A K
step of the register tile loads `vectors` vectors of packed filters and multiplies each by `rows * cols` broadcast inputs. For example 14
windows x 2 vectors take 28 accumulators, 2 filters and 1 broadcast of 32 registers, and 16 loads feed 28 FMAs.

    parallel (channel pass, n, block of output rows)
        stage                                      # transform of these rows, if the algorithm has one
        for channel block in pass
            for row tile, column tile in the block of output rows
                sums = 0                           # registers
                for c, u, v: sums += filter[k, :] * operand
                rows[...] = act(sums + bias)       # level-1 cache
            out[...] = transposed rows             # schedules/cpu/transpose.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.compute import nest
from im2win.schedules.cpu.loops import unroll, write_transposed
from im2win.schedules.cpu.tile import Tile
from im2win.spec.conv2d import Conv2d

Where = Literal["root", "row_block", "inline"]


@dataclass(frozen=True)
class Plan:
    """What the schedule must know of an algorithm.

    stage: name of the block that transforms the input; None if there is none.
    where: "root" stores the whole transformed tensor, "row_block" that of one block of output rows beside the product, "inline" none of it.
    matrix: whether the product takes windows as columns of a matrix, without rows of the output.
    fused: axes of the stage that fuse several axes: (axis, letters of the inner ones), u kernel row, v kernel column, x output column.
        Splitting them leaves plain rows to copy instead of a division for every element.
    step: elements between neighbouring windows in what the product reads.
    """

    stage: str | None = None
    where: Where = "inline"
    matrix: bool = False
    fused: tuple[tuple[int, str], ...] = ()
    step: int = 1


def schedule(conv: Conv2d, arguments: Sequence[te.Tensor], tile: Tile, plan: Plan) -> Schedule:
    """Schedules a definition of `compute/` with a legal tile."""
    sch = Schedule(te.create_prim_func(list(arguments)))
    if plan.stage and plan.where == "inline":
        sch.compute_inline(sch.get_sblock(plan.stage))
    step, block, channels, windows = _output_loops(sch, conv, tile)
    held = _holds_back(conv, tile, plan)
    if held:
        _hold_back(sch, conv, tile, block, channels)
    else:
        sch.compute_inline(sch.get_sblock(nest.ROWS))
        if conv.residual:
            sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    if tile.chunks > 1:
        sch.compute_at(sch.get_sblock(nest.SUMS), block, preserve_unit_loops=True)
    if plan.stage and plan.where != "inline":
        # while the product is not tiled yet, so that staging covers just what a block of output rows reads, and nothing for its last
        # register tile
        sch.compute_at(sch.get_sblock(nest.CONV), block, preserve_unit_loops=True)
        _stage(sch, conv, tile, plan, step)
    if tile.chunks > 1:
        _chunks(sch, conv, tile, plan, channels, windows)
    elif held:
        _tile_strip(sch, conv, tile, plan, channels, windows)
    elif tile.axis == "channels":
        _channel_vectors(sch, conv, tile, plan, *windows, *channels)
    else:
        _window_vectors(sch, conv, tile, plan, channels, windows)
    return sch


def _holds_back(conv: Conv2d, tile: Tile, plan: Plan) -> bool:
    """Whether a block of output rows is buffered as [window][channel]: where vectors of channels cannot be stored to the output directly.
    """
    leaves = conv.layout == "NHWC" and _whole_blocks(conv, tile) and not (plan.matrix and tile.row_block > 1)
    return tile.axis == "channels" and not leaves


def _whole_blocks(conv: Conv2d, tile: Tile) -> bool:
    return (conv.out_channels // conv.groups) % tile.block == 0


def _output_loops(sch: Schedule, conv: Conv2d, tile: Tile) -> tuple[LoopRV, LoopRV, list[LoopRV], list[LoopRV]]:
    """Splits the output into parallel steps.

    Returns:
        (step, channel block of the pass, channel loops inside it, [row, column] of the block of output rows).
    """
    loops = sch.get_loops(sch.get_sblock(nest.OUT))
    n, j, m, x = loops if conv.layout == "NCHW" else (loops[0], loops[3], loops[1], loops[2])
    inside = [tile.vectors, tile.lanes] if tile.axis == "channels" else [tile.block]
    passes, block, *channels = sch.split(j, [None, tile.pass_blocks, *inside])
    row_blocks, row = sch.split(m, [None, tile.row_block])
    order = [*channels, row, x] if conv.layout == "NCHW" else [row, x, *channels]
    sch.reorder(passes, n, row_blocks, block, *order)
    step = sch.fuse(passes, n, row_blocks)
    sch.parallel(step)
    return step, block, channels, [row, x]


def _chunks(sch: Schedule, conv: Conv2d, tile: Tile, plan: Plan, channels: list[LoopRV], windows: list[LoopRV]) -> None:
    """Chunk by chunk of the channels, the register tile sweeps over a block of output rows and adds its product to their sums.

        sums = 0
        for chunk
            for row tile, column tile in the block of output rows
                product = 0                        # registers
                for c in chunk, u, v: product += filter[k, :] * operand
                sums[...] += product               # level-2 cache
        out[...] = act(sums + bias)
    """
    sums = sch.get_sblock(nest.SUMS)
    row, col, channel, chunk = sch.get_loops(sums)[-4:]
    sch.reorder(chunk, row, col, channel)
    _channel_vectors(sch, conv, tile, plan, row, col, *sch.split(channel, [None, tile.lanes]))
    start = sch.decompose_reduction(sums, chunk)
    sch.vectorize(sch.get_loops(start)[-1])
    if _holds_back(conv, tile, plan):
        *_, lane = sch.split(sch.get_loops(sch.get_sblock(nest.ROWS))[-1], [None, tile.lanes])
        sch.vectorize(lane)
        _write_back(sch, conv, tile, plan, channels, windows)
    else:
        unroll(sch, channels[0])
        sch.vectorize(channels[1])


def _hold_back(sch: Schedule, conv: Conv2d, tile: Tile, block: LoopRV, channels: list[LoopRV]) -> None:
    """Buffers a block of output rows beside the product.

    A residual is added to transposed rows, or in the write-back without a transpose.
    """
    if conv.residual and conv.layout == "NCHW" and _whole_blocks(conv, tile):
        sch.compute_at(sch.get_sblock(nest.TRANSPOSED), channels[0], preserve_unit_loops=True)
    elif conv.residual:
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    sch.compute_at(sch.get_sblock(nest.ROWS), block, preserve_unit_loops=True)


def _tile_strip(sch: Schedule, conv: Conv2d, tile: Tile, plan: Plan, channels: list[LoopRV], windows: list[LoopRV]) -> None:
    """Vectors of channels that are written back through a buffered block of output rows."""
    rows = sch.get_sblock(nest.ROWS)
    row, col, channel = sch.get_loops(rows)[-3:]
    _channel_vectors(sch, conv, tile, plan, row, col, *sch.split(channel, [None, tile.lanes]))
    _write_back(sch, conv, tile, plan, channels, windows)


def _write_back(sch: Schedule, conv: Conv2d, tile: Tile, plan: Plan, channels: list[LoopRV], windows: list[LoopRV]) -> None:
    """Writes a buffered block of output rows to the output."""
    rows = sch.get_sblock(nest.ROWS)
    line = conv.output_size[1] * (tile.row_block if plan.matrix else 1)
    sch.transform_layout(rows, ("write", 0), lambda n, jo, m, x, ji: (n, jo, m * line + x, ji))
    if conv.layout == "NCHW" and _whole_blocks(conv, tile):
        write_transposed(sch, conv, (tile.row_block, tile.lanes), channels[1], windows)
    elif _whole_blocks(conv, tile):
        unroll(sch, channels[0])
        sch.vectorize(channels[1])


def _channel_vectors(
    sch: Schedule, conv: Conv2d, tile: Tile, plan: Plan, row: LoopRV, col: LoopRV, vector: LoopRV, lane: LoopRV
) -> None:
    """Tiles the loops that consume the accumulators (over the buffer or the output), and computes the product under each register tile."""
    row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, col = sch.split(col, [None, tile.cols])
    sch.reorder(row_tile, col_tile, row, col, vector, lane)
    unroll(sch, row, col, vector)
    sch.vectorize(lane)
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, col_tile, preserve_unit_loops=True)
    sch.set_scope(product, 0, "local")
    _micro_kernel(sch, product, conv, tile, taps=1 if plan.matrix else 3)


def _micro_kernel(sch: Schedule, product: SBlockRV, conv: Conv2d, tile: Tile, taps: int) -> None:
    """The micro-kernel: the sum over K with `rows * cols * vectors` accumulators in registers, unrolled but for the K loops."""
    row, col, channel, *sums = sch.get_loops(product)[-3 - taps :]
    vector, lane = sch.split(channel if tile.axis == "channels" else col, [None, tile.lanes])
    held = [row, col, vector, lane] if tile.axis == "channels" else [row, channel, vector, lane]
    steps: list[LoopRV] = []
    if tile.unroll > 1:
        if taps == 3 and math.prod(conv.kernel) > 1 and tile.order != "uvc":
            steps = [sums.pop()]
        else:
            at = -1 if tile.order == "uvc" else 0
            sums[at], inner = sch.split(sums[at], [None, math.gcd(tile.unroll, int(sch.get(sums[at]).extent))])
            steps = [inner]
    sch.reorder(*sums, *steps, *held)
    unroll(sch, *steps, *held[:3])
    sch.vectorize(lane)
    start = sch.decompose_reduction(product, sums[0])
    *zeros, lane = sch.get_loops(start)[-4:]
    unroll(sch, *zeros)
    sch.vectorize(lane)


def _window_vectors(sch: Schedule, conv: Conv2d, tile: Tile, plan: Plan, channels: list[LoopRV], windows: list[LoopRV]) -> None:
    """Accumulators of neighbouring windows in a vector.

    They need no transpose; bias, residual and activation are part of the write-back.
    """
    row, col = windows
    if plan.matrix:
        col = sch.fuse(row, col)
        row_tile, row = sch.split(sch.add_unit_loop(col), [None, 1])
    else:
        row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, vector, lane = sch.split(col, [None, tile.vectors, tile.lanes])
    sch.reorder(row_tile, col_tile, row, *channels, vector, lane)
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, col_tile, preserve_unit_loops=True)
    sch.set_scope(product, 0, "local")
    sch.transform_layout(product, ("write", 0), lambda n, jo, m, x, ji: (n, jo, m, ji, x))
    unroll(sch, row, *channels, vector)
    sch.vectorize(lane)
    _micro_kernel(sch, product, conv, tile, taps=1 if plan.matrix else 3)


def _stage(sch: Schedule, conv: Conv2d, tile: Tile, plan: Plan, step: LoopRV) -> None:
    """Schedules a transform: by itself, parallel over its outer axes, or inside each parallel step. LLVM vectorizes its plain rows.

    before                                         after
        for k in K, p in P:                            for c, u, v, m, x:
            M[k, p] = I[k // 9, p // Wo + ..., ...]        M[...] = I[c, m*s + u, x*s + v]
    """
    block = sch.get_sblock(plan.stage)
    if plan.where == "row_block":
        sch.compute_at(block, step, preserve_unit_loops=True)
    rank = len(sch.get(block).iter_vars)
    loops = sch.get_loops(block)[-rank:]
    extents = {"u": conv.kernel[0], "v": conv.kernel[1], "x": conv.output_size[1]}
    parts: list[LoopRV] = []
    for axis, loop in enumerate(loops):
        letters = dict(plan.fused).get(axis, "")
        inner = [extents[letter] for letter in (tile.order.replace("c", "") if letters == "uv" else letters)]
        parts += sch.split(loop, [None, *inner]) if inner else [loop]
    if plan.where == "root":
        sch.parallel(sch.fuse(*parts[:3]))
