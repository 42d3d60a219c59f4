"""Dense layers on tensor cores as a TVM schedule: thread blocks, steps in shared memory, warps, tensor intrinsics.

One schedule for every algorithm, over the definition that the CPU's schedules use (`gemm`), and one for every element type (`intrinsics`):

    [threads: store the tensor of windows, where the algorithm has one]            # a kernel of its own
    thread block (channels, outputs), warp (channels, outputs):
        sums = 0                                                                   # registers of the warp
        for step of the sum:
            filters, windows = those of a later step                               # lines in shared memory, a ring of buffers
            for k in step:                                                         # unrolled
                rows, columns = ldmatrix(filters, windows)                         # registers of the warp
                sums += mma(rows, columns)
        out = convert(act(scale * (sums + bias)))                                  # from registers

Neighbouring columns of a product are neighbours in the registers of a lane. They are outputs in NCHW and channels in NHWC, so that two
neighbours in memory are stored as one vector. Lines in shared memory are an odd number of 16 bytes apart, so that the eight lines of a
matrix lie in different banks. The reconstructor takes a barrier out of a step and makes copies asynchronous, as the tile says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import te
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import IndexMap

from im2win.packing.mma_fragments import CudaPack
from im2win.schedules.cuda.legality.scheduled_mma import along_sum, filter_elements, window_elements
from im2win.schedules.cuda.primitives import CHUNK, WORD
from im2win.schedules.cuda.scheduled import intrinsics
from im2win.schedules.cuda.scheduled.dense import store_windows
from im2win.schedules.cuda.scheduled.gemm import Gemm, Stage, gemm_in_lines
from im2win.schedules.cuda.scheduled.intrinsics import LANES, LINES, operand_place, step, sum_place
from im2win.schedules.cuda.tiles.scheduled_mma import ScheduledMmaTile
from im2win.spec.conv2d import Conv2d


def pack_of(conv: Conv2d, tile: ScheduledMmaTile) -> CudaPack:
    """The packing of filters: a step's of a channel are contiguous."""
    return CudaPack("lines", tile.block_m, tile.order, tile.block_k // tile.arithmetic.slab)


def kernel(conv: Conv2d, tensors: Sequence[te.Tensor], stage: Stage, tile: ScheduledMmaTile) -> Any:
    """The scheduled kernels of a definition: one function over the tensors of `conv.arguments`."""
    form = gemm_in_lines(conv, tensors, stage, (tile.block_m, tile.block_n, tile.block_k))
    if form.stage is not None:
        store_windows(form.sch, form.stage)
    _Tensorized(conv, form, tile, stage.stored).schedule()
    return form.sch.mod["main"]


class _Tensorized:
    """Schedules a product in lines. Rows of instructions are channels in NCHW, and outputs in NHWC."""

    def __init__(self, conv: Conv2d, form: Gemm, tile: ScheduledMmaTile, stored: bool) -> None:
        self._conv, self._form, self._tile, self._sch, self._stored = conv, form, tile, form.sch, stored
        self._channels_are_rows = conv.layout == "NCHW"
        self._word, self._step = WORD // conv.itemsize, step(conv.dtype)

    def schedule(self) -> None:
        sch, tile, form = self._sch, self._tile, self._form
        warp, steps, inner = self._product()
        self._copy(form.windows, steps, window_elements(self._conv, tile, self._stored), along_sum(self._conv, tile, self._stored))
        self._copy(form.filters, steps, filter_elements(self._conv, tile), along=True)
        for operand in (0, 1):
            self._load(operand, inner)
        sch.reverse_compute_at(form.out, warp, preserve_unit_loops=True)
        self._place_sums()
        self._write()
        self._clear(sch.decompose_reduction(form.product, steps))
        sch.tensorize(sch.get_loops(form.product)[-3], intrinsics.product(self._conv.dtype, not self._channels_are_rows))
        if tile.stages > 1:
            sch.annotate(steps, "software_pipeline_stage", [0, 0, tile.stages - 1])
            sch.annotate(steps, "software_pipeline_order", [0, 1, 2])

    def _product(self) -> tuple[LoopRV, LoopRV, LoopRV]:
        """Tiles the product. Returns the loops of warps, of steps, and of instructions along the sum."""
        sch, tile, product = self._sch, self._tile, self._form.product
        if self._channels_are_rows:
            blocks, channel, output, depth = sch.get_loops(product)
        else:
            sch.transform_block_layout(product, lambda jo, ji, p, k: (jo, p, ji, k))
            blocks, output, channel, depth = sch.get_loops(product)
        warp_row, channel_tile, channel = sch.split(channel, [tile.warps[0], None, LINES])
        output_blocks, warp_column, output_tile, output = sch.split(output, [None, tile.warps[1], tile.warp_n // LINES, LINES])
        steps, inner, depth = sch.split(depth, [None, tile.block_k // self._step, self._step])
        tiles, lines = ((channel_tile, output_tile), (channel, output)) if self._channels_are_rows else (
            (output_tile, channel_tile), (output, channel)
        )  # fmt: skip
        sch.reorder(blocks, output_blocks, warp_row, warp_column, steps, inner, *tiles, *lines, depth)
        warp = sch.fuse(warp_row, warp_column)
        for loop, axis in ((blocks, "blockIdx.y"), (output_blocks, "blockIdx.x"), (warp, "threadIdx.y")):
            sch.bind(loop, axis)
        for loop in (inner, *tiles):
            sch.unroll(loop)
        return warp, steps, inner

    def _place_sums(self) -> None:
        """Sums in registers of a warp, as instructions leave them there."""
        sch, rows_first = self._sch, self._channels_are_rows

        def place(channel: Any, output: Any) -> tuple[Any, ...]:
            row, column = (channel, output) if rows_first else (output, channel)
            return row // LINES, column // LINES, *sum_place(row % LINES, column % LINES)

        sch.set_scope(self._form.product, 0, "warp")
        sch.transform_layout(self._form.product, ("write", 0), place)

    def _copy(self, block: SBlockRV, steps: LoopRV, width: int, along: bool) -> None:
        """Copies a step's operand to shared memory, `width` elements at a time; neighbouring threads copy along the sum, or across it."""
        sch, tile, conv = self._sch, self._tile, self._conv
        sch.set_scope(block, 0, "shared.dyn")
        sch.compute_at(block, steps, preserve_unit_loops=True)
        unit = CHUNK // conv.itemsize
        sch.storage_align(block, 0, -2, 2 * unit, unit)
        line, k = sch.get_loops(block)[-2:]
        if not along:
            sch.reorder(k, line)
            line, k = k, line
        rest, warp, lane, vector = sch.split(sch.fuse(line, k), [None, tile.threads // LANES, LANES, width])
        sch.bind(warp, "threadIdx.y")
        sch.bind(lane, "threadIdx.x")
        sch.unroll(rest)
        if width > 1:
            sch.vectorize(vector)

    def _load(self, operand: int, inner: LoopRV) -> None:
        """Loads what a warp needs of an operand for one instruction along the sum; operand 0 are windows, 1 filters."""
        sch, word, depth = self._sch, self._word, self._step
        rows = (operand == 1) == self._channels_are_rows

        def place(*axes: Any) -> tuple[Any, ...]:
            *block, line, k = axes
            return *block, line // LINES, k // depth, *operand_place(line % LINES, k % depth, word, rows)

        loaded = sch.cache_read(self._form.product, operand, "warp")
        sch.compute_at(loaded, inner, preserve_unit_loops=True)
        axes = len(sch.get(loaded).writes[0].region)
        sch.transform_layout(loaded, ("write", 0), IndexMap.from_func(place, ndim=axes, index_dtype="int32"))
        line, _ = sch.get_loops(loaded)[-2:]
        tiles, line = sch.split(line, [None, LINES])
        sch.unroll(tiles)
        sch.tensorize(line, intrinsics.load(self._conv.dtype, rows))

    def _clear(self, init: SBlockRV) -> None:
        """Clears the sums of a warp."""
        *tiles, row, _ = self._sch.get_loops(init)[-4:]
        for loop in tiles:
            self._sch.unroll(loop)
        self._sch.tensorize(row, intrinsics.fill(self._conv.dtype))

    def _write(self) -> None:
        """Stores a lane's outputs, two neighbours in memory as a vector where they begin at even places."""
        sch, conv = self._sch, self._conv
        channel, output = sch.get_loops(self._form.out)[-2:]
        row, column = (channel, output) if self._channels_are_rows else (output, channel)
        row_tile, high, group = sch.split(row, [None, 2, 8])
        column_tile, half, pair, one = sch.split(column, [None, 2, 4, 2])
        sch.reorder(row_tile, column_tile, half, high, group, pair, one)
        sch.bind(sch.fuse(group, pair), "threadIdx.x")
        for loop in (row_tile, column_tile, half, high):
            sch.unroll(loop)
        even = conv.out_channels if conv.layout == "NHWC" else math.prod(conv.output_size)
        (sch.unroll if even % 2 else sch.vectorize)(one)

