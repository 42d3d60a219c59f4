"""Depthwise layers on GPUs: a thread computes a small tile of outputs, of neighbouring channels or of one channel.

Such a layer is bound by memory. Channels last, a thread loads up to 16 bytes of channels at a time, multiplies them on CUDA cores as they
are reused in registers, and stores as many at a time; threads of a block that share inputs find them in level-1 cache:

    thread block (some tiles of outputs, some channels), thread (tile, vector of channels):
        window = padded inputs of the tile              # registers
        sums = 0
        for u:
            taps = filter[u, :, channels]               # registers
            for v, row, col: sums += window * taps
        out = act(sums + bias)                          # registers, then stored

Channels first, neighbours in memory are neighbouring windows, which overlap. Threads copy padded rows of some channels to shared memory:

    thread block (some channels, some rows):
        pad = padded input rows of the channels         # shared memory
        thread (channel, tile of outputs): as above, with pad in place of window
"""

from __future__ import annotations

from typing import Any

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.compute import depthwise, nest
from im2win.packing.cpu_channels import ChannelPack
from im2win.schedules.cuda.epilogue.store import DeviceExpressions
from im2win.schedules.cuda.tiles.depthwise import DepthwiseTile
from im2win.spec.conv2d import Conv2d

TARGET = depthwise.Target(DeviceExpressions, packed_bias=False, out="output")


def pack_of(conv: Conv2d, tile: DepthwiseTile) -> ChannelPack:
    """The packing of filters: channels last a tap of all channels is contiguous, channels first the taps of a channel."""
    return ChannelPack(1 if tile.shared else conv.out_channels)


def kernel(conv: Conv2d, tile: DepthwiseTile) -> Any:
    """The scheduled kernel over the tensors of `conv.arguments`."""
    pack = pack_of(conv, tile)
    if tile.shared:
        definition = depthwise.windows(conv, pack, tile.row_block(conv), tile.cols, TARGET)
    else:
        definition = depthwise.channels_staged(conv, pack, tile.rows, TARGET, tile.cols)
    sch = Schedule(te.create_prim_func(definition))
    for name in (nest.ROWS, *([nest.TRANSPOSED] if conv.residual else [])):
        sch.compute_inline(sch.get_sblock(name))
    (_planes if tile.shared else _vectors_of_channels)(sch, conv, tile)
    return sch.mod["main"]


def _vectors_of_channels(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> None:
    """Channels last: tiles of outputs and vectors of channels become thread blocks and threads."""
    n, row, col, channel = sch.get_loops(sch.cache_write(sch.get_sblock(TARGET.out), 0, "local"))
    row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, col = sch.split(col, [None, tile.cols])
    channels, vector, lane = sch.split(channel, [None, tile.channels, tile.vector])
    sch.reorder(n, row_tile, col_tile, channels, vector, row, col, lane)
    tasks, task = sch.split(sch.fuse(n, row_tile, col_tile), [None, tile.tasks])
    sch.reorder(tasks, channels, task, vector)
    _bound(sch, [tasks, channels], "blockIdx.x")
    thread = _bound(sch, [task, vector], "threadIdx.x")
    _unrolled(sch, [row, col])
    sch.vectorize(lane)
    _sums(sch, tile, thread)


def _planes(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> None:
    """Channels first: some channels and rows become a thread block, tiles of their outputs threads."""
    n, channel, row, col = sch.get_loops(sch.cache_write(sch.get_sblock(TARGET.out), 0, "local"))
    channels, plane = sch.split(channel, [None, tile.channels])
    row_blocks, row_tile, row = sch.split(row, [None, tile.row_block(conv) // tile.rows, tile.rows])
    col_tile, col = sch.split(col, [None, tile.cols])
    sch.reorder(n, channels, row_blocks, plane, row_tile, col_tile, row, col)
    block = _bound(sch, [n, channels, row_blocks], "blockIdx.x")
    thread = _bound(sch, [plane, row_tile, col_tile], "threadIdx.x")
    _unrolled(sch, [row])
    if conv.output_size[1] % tile.cols == 0 and tile.cols in (2, 4, 8):
        sch.vectorize(col)
    else:
        sch.unroll(col)
    _sums(sch, tile, thread)
    _stage(sch, tile, block)


def _bound(sch: Schedule, loops: list[LoopRV], axis: str) -> LoopRV:
    """The one loop that loops become, bound to the axis of a thread."""
    loop = sch.fuse(*loops)
    sch.bind(loop, axis)
    return loop


def _sums(sch: Schedule, tile: DepthwiseTile, thread: LoopRV) -> None:
    """The outputs of a thread, their sums and filters, and its inputs where it holds them itself."""
    out = sch.get_sblock(TARGET.out)
    sch.compute_at(out, thread, preserve_unit_loops=True)
    _unrolled(sch, sch.get_loops(out)[-3:])
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, thread, preserve_unit_loops=True)
    sch.set_scope(product, 0, "local")
    row, col, lane, u, v = sch.get_loops(product)[-5:]
    sch.reorder(u, v, row, col, lane)
    taps = sch.cache_read(product, 1, "local")
    sch.compute_at(taps, u, preserve_unit_loops=True)
    _copied(sch, taps, 2)
    if not tile.shared:
        pad = sch.get_sblock(depthwise.PAD)
        sch.compute_at(pad, thread if tile.staged == "window" else u, preserve_unit_loops=True)
        sch.set_scope(pad, 0, "local")
        _copied(sch, pad, 3)
    _unrolled(sch, [v, row, col, lane, *([] if tile.staged == "row" else [u])])
    _unrolled(sch, sch.get_loops(sch.decompose_reduction(product, u))[-3:])


def _stage(sch: Schedule, tile: DepthwiseTile, block: LoopRV) -> None:
    """Copies padded rows to shared memory, neighbouring elements of a row by neighbouring lanes."""
    pad = sch.get_sblock(depthwise.PAD)
    sch.compute_at(pad, block, preserve_unit_loops=True)
    sch.set_scope(pad, 0, "shared")
    n, channel, row, phase, col = sch.get_loops(pad)[-5:]
    sch.reorder(col, phase)  # as they follow one another in memory
    line, col = sch.fuse(n, channel, row), sch.fuse(col, phase)
    lanes = tile.lanes(*(int(sch.get(loop).extent) for loop in (line, col)))
    rows, of_row = sch.split(line, [None, tile.threads // lanes])
    cols, lane = sch.split(col, [None, lanes])
    sch.reorder(rows, cols, of_row, lane)
    sch.bind(sch.fuse(of_row, lane), "threadIdx.x")
    _unrolled(sch, [cols])


def _copied(sch: Schedule, copy: SBlockRV, count: int) -> None:
    """Unrolls the last loops of a copy; the last one is a vector."""
    *others, lane = sch.get_loops(copy)[-count:]
    _unrolled(sch, others)
    sch.vectorize(lane)


def _unrolled(sch: Schedule, loops: list[LoopRV]) -> None:
    for loop in loops:
        sch.unroll(loop)
