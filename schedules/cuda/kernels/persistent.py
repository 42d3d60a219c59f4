"""The persistent kernel with resident filters: each thread block computes tile after tile of outputs.

One or a few thread blocks run on every multiprocessor. A block copies its filters to shared memory once. Every warpgroup has its own halo
tiles: while the tensor cores multiply the windows of one step, TMA boxes bring those of the next, also across halo tiles. While one
warpgroup is in its epilogue, the others keep the tensor cores busy. Windows are the columns of `wgmma` and lie in shared memory, as the
filters do: another tap is another address in the same halo tile.
"""

from __future__ import annotations

from typing import Any, cast

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.epilogue.lane_exchange import tile_epilogue
from im2win.schedules.cuda.epilogue.output_columns import Outputs
from im2win.schedules.cuda.kernels.multistage import arguments
from im2win.schedules.cuda.loaders.tma_boxes import TmaBoxes
from im2win.schedules.cuda.mma.wgmma_shared import SharedProduct
from im2win.schedules.cuda.primitives import Arena, Expr, barrier, call, pointer
from im2win.schedules.cuda.tile_scheduler.persistent import resident_grid
from im2win.schedules.cuda.tiles.persistent import LANES, PHASES, HaloTile, PersistentTile
from im2win.spec.conv2d import Conv2d


def persistent_kernel(conv: Conv2d, tile: PersistentTile, gpu: Gpu, name: str) -> Any:
    """The kernel over the tensors of `conv.arguments`."""
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        tensors = arguments(conv, cast(Any, tile.pack(conv)))
        boxes = TmaBoxes(conv, HaloTile(conv, tile), tensors["data"])
        blocks = resident_grid(conv, tile, gpu)
        with T.launch_thread("blockIdx.x", blocks) as bx, T.launch_thread("threadIdx.x", tile.threads) as tid:
            _Kernel(conv, tile, tensors, boxes, blocks, bx, tid).run()
    return builder.get()


class _Kernel:
    def __init__(
        self, conv: Conv2d, tile: PersistentTile, tensors: dict[str, Any], boxes: TmaBoxes, blocks: int, block: Expr, tid: Expr
    ) -> None:
        self._conv, self._tile, self._tensors, self._boxes, self._tid = conv, tile, tensors, boxes, tid
        self._field, pack = HaloTile(conv, tile), tile.pack(conv)
        self._steps, channel_blocks = pack.steps(conv), pack.blocks(conv)
        self._channel_block, place = block % channel_blocks, block // channel_blocks
        self._channel = pack.first_channel(conv, self._channel_block)
        self._group = tid // LANES
        self._worker, self._workers = place * tile.groups + self._group, blocks // channel_blocks * tile.groups
        arena, f = Arena(self._field.shared_bytes, tile.dtype), self._field
        self._stages = arena.take("stages", f.window_buffer, tile.dtype)
        self._raw = None if f.boxed else arena.take("raw", f.box_buffer, tile.dtype)
        self._filters = arena.take("filters", (f.filters,), tile.dtype)
        self._phases = arena.take("phases", (f.full_barriers,), PHASES)

    def run(self) -> None:
        """Emits the code of a thread block."""
        tile, steps = self._tile, self._steps
        self._begin()
        product = SharedProduct(self._conv, tile, self._filters, self._stages, self._tid)
        count = (self._field.output_tiles - self._worker + self._workers - 1) // self._workers
        if not self._field.boxed:
            with T.If(count > 0), T.Then():
                self._rearrange(tirx.const(0, "int32"))
        with T.serial(count) as item:
            product.clear()
            with T.serial(steps) as part:
                step = item * steps + part
                call("group_barrier", self._group)  # the warpgroup has read the stage that the next copy overwrites
                if self._field.boxed:
                    self._copy(step + tile.stages - 1)
                    call("wait_full_barrier", self._full_barrier(step), step // tile.stages % 2)
                product.multiply(part, self._stage(step))
                if not self._field.boxed:
                    with T.If(self._exists(step + 1)), T.Then():
                        self._rearrange(step + 1)
                call("wait_products<0>")
            product.finish()
            output_tile = self._worker + item * self._workers
            first = self._channel_block * tile.block_m
            tile_epilogue(self._conv, tile, self._tensors, Outputs(self._field, output_tile), first).write(product)

    def _begin(self) -> None:
        """Issues the copies of the filters and of the first steps of every warpgroup, and waits for the filters."""
        size = self._field.filters * self._conv.itemsize
        from_ = pointer(self._tensors["filter"], self._channel_block * self._field.filters)
        with T.If(self._tid == 0), T.Then():
            with T.unroll(self._field.full_barriers) as i:
                call("init_full_barrier", pointer(self._phases, i))
            call("copy_bulk", pointer(self._filters, 0), from_, size, pointer(self._phases, 0))
        barrier()
        for step in range(self._tile.stages - 1 if self._field.boxed else 1):
            self._copy(tirx.const(step, "int32"))
        call("wait_full_barrier", pointer(self._phases, 0), 0)

    def _output_tile(self, step: Expr) -> Expr:
        return self._worker + step // self._steps * self._workers

    def _exists(self, step: Expr) -> Expr:
        return self._output_tile(step) < self._field.output_tiles

    def _stage(self, step: Expr) -> Expr:
        return self._group * self._tile.stages + step % self._tile.stages

    def _full_barrier(self, step: Expr) -> Expr:
        """The full barrier of a step."""
        return pointer(self._phases, 1 + (self._stage(step) if self._field.boxed else self._group))

    def _copy(self, step: Expr) -> None:
        """One thread of the warpgroup issues the copy of a step, if the step exists."""
        to, at = (self._stages, self._stage(step)) if self._field.boxed else (self._raw, self._group)
        with T.If(tirx.all(self._tid % LANES == 0, self._exists(step))), T.Then():
            self._boxes.copy((to, at), self._output_tile(step), step % self._steps, self._full_barrier(step), channel=self._channel)

    def _rearrange(self, step: Expr) -> None:
        """Rearranges a step's TMA box (channels first) as products read it, and issues the next copy to the box's buffer."""
        conv, tile, f = self._conv, self._tile, self._field
        call("wait_full_barrier", self._full_barrier(step), step % 2)
        _, rows, cols = f.raw
        many = f.together
        across, take_ = f.pixels // many, ("take_pixels" if many > 1 else "take_pixel") + ("_s8" if conv.itemsize == 1 else "")
        lane, count = self._tid % LANES, tile.units * across
        for first in range(0, count, LANES):
            at = first + lane
            unit, pixel = at // across, at % across * many
            plane, inner = pixel // (f.lines * f.pitch), pixel % (f.lines * f.pitch)
            y = inner // f.pitch * conv.stride[0] + plane // f.planes[1]
            x = inner % f.pitch * conv.stride[1] + plane % f.planes[1] + f.lead - f.margin

            def take(unit: Expr = unit, plane: Expr = plane, inner: Expr = inner, y: Expr = y, x: Expr = x) -> None:
                to = pointer(self._stages, self._stage(step), (unit * f.stage_pixels + plane * f.plane + inner) * tile.unit)
                from_ = pointer(self._raw, self._group, (unit * tile.unit * rows + y) * cols + x)
                call(take_, to, from_, rows * cols * conv.itemsize)

            if first + LANES <= count:
                take()
            else:
                with T.If(at < count), T.Then():
                    take()
        call("fence_stores")
        call("group_barrier", self._group)
        self._copy(step + 1)
