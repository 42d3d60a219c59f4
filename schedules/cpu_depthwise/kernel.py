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

import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from im2win.compute import depthwise, nest
from im2win.schedules.cpu.loops import unroll, write_transposed
from im2win.schedules.cpu_depthwise.conditions import Conditions
from im2win.schedules.cpu_depthwise.rows import vectorised
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


def schedule(conv: Conv2d, tile: DepthwiseTile) -> Schedule:
    """Schedules a definition of `compute.depthwise` with a legal tile."""
    sch = Schedule(te.create_prim_func(define(conv, tile)), enable_check=False)
    if tile.axis == "windows":
        _windows(sch, conv, tile)
    elif in_place(conv, tile):
        _in_place(sch, conv, tile)
    else:
        _staged(sch, conv, tile)
    return sch


def inner_tiles(conv: Conv2d, tile: DepthwiseTile) -> int:
    """Register tiles between the first and the last of a row, if all their windows are inside the input; else 0."""
    (_, out_w), (_, left, _, _) = conv.output_size, conv.padding
    count, step = -(-out_w // tile.cols), tile.cols * conv.stride[1]
    reach = conv.window[1] - conv.stride[1] - left  # of a tile's last window beyond the tile's first input
    inside = (place * step >= left and (place + 1) * step + reach <= conv.width for place in range(1, count - 1))
    return max(count - 2, 0) if all(inside) else 0


def _in_place(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> None:
    """Register tiles in the order of the input in memory: all channel blocks of a tile's columns before the next columns."""
    block, channel, (row, col) = _output_loops(sch, conv, tile)
    if conv.residual:
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    sch.compute_inline(sch.get_sblock(nest.ROWS))
    row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, col = sch.split(col, [None, tile.cols])
    sch.reorder(row_tile, col_tile, block, row, col, *channel)
    if not inner_tiles(conv, tile) and int(sch.get(col_tile).extent) <= MOST_TILES:
        sch.unroll(col_tile)  # so that conditions on columns become constants
    unroll(sch, row, col, channel[0])
    sch.vectorize(channel[1])
    _sum(sch, tile, block)


def _staged(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> None:
    """Vectors of channels of a padded copy. In NCHW they are transposed on the way in and, in a buffer of rows, on the way out."""
    block, channel, windows = _output_loops(sch, conv, tile)
    nchw = conv.layout == "NCHW"
    if conv.residual and nchw:
        sch.compute_at(sch.get_sblock(nest.TRANSPOSED), channel[0], preserve_unit_loops=True)
    elif conv.residual:
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    if nchw:
        sch.compute_at(sch.get_sblock(nest.ROWS), block, preserve_unit_loops=True)
    else:
        sch.compute_inline(sch.get_sblock(nest.ROWS))
    sch.compute_at(sch.get_sblock(nest.CONV), block, preserve_unit_loops=True)
    _stage(sch, conv, tile, block)
    row, col = windows
    if nchw:
        row, col, ji = sch.get_loops(sch.get_sblock(nest.ROWS))[-3:]
        channel_of_rows = sch.split(ji, [None, tile.lanes])
    vector, lane = channel_of_rows if nchw else channel
    row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, col = sch.split(col, [None, tile.cols])
    sch.reorder(row_tile, col_tile, row, col, vector, lane)
    unroll(sch, row, col, vector)
    sch.vectorize(lane)
    _sum(sch, tile, col_tile)
    if nchw:
        rows, line = sch.get_sblock(nest.ROWS), conv.output_size[1]
        sch.transform_layout(rows, ("write", 0), lambda n, jo, m, x, ji: (n, jo, m * line + x, ji))
        write_transposed(sch, conv, (tile.row_block, tile.lanes), channel[1], windows)


def _windows(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> None:
    """Vectors of neighbouring windows. All their lanes are computed, and those that the output has are written."""
    rows, out = sch.get_sblock(nest.ROWS), sch.get_sblock(nest.OUT)
    if conv.residual:
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    n, channel, row, col, unit = sch.get_loops(rows)
    passes, block = sch.split(channel, [None, tile.pass_blocks])
    row_blocks, row = sch.split(row, [None, tile.row_block])
    sch.reorder(passes, n, row_blocks, block, row, col, unit)
    sch.parallel(sch.fuse(passes, n, row_blocks))
    for name in (nest.CONV, depthwise.PAD):
        sch.compute_at(sch.get_sblock(name), block, preserve_unit_loops=True)
    row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, vector, lane = sch.split(col, [None, tile.vectors, tile.lanes])
    sch.reorder(row_tile, col_tile, row, unit, vector, lane)
    unroll(sch, row, unit, vector)
    sch.vectorize(lane)
    sch.set_scope(rows, 0, "local")
    _sum(sch, tile, col_tile)
    sch.reverse_compute_at(out, col_tile, preserve_unit_loops=True)
    row, col = sch.get_loops(out)[-2:]
    vector, lane = sch.split(col, [None, tile.lanes])
    unroll(sch, row, vector)
    sch.vectorize(lane)


def _output_loops(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> tuple[LoopRV, list[LoopRV], list[LoopRV]]:
    """Splits the output into parallel steps; returns (channel block of the pass, channel loops inside it, [row, column])."""
    loops = sch.get_loops(sch.get_sblock(nest.OUT))
    n, j, m, x = loops if conv.layout == "NCHW" else (loops[0], loops[3], loops[1], loops[2])
    passes, block, *channel = sch.split(j, [None, tile.pass_blocks, tile.vectors, tile.lanes])
    row_blocks, row = sch.split(m, [None, tile.row_block])
    order = [*channel, row, x] if conv.layout == "NCHW" else [row, x, *channel]
    sch.reorder(passes, n, row_blocks, block, *order)
    sch.parallel(sch.fuse(passes, n, row_blocks))
    return block, channel, [row, x]


def _stage(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, block: LoopRV) -> None:
    """Copies the padded input rows of a channel block into the order of the vectors."""
    pad = sch.get_sblock(depthwise.PAD)
    sch.compute_at(pad, block, preserve_unit_loops=True)
    plain = conv.out_channels == conv.groups
    row, _, channel = sch.get_loops(pad)[-3:]
    if plain or conv.layout == "NCHW":
        vector, lane = sch.split(channel, [None, tile.lanes])
        sch.unroll(vector)
        sch.vectorize(lane)
    if conv.layout == "NCHW":
        turned = sch.get_sblock(depthwise.TURNED)
        sch.compute_at(turned, row, preserve_unit_loops=True)
        if plain and depthwise.columns_read(conv) > 1:
            col, channel = sch.get_loops(turned)[-2:]
            if tile.vectors > 1:
                vector, lane = sch.split(channel, [None, tile.lanes])
                sch.reorder(vector, col, lane)
            sch.tensorize(col, into_intrin(depthwise.columns_read(conv), tile.lanes))


def _sum(sch: Schedule, tile: DepthwiseTile, place: LoopRV) -> None:
    """The sums of a register tile below the loop `place`, unrolled but for one loop over taps.

    Inside, neighbouring windows share inputs, which LLVM loads once: columns of a row with axis "channels", rows with axis "windows",
    where a vector at another column is another load.
    """
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, place, preserve_unit_loops=True)
    sch.set_scope(product, 0, "local")
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
    unroll(sch, *held[:-1])
    sch.vectorize(lane)
    *zeros, lane = sch.get_loops(sch.decompose_reduction(product, taps[0]))[-4:]
    unroll(sch, *zeros)
    sch.vectorize(lane)


def module(conv: Conv2d, tile: DepthwiseTile, name: str) -> tvm.IRModule:
    """A module to compile, with one function `name`, whose loops end without conditions inside."""
    function = schedule(conv, tile).mod["main"].with_attr("global_symbol", name)
    inner = inner_tiles(conv, tile) if in_place(conv, tile) else 0
    body = Conditions(conv, inner).placed(function.body)
    return tvm.IRModule({name: function.with_body(vectorised(conv, tile.lanes, body) if tile.axis == "windows" else body)})
