"""Winograd on CPUs: a block of tile rows at a time, with everything between input and output in a core's caches.

A parallel step computes a block of tile rows, or a few small images, for a pass of channel blocks. It transposes the input rows of the
block to vectors of channels and transforms them. For every channel block it multiplies position by position: the register tile is `cols`
Winograd tiles x `vectors` vectors of output channels, with `vectors` loads of filters and `cols` broadcasts a step, as in `cpu.kernel`.
Vectors of output channels are then transformed back and written, transposed to rows again where the layout is NCHW.

    parallel (channel pass, images, row block)            # row block: some rows of tiles
        for channel vector
            transposed, padded                            # input rows, transposed
            for tile row: down; input = down across       # V[channel vector][i][j][tile][channel]
        for channel block in pass
            for i, j, tiles of the register tile
                sums = 0                                  # registers
                for c: sums += filter[i, j, c, :] * V
                M[i, j, tile, :] = sums
            for tile: back (registers); rows = act(back across + bias)
            out = transposed rows (+ residual)

Every row block has the same size. A predicate for each row leaves out output rows beyond the last. Tiles of a row block that the register
tile does not divide are peeled by LoopPartition (`schedules.cpu.loop_peeling`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import te, tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV

from im2win.compute import nest, winograd
from im2win.schedules.cpu import loop_peeling
from im2win.schedules.cpu.loops import unroll
from im2win.schedules.cpu_winograd.tile import WinogradTile
from im2win.schedules.cpu_winograd.transpose import into_intrin, out_intrin
from im2win.spec.conv2d import Conv2d

_SUMS = (nest.CONV, f"{nest.CONV}_init", f"{nest.CONV}_update", f"{nest.CONV}_local")  # blocks of a register tile, whose rest is peeled


def schedule(conv: Conv2d, arguments: Sequence[te.Tensor], tile: WinogradTile) -> Schedule:
    """Schedules `compute.winograd.define` with a legal tile."""
    # TVM's own check cannot see that a row block covers the rows that a predicate leaves, and refuses to transpose them.
    sch = Schedule(te.create_prim_func(list(arguments)), enable_check=False)
    sch.compute_inline(sch.get_sblock(winograd.OUTPUT))
    step, block = _output_transform(sch, tile)
    _write_back(sch, conv, tile, block)
    _product(sch, tile, block)
    _input_transform(sch, conv, tile, step)
    return sch


def _output_transform(sch: Schedule, tile: WinogradTile) -> tuple[LoopRV, LoopRV]:
    """Splits rows into parallel steps and each row block into tiles; returns the step and the channel block of its pass."""
    rows = sch.get_sblock(nest.ROWS)
    n, b, h, w, k = sch.get_loops(rows)
    passes, block = sch.split(b, [None, tile.pass_blocks])
    n, image = sch.split(n, [None, tile.images])
    row_blocks, h = sch.split(h, [None, tile.row_block * tile.outputs])
    sch.reorder(passes, n, row_blocks, block, image, h, w, k)
    step = sch.fuse(passes, n, row_blocks)
    sch.parallel(step)
    (row, i), (col, j) = sch.split(h, [None, tile.outputs]), sch.split(w, [None, tile.outputs])
    vector, lane = sch.split(k, [None, tile.lanes])
    sch.reorder(row, col, vector, i, j, lane)
    unroll(sch, i, j)
    sch.vectorize(lane)
    back = sch.get_sblock(winograd.BACK)
    sch.compute_at(back, vector, preserve_unit_loops=True)
    sch.set_scope(back, 0, "local")
    i, j, lane = sch.get_loops(back)[-3:]
    sch.reorder(j, i, lane)
    unroll(sch, j, i)
    sch.vectorize(lane)
    return step, block


def _write_back(sch: Schedule, conv: Conv2d, tile: WinogradTile, block: LoopRV) -> None:
    """Writes a row block's rows back in the output's layout: transposed by shuffles, or as vectors where channels fill the block."""
    whole = (conv.out_channels // conv.groups) % tile.block == 0
    transposed = whole and conv.layout == "NCHW" and conv.output_size[1] > 1
    out = sch.get_sblock(nest.OUT)
    if conv.residual and transposed:
        sch.reverse_compute_at(sch.get_sblock(nest.TRANSPOSED), block, preserve_unit_loops=True)
        row = _transpose_rows(sch, conv, tile, nest.TRANSPOSED)
        sch.reverse_compute_at(out, row, preserve_unit_loops=True)
        _, lane = sch.split(sch.get_loops(out)[-1], [None, tile.lanes])
        sch.vectorize(lane)
        return
    if conv.residual:
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    sch.reverse_compute_at(out, block, preserve_unit_loops=True)
    if transposed:
        _transpose_rows(sch, conv, tile, nest.OUT)
    elif whole and conv.layout == "NHWC":
        _, lane = sch.split(sch.get_loops(out)[-1], [None, tile.lanes])
        sch.vectorize(lane)


def _transpose_rows(sch: Schedule, conv: Conv2d, tile: WinogradTile, name: str) -> LoopRV:
    """Transposes each row of a row block, a vector of channels at a time; returns the loop over rows."""
    channel, row, col = sch.get_loops(sch.get_sblock(name))[-3:]
    vector, lane = sch.split(channel, [None, tile.lanes])
    sch.reorder(vector, row, lane, col)
    sch.blockize(lane)  # the predicate of the row stays outside
    sch.tensorize(sch.get_loops(sch.get_sblock(name))[0], out_intrin(conv.output_size[1], tile.lanes))
    return row


def _product(sch: Schedule, tile: WinogradTile, block: LoopRV) -> None:
    """M of a row block and channel block: for every position, register tiles over the row block's tiles."""
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, block, preserve_unit_loops=True)
    stored = sch.cache_write(product, 0, "local")
    col, channel = sch.get_loops(stored)[-2:]
    cols, col = sch.split(col, [None, tile.cols])
    vector, lane = sch.split(channel, [None, tile.lanes])
    unroll(sch, col, vector)
    sch.vectorize(lane)
    sch.compute_at(product, cols, preserve_unit_loops=True)
    col, channel, depth, inner = sch.get_loops(product)[-4:]
    vector, lane = sch.split(channel, [None, tile.lanes])
    steps, inner = sch.split(inner, [None, tile.unroll])
    sch.reorder(depth, steps, inner, col, vector, lane)
    unroll(sch, inner, col, vector)
    sch.vectorize(lane)
    *_, col, vector, lane = sch.get_loops(sch.decompose_reduction(product, depth))
    unroll(sch, col, vector)
    sch.vectorize(lane)


def _input_transform(sch: Schedule, conv: Conv2d, tile: WinogradTile, step: LoopRV) -> None:
    """V of a row block, a vector of channels at a time: the padded rows, then one row of tiles after the other."""
    given = sch.get_sblock(winograd.INPUT)
    sch.compute_at(given, step, preserve_unit_loops=True)
    channel, i, j, p, lane = sch.get_loops(given)[-5:]
    row, col = sch.split(p, [None, winograd.tiles(conv, tile.outputs)[1]])
    sch.reorder(channel, row, i, col, j, lane)
    unroll(sch, j)
    sch.vectorize(lane)
    down = sch.get_sblock(winograd.DOWN)
    sch.compute_at(down, row, preserve_unit_loops=True)
    i, col, lane = sch.get_loops(down)[-3:]
    sch.reorder(col, i, lane)
    unroll(sch, i)
    sch.vectorize(lane)
    padded = sch.get_sblock(winograd.PADDED)
    sch.compute_at(padded, channel, preserve_unit_loops=True)
    row, col, lane = sch.get_loops(padded)[-3:]
    partial = (conv.in_channels // conv.groups) % tile.depth
    if conv.layout == "NHWC":
        if not partial:
            sch.vectorize(lane)
        return
    sch.vectorize(lane)
    transposed = sch.get_sblock(winograd.TRANSPOSED_IN)
    sch.compute_at(transposed, row, preserve_unit_loops=True)
    if not partial and tile.depth >= 4 and conv.width > 1:
        sch.tensorize(sch.get_loops(transposed)[-2], into_intrin(conv.width, tile.depth))


def mark_sums(stmt: Any) -> Any:
    """Marks the predicates of the register tile's blocks as likely, so that LoopPartition cuts them away.

    Other predicates are not marked: one on output rows would cut the parallel loop, and its last step would run after all others.
    """
    if isinstance(stmt, SBlockRealize):
        old = stmt.block
        inside = (old.init, old.alloc_buffers, old.match_buffers, old.annotations)
        block = SBlock(old.iter_vars, old.reads, old.writes, old.name_hint, mark_sums(old.body), *inside)
        return SBlockRealize(stmt.iter_values, loop_peeling._likely(stmt.predicate) if old.name_hint in _SUMS else stmt.predicate, block)
    if isinstance(stmt, tirx.For):
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, mark_sums(stmt.body), stmt.thread_binding, stmt.annotations)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([mark_sums(child) for child in stmt.seq])
    return stmt


def held_bytes(conv: Conv2d, tile: WinogradTile) -> int:
    """Bytes of packed filters beyond the filters themselves."""
    return conv.itemsize * max(math.prod(tile.pack.shape(conv)) - math.prod(conv.filter_shape), 0)


def module(conv: Conv2d, arguments: Sequence[te.Tensor], tile: WinogradTile, name: str) -> tvm.IRModule:
    """A module to compile, with one function `name`, the predicates of its register tiles marked."""
    function = schedule(conv, arguments, tile).mod["main"].with_attr("global_symbol", name)
    return tvm.IRModule({name: function.with_body(mark_sums(function.body))})
