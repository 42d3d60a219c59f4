"""Depthwise layers on CPUs: a sum over a kernel's taps, in vectors of channels or of windows, without a broadcast of inputs.

    parallel (channel pass, n, block of output rows)
        for channel block in pass
            pad = padded input rows                    # level-1 cache, in the order of the vectors
            for row tile, column tile in the block of output rows
                sums = 0                               # registers
                for u, v: sums += filter[u, v, :] * pad
                out = act(sums + bias)                 # or the same by way of a buffer of rows
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.compute import depthwise, nest
from im2win.schedules.cpu.transpose import transpose_intrin
from im2win.schedules.cpu_depthwise.conditions import Conditions
from im2win.schedules.cpu_depthwise.tile import DepthwiseTile, in_place
from im2win.schedules.cpu_winograd.transpose import into_intrin
from im2win.spec.conv2d import Conv2d

MOST_TAPS = 12  # columns of a kernel that are unrolled
MOST_TILES = 4  # register tiles of a row that are unrolled


def define(conv: Conv2d, tile: DepthwiseTile) -> list[te.Tensor]:
    """The definition that a tile schedules."""
    if in_place(conv, tile):
        return depthwise.channels(conv, tile.pack)
    if tile.axis == "channels":
        return depthwise.channels_staged(conv, tile.pack, tile.row_block)
    return depthwise.windows(conv, tile.pack, tile.row_block, tile.lanes)


def holds_back(conv: Conv2d, tile: DepthwiseTile) -> bool:
    """Whether output rows are buffered: where vectors of the product are not vectors of the output."""
    if in_place(conv, tile):
        return False
    if tile.axis == "windows":
        return conv.output_size[1] % tile.lanes > 0
    return conv.layout == "NCHW"


def schedule(conv: Conv2d, tile: DepthwiseTile) -> Schedule:
    """Schedules a definition of `compute.depthwise` with a legal tile."""
    sch = Schedule(te.create_prim_func(define(conv, tile)), enable_check=False)
    block, channel, windows = _output_loops(sch, conv, tile)
    held = holds_back(conv, tile)
    if conv.residual and not _turns_back(conv, tile):
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    elif conv.residual:
        sch.compute_at(sch.get_sblock(nest.TRANSPOSED), channel[0], preserve_unit_loops=True)
    if not held:
        sch.compute_inline(sch.get_sblock(nest.ROWS))
    if in_place(conv, tile):
        _in_place(sch, conv, tile, block, channel, windows)
        return sch
    if held:
        sch.compute_at(sch.get_sblock(nest.ROWS), block, preserve_unit_loops=True)
    sch.compute_at(sch.get_sblock(nest.CONV), block, preserve_unit_loops=True)
    _stage(sch, conv, tile, block)
    if held:
        row, col, ji = sch.get_loops(sch.get_sblock(nest.ROWS))[-3:]
        _register_tile(sch, conv, tile, row, col, ji)
        _write_back(sch, conv, tile, channel, windows)
    else:
        _register_tile(sch, conv, tile, *windows, *channel)
    return sch


def inner_tiles(conv: Conv2d, tile: DepthwiseTile) -> int:
    """Register tiles between the first and the last of a row, if all their windows are inside the input; else 0."""
    (_, out_w), (_, left, _, _) = conv.output_size, conv.padding
    count, step = -(-out_w // tile.cols), tile.cols * conv.stride[1]
    inside = (place * step >= left and (place + 1) * step - conv.stride[1] + conv.window[1] - left <= conv.width for place in range(1, count - 1))
    return max(count - 2, 0) if all(inside) else 0


def _in_place(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, block: LoopRV, channel: list[LoopRV], windows: list[LoopRV]) -> None:
    """Register tiles in the order of the input in memory: all channel blocks of a tile's columns before the next columns."""
    row, col = windows
    row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, col = sch.split(col, [None, tile.cols])
    sch.reorder(row_tile, col_tile, block, row, col, *channel)
    if not inner_tiles(conv, tile) and int(sch.get(col_tile).extent) <= MOST_TILES:
        sch.unroll(col_tile)  # so that conditions on columns become constants
    _unroll(sch, row, col, channel[0])
    sch.vectorize(channel[1])
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, block, preserve_unit_loops=True)
    sch.set_scope(product, 0, "local")
    _sum(sch, product, conv, tile)


def _turns_back(conv: Conv2d, tile: DepthwiseTile) -> bool:
    """Whether shuffles transpose buffered rows of [window][channel] to the output."""
    return tile.axis == "channels" and conv.layout == "NCHW"


def _output_loops(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> tuple[LoopRV, list[LoopRV], list[LoopRV]]:
    """Splits the output into parallel steps; returns (channel block of the pass, channel loops inside it, [row, column])."""
    loops = sch.get_loops(sch.get_sblock(nest.OUT))
    n, j, m, x = loops if conv.layout == "NCHW" else (loops[0], loops[3], loops[1], loops[2])
    inside = [tile.vectors, tile.lanes] if tile.axis == "channels" else [1]
    passes, block, *channel = sch.split(j, [None, tile.pass_blocks, *inside])
    row_blocks, row = sch.split(m, [None, tile.row_block])
    order = [*channel, row, x] if conv.layout == "NCHW" else [row, x, *channel]
    sch.reorder(passes, n, row_blocks, block, *order)
    sch.parallel(sch.fuse(passes, n, row_blocks))
    return block, channel, [row, x]


def _stage(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, block: LoopRV) -> None:
    """Copies the padded input rows of a channel block into the order of the vectors."""
    pad = sch.get_sblock(depthwise.PAD)
    sch.compute_at(pad, block, preserve_unit_loops=True)
    if tile.axis == "windows":
        return  # LLVM vectorizes plain rows
    plain = conv.out_channels == conv.groups
    row, _, channel = sch.get_loops(pad)[-3:]
    if plain or conv.layout == "NCHW":
        vector, lane = sch.split(channel, [None, tile.lanes])
        sch.unroll(vector)
        sch.vectorize(lane)
    if conv.layout == "NCHW":
        turned = sch.get_sblock(depthwise.TURNED)
        sch.compute_at(turned, row, preserve_unit_loops=True)
        if plain and conv.width > 1:
            col, channel = sch.get_loops(turned)[-2:]
            if tile.vectors > 1:
                vector, lane = sch.split(channel, [None, tile.lanes])
                sch.reorder(vector, col, lane)
            sch.tensorize(col, into_intrin(conv.width, tile.lanes))


def _register_tile(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, row: LoopRV, col: LoopRV, *channel: LoopRV) -> None:
    """Tiles the loops that consume the sums, over a buffer or over the output, and computes the sums of each register tile."""
    row_tile, row = sch.split(row, [None, tile.rows])
    if tile.axis == "channels":
        vector, lane = channel if len(channel) == 2 else sch.split(channel[0], [None, tile.lanes])
        col_tile, col = sch.split(col, [None, tile.cols])
        sch.reorder(row_tile, col_tile, row, col, vector, lane)
        _unroll(sch, row, col, vector)
    else:
        col_tile, vector, lane = sch.split(col, [None, tile.vectors, tile.lanes])
        sch.reorder(row_tile, col_tile, row, *channel, vector, lane)
        _unroll(sch, row, *channel, vector)
    sch.vectorize(lane)
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, col_tile, preserve_unit_loops=True)
    sch.set_scope(product, 0, "local")
    _sum(sch, product, conv, tile)


def _sum(sch: Schedule, product: SBlockRV, conv: Conv2d, tile: DepthwiseTile) -> None:
    """The sums of a register tile, unrolled but for one loop over taps.

    Inside, neighbouring windows share inputs, which LLVM loads once: columns of a row with axis "channels", rows with axis "windows",
    where a vector at another column is another load.
    """
    row, col, channel, u, v = sch.get_loops(product)[-5:]
    if tile.axis == "channels":
        vector, lane = sch.split(channel, [None, tile.lanes])
        taps, held = [u, row, v], [col, vector, lane]
    else:
        vector, lane = sch.split(col, [None, tile.lanes])
        taps, held = [v, u], [row, channel, vector, lane]
    sch.reorder(*taps, *held)
    for tap in taps[1:]:
        if int(sch.get(tap).extent) <= MOST_TAPS:
            sch.unroll(tap)
    _unroll(sch, *held[:-1])
    sch.vectorize(lane)
    *zeros, lane = sch.get_loops(sch.decompose_reduction(product, taps[0]))[-4:]
    _unroll(sch, *zeros)
    sch.vectorize(lane)


def _write_back(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, channel: list[LoopRV], windows: list[LoopRV]) -> None:
    """Writes buffered rows to the output: transposed by shuffles, or as rows that LLVM vectorizes, with masks where they end."""
    if not _turns_back(conv, tile):
        return
    rows, line = sch.get_sblock(nest.ROWS), conv.output_size[1]
    sch.transform_layout(rows, ("write", 0), lambda n, jo, m, x, ji: (n, jo, m * line + x, ji))
    intrin = transpose_intrin(tile.row_block, line, tile.lanes)
    if not conv.residual:
        sch.tensorize(channel[1], intrin)
        return
    sch.tensorize(sch.get_loops(sch.get_sblock(nest.TRANSPOSED))[-3], intrin)
    _, lane = sch.split(sch.fuse(*windows), [None, tile.lanes])
    sch.vectorize(lane)


def _unroll(sch: Schedule, *loops: Any) -> None:
    for loop in loops:
        sch.unroll(loop)


def module(conv: Conv2d, tile: DepthwiseTile, name: str) -> tvm.IRModule:
    """A module to compile, with one function `name`, whose loops end without conditions inside."""
    function = schedule(conv, tile).mod["main"].with_attr("global_symbol", name)
    inner = inner_tiles(conv, tile) if in_place(conv, tile) else 0
    return tvm.IRModule({name: function.with_body(Conditions(conv, inner).placed(function.body))})
