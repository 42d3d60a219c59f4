"""The warp-specialized kernel: persistent thread blocks in which producer warps copy filters and windows, and consumer warpgroups multiply.

One producer warp issues copies of filters, another one TMA boxes of windows. Both run as far ahead as pipeline stages are empty, also
across tiles. With channels first, two more producer warps may rearrange windows, together or in turn, from the stages of one pipeline to
those of another. Consumer warpgroups multiply full stages, release them, and run the epilogue while producers fill the stages of the next
tile.
"""

from __future__ import annotations

import math
from typing import Any, cast

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.epilogue.cluster_reduce import SharedSums
from im2win.schedules.cuda.epilogue.lane_exchange import TileEpilogue, tile_epilogue
from im2win.schedules.cuda.epilogue.output_columns import StagedOutputs
from im2win.schedules.cuda.epilogue.staged_planes import StagedPlanes
from im2win.schedules.cuda.kernels.channels_last_copy import launch_channels_last_copy
from im2win.schedules.cuda.kernels.multistage import arguments
from im2win.schedules.cuda.kernels.pixel_copy import launch_copy
from im2win.schedules.cuda.kernels.window_row_copy import launch_window_row_copy
from im2win.schedules.cuda.loaders.boxes import Boxes
from im2win.schedules.cuda.loaders.line_boxes import LineBoxes
from im2win.schedules.cuda.loaders.raw_boxes import RawBoxes
from im2win.schedules.cuda.loaders.tma_boxes import TmaBoxes
from im2win.schedules.cuda.mainloop.pipeline import Pipeline
from im2win.schedules.cuda.mainloop.registers import left, registers, resident
from im2win.schedules.cuda.mma.wgmma_lines import LineProduct
from im2win.schedules.cuda.mma.wgmma_shared_rows import StagedProduct
from im2win.schedules.cuda.primitives import Arena, Expr, barrier, call, named, pointer
from im2win.schedules.cuda.tile_scheduler.persistent import staged_grid
from im2win.schedules.cuda.tiles.copied_lines import CopiedLines
from im2win.schedules.cuda.tiles.copied_pixels import CopiedPixels, of_pixels
from im2win.schedules.cuda.tiles.fields import copied_elements, field_of, flat
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import LANES, PHASES
from im2win.schedules.cuda.tiles.pixel_lines import PixelLines
from im2win.schedules.cuda.tiles.rearranged import RearrangedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import REARRANGERS, WARP, WarpSpecializedTile
from im2win.schedules.cuda.tiles.window_rows import WindowRows, row_strides
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import STORED


def warp_specialized_kernel(conv: Conv2d, tile: WarpSpecializedTile, gpu: Gpu, name: str) -> Any:
    """The kernel over the tensors of `conv.arguments`."""
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        field = field_of(conv, tile)
        tensors = _tensors(conv, tile, field, gpu)
        boxes = _boxes(conv, field, tensors["data"])
        blocks = staged_grid(conv, tile, gpu)
        with T.launch_thread("blockIdx.x", blocks) as bx, T.launch_thread("threadIdx.x", tile.threads) as tid:
            _Kernel(field, tile.steps(conv), tensors, boxes, blocks, bx, tid).run(gpu)
    return builder.get()


def _tensors(conv: Conv2d, tile: WarpSpecializedTile, field: StagedHaloTile, gpu: Gpu) -> dict[str, Any]:
    """Declares the kernel's tensors and returns flat views of them by name.

    Where a first kernel copies pixels it is launched. "data" is then the copy, in the workspace, and the input an argument before it.
    """
    pack = cast(Any, tile.pack(conv))
    if not isinstance(field, CopiedLines | CopiedPixels | WindowRows):
        return arguments(conv, pack)
    source = named("input", T.arg("input", T.buffer(conv.input_shape, conv.dtype)))
    tensors = arguments(conv, pack, (copied_elements(conv, tile),))
    given = named("input", T.decl_buffer((math.prod(conv.input_shape),), conv.dtype, data=source.data))
    if isinstance(field, CopiedLines):
        launch_copy(conv, field, gpu, given, tensors["data"])
    elif isinstance(field, CopiedPixels):
        launch_channels_last_copy(conv, given, tensors["data"])
    else:
        launch_window_row_copy(conv, given, tensors["data"])
    return tensors


def _boxes(conv: Conv2d, field: StagedHaloTile, source: Any) -> Boxes:
    if isinstance(field, RearrangedHaloTile):
        return RawBoxes(field, source)
    if isinstance(field, PixelLines):
        return LineBoxes(field, source)
    if isinstance(field, WindowRows):
        return TmaBoxes(field.conv, field, source, row_strides(conv))
    return TmaBoxes(of_pixels(conv) if isinstance(field, CopiedPixels) else flat(conv), field, source)


class _Kernel:
    def __init__(
        self, field: StagedHaloTile, steps: int, tensors: dict[str, Any], boxes: Boxes, blocks: int, block: Expr, tid: Expr
    ) -> None:
        conv, tile = field.conv, field.tile
        self._conv, self._tile, self._tensors, self._boxes, self._tid = conv, tile, tensors, boxes, tid
        self._blocks, self._block, self._field = blocks, block, field
        self._steps, self._channel_blocks = steps // tile.sum_blocks, tile.pack(conv).blocks(conv)  # steps that this block computes
        self._parts = math.prod(conv.kernel) // tile.taps  # copies of filters in a step
        work = self._field.output_tiles * self._channel_blocks * tile.sum_blocks
        self._count = (work - block + blocks - 1) // blocks
        warps = LANES // WARP * tile.groups
        stored, f = STORED[tile.dtype], self._field
        arena = Arena(f.shared_bytes, stored)
        producers = tile.rearrangers if tile.rearranged else 0
        self._windows = Pipeline(arena, "windows", f.window_buffer, stored, warps, tile.window_blocks, producers)
        self._raw = Pipeline(arena, "raw", f.raw_buffer, stored, tile.rearrangers, 1) if isinstance(f, RearrangedHaloTile) else None
        self._filters = Pipeline(arena, "filters", f.filter_buffer, stored, warps, tile.filter_blocks)
        self._outputs = arena.take("outputs", (math.prod(f.output_buffer),), conv.out_dtype) if f.stored else None
        self._places = arena.take("places", (f.places,), "int32") if isinstance(f, RearrangedHaloTile) else None
        self._order = arena.take("order", (tile.pingpong,), PHASES)
        self._warps, self._rank = warps, block % tile.cluster
        self._sums = SharedSums(arena, f, tid, self._rank, again=work > blocks) if tile.sum_blocks > 1 else None

    def run(self, gpu: Gpu) -> None:
        """Emits the code of a thread block."""
        tile, tid, blocks = self._tile, self._tid, resident(self._field, gpu)
        call(f"share_multiprocessor<{blocks}>")
        self._begin()
        with T.If(tid < tile.multipliers), T.Then():
            if tile.exchanges:
                call(f"take_registers<{registers(tile, gpu, blocks)}>")
            self._multiply()
        with T.If(tid >= tile.multipliers), T.Then():
            if tile.exchanges:
                call(f"give_registers<{left(tile, gpu, blocks)}>")
            with T.If(tid == tile.multipliers), T.Then():
                self._copy_windows()
            with T.If(tid == tile.multipliers + WARP), T.Then():
                self._copy_filters()
            if self._raw is not None:
                with T.If(tid >= tile.multipliers + 2 * WARP), T.Then():
                    self._rearrange(self._raw)

    def _begin(self) -> None:
        with T.If(self._tid == 0), T.Then():
            self._windows.start()
            if self._raw is not None:
                self._raw.start()
            self._filters.start()
            if self._tile.pingpong > 1:
                with T.unroll(self._tile.pingpong) as i:
                    call(f"init_empty_barrier<{self._warps}>", pointer(self._order, i))
            if self._sums is not None:
                self._sums.start()
        self._clear()
        if self._places is not None:
            cast(RawBoxes, self._boxes).table(self._places, self._tid)
        if self._tile.cluster == 1:
            barrier()
        else:
            call("cluster_barrier")

    def _clear(self) -> None:
        """Clears what windows of outputs read but no TMA box brings: pixels behind the last row of every stage, or all rearranged ones."""
        tile, f = self._tile, self._field
        stages, elements = f.window_buffer
        begin, chunks = (0, elements // tile.unit) if tile.rearranged else (f.copied * tile.units, max(f.reach - f.copied, 0) * tile.units)
        if not chunks:
            return
        for first in range(0, stages * chunks, tile.threads):
            at = first + self._tid
            with T.If(at < stages * chunks), T.Then():
                call("clear_chunk", pointer(self._windows.data, at // chunks, (begin + at % chunks) * tile.unit))
        call("fence_stores")
        if tile.cluster > 1:  # a cluster barrier does not order these stores
            barrier()

    def _tile_of(self, item: Expr) -> tuple[Expr, Expr]:
        """(block of channels, tile of outputs) of a thread block's `item`-th work item.

        Neighbouring thread blocks compute channels of the same tile; blocks that share filters compute neighbouring tiles.
        """
        neighbours = self._tile.filter_blocks  # tiles that the blocks of a cluster compute side by side
        together = neighbours * self._tile.sum_blocks
        work = self._block // together + item * (self._blocks // together)
        return work % self._channel_blocks, work // self._channel_blocks * neighbours + self._block % neighbours

    def _part(self, part: Expr, many: int = 1) -> Expr:
        """Index of this block's step, or of one of `many` parts of it, among those of the whole sum."""
        return part if self._sums is None else self._rank * (self._steps * many) + part

    def _copy_windows(self) -> None:
        steps, pipeline = self._steps, self._raw or self._windows
        with T.serial(self._count) as item, T.serial(steps) as part:
            step = item * steps + part
            pipeline.producer_acquire(step)
            channels, output_tile = self._tile_of(item)
            stage, channel = (pipeline.data, step % pipeline.stages), self._tile.pack(self._conv).first_channel(self._conv, channels)
            self._boxes.copy(stage, output_tile, self._part(part), pipeline.full_barrier(step), channel, self._rank)
        pipeline.drain(self._count * steps)

    def _rearrange(self, raw: Pipeline) -> None:
        steps, windows, warp = self._steps, self._windows, (self._tid - self._tile.multipliers) // WARP - 2
        turns, one = REARRANGERS // self._tile.rearrangers, warp % self._tile.rearrangers  # warps of a step together, or steps in turn
        first = warp // self._tile.rearrangers
        with T.serial((self._count * steps - first + turns - 1) // turns) as turn:
            step = turn * turns + first
            raw.consumer_wait(step)
            windows.producer_acquire(step)
            stages = (windows.data, step % windows.stages), (raw.data, step % raw.stages)
            cast(RawBoxes, self._boxes).rearrange(*stages, self._places, self._tile_of(step // steps)[1], one)
            windows.producer_commit(step)  # all lanes have read the raw box by then
            raw.consumer_release(step)

    def _copy_filters(self) -> None:
        pipeline, per_tile, size, blocks = self._filters, self._steps * self._parts, self._field.filter_buffer[1], self._tile.filter_blocks
        copy = "copy_bulk" if blocks == 1 else f"copy_shared<{blocks}>"
        with T.serial(self._count) as item, T.serial(per_tile) as part:
            step = item * per_tile + part
            pipeline.producer_acquire(step)
            channels, _ = self._tile_of(item)
            place = channels * (per_tile * self._tile.sum_blocks) + self._part(part, self._parts)
            from_ = pointer(self._tensors["filter"], place * size)
            call(copy, pointer(pipeline.data, step % pipeline.stages, 0), from_, size * self._conv.itemsize, pipeline.full_barrier(step))
        pipeline.drain(self._count * per_tile)

    def _multiply(self) -> None:
        conv, tile, windows, filters = self._conv, self._tile, self._windows, self._filters
        kind = LineProduct if isinstance(self._field, PixelLines) else StagedProduct
        product = kind(conv, tile, filters.data, windows.data, self._tid)
        which = self._tid // (LANES * tile.groups)  # the team of ping-pong consumer warpgroups
        with T.serial((self._count - which + tile.pingpong - 1) // tile.pingpong) as round_:
            item = round_ * tile.pingpong + which
            product.clear()
            self._order_wait(item)
            with T.serial(self._steps) as part:
                step = item * self._steps + part
                windows.consumer_wait(step)
                for number in range(self._parts):
                    copy = step * self._parts + number
                    filters.consumer_wait(copy)
                    if number == self._parts - 1:
                        self._order_arrive(item, part)
                    product.multiply_taps(number * tile.taps, step % windows.stages, copy % filters.stages)
                    call("wait_products<1>")
                    if number:
                        filters.consumer_release(copy - 1)
                    else:
                        with T.If(part > 0), T.Then():
                            self._release(step - 1)
            product.finish()
            self._release(item * self._steps + self._steps - 1)
            channels, output_tile = self._tile_of(item)
            epilogue = self._epilogue(output_tile, channels * tile.block_m)
            if self._sums is None:
                epilogue.write(product)
            else:
                self._sums.write(product, epilogue, item)
        if self._sums is not None:
            self._sums.end(self._count)

    def _epilogue(self, output_tile: Expr, first: Expr) -> TileEpilogue:
        outputs = StagedOutputs(self._field, output_tile)
        if self._outputs is None:
            return tile_epilogue(self._conv, self._tile, self._tensors, outputs, first)
        return StagedPlanes(self._field, self._tensors, outputs, first, self._outputs, self._tid)

    def _release(self, step: Expr) -> None:
        """Releases the stage of a step's windows, and the stage of the last of its filters."""
        self._filters.consumer_release(step * self._parts + self._parts - 1)
        self._windows.consumer_release(step)

    def _order_wait(self, item: Expr) -> None:
        """Waits until the team before has passed its last full barriers: a waiting thread can tell only two phases of a barrier apart."""
        teams = self._tile.pingpong
        if teams > 1:
            with T.If(item > 0), T.Then():
                call("wait_empty_barrier", pointer(self._order, (item - 1) % teams), (item - 1) // teams % 2)

    def _order_arrive(self, item: Expr, part: Expr) -> None:
        teams = self._tile.pingpong
        if teams > 1:
            with T.If(part == self._steps - 1), T.Then():
                call("arrive_empty_barrier<1>", pointer(self._order, item % teams))
