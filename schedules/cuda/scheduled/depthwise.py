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

Channels first, neighbours in memory are neighbouring windows, which overlap. A thread has a tile of outputs of one channel, loads elements
one by one, and its neighbours load the elements beside them:

    thread block (some tiles of outputs, in the order of memory), thread (tile): as above, without the lanes
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
    return ChannelPack(1 if conv.layout == "NCHW" else conv.out_channels)


def kernel(conv: Conv2d, tile: DepthwiseTile) -> Any:
    """The scheduled kernel over the tensors of `conv.arguments`."""
    pack = pack_of(conv, tile)
    if conv.layout == "NCHW":
        definition = depthwise.windows(conv, pack, tile.rows, tile.cols, TARGET)
    else:
        definition = depthwise.channels_staged(conv, pack, tile.rows, TARGET, tile.cols)
    sch = Schedule(te.create_prim_func(definition))
    for name in (nest.ROWS, *([nest.TRANSPOSED] if conv.residual else [])):
        sch.compute_inline(sch.get_sblock(name))
    (_windows if conv.layout == "NCHW" else _vectors_of_channels)(sch, conv, tile)
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
    _sums(sch, tile, thread, vectors=True)


def _windows(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> None:
    """Channels first: tiles of outputs, in the order of memory, become threads."""
    n, channel, row, col = sch.get_loops(sch.cache_write(sch.get_sblock(TARGET.out), 0, "local"))
    row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, col = sch.split(col, [None, tile.cols])
    sch.reorder(n, channel, row_tile, col_tile, row, col)
    tasks, task = sch.split(sch.fuse(n, channel, row_tile, col_tile), [None, tile.tasks])
    _bound(sch, [tasks], "blockIdx.x")
    thread = _bound(sch, [task], "threadIdx.x")
    _unrolled(sch, [row])
    if tile.stores(conv) == 1:
        sch.vectorize(col)
    else:
        sch.unroll(col)
    _sums(sch, tile, thread)


def _bound(sch: Schedule, loops: list[LoopRV], axis: str) -> LoopRV:
    """The one loop that loops become, bound to the axis of a thread."""
    loop = sch.fuse(*loops)
    sch.bind(loop, axis)
    return loop


def _sums(sch: Schedule, tile: DepthwiseTile, thread: LoopRV, vectors: bool = False) -> None:
    """The outputs of a thread, their sums, filters and inputs, which are loaded as vectors of channels, or one by one."""
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
    pad = sch.get_sblock(depthwise.PAD)
    sch.compute_at(pad, thread if tile.staged == "window" else u, preserve_unit_loops=True)
    sch.set_scope(pad, 0, "local")
    if vectors:
        _copied(sch, pad, 3)
    else:
        _unrolled(sch, sch.get_loops(pad)[-3:])
    _unrolled(sch, [v, row, col, lane, *([] if tile.staged == "row" else [u])])
    _unrolled(sch, sch.get_loops(sch.decompose_reduction(product, u))[-3:])


def _copied(sch: Schedule, copy: SBlockRV, count: int) -> None:
    """Unrolls the last loops of a copy; the last one is a vector."""
    *others, lane = sch.get_loops(copy)[-count:]
    _unrolled(sch, others)
    sch.vectorize(lane)


def _unrolled(sch: Schedule, loops: list[LoopRV]) -> None:
    for loop in loops:
        sch.unroll(loop)
