"""A convolution as one kernel whose blocks stay: one or a few for every multiprocessor, each computing patch after patch of the output.

Filters are copied to shared memory once. Every warpgroup goes its own way through patches of its own: while the unit multiplies one step's
windows, boxes bring the next ones', be they of the same patch or the next one's, and while one warpgroup writes a patch the others keep the
unit busy. Windows are the columns of products and lie in shared memory, as filters do: a tap is another address in the same patch.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.epilogue.lane_exchange import patch_epilogue
from im2win.schedules.cuda.epilogue.output_columns import Outputs
from im2win.schedules.cuda.kernels.multistage import arguments
from im2win.schedules.cuda.mma.wgmma_shared import SharedProduct
from im2win.schedules.cuda.primitives import CHUNK, Arena, Expr, barrier, call, pointer
from im2win.schedules.cuda.tiles.persistent import KIB, LANES, PHASES, Field, PersistentTile
from im2win.spec.conv2d import Conv2d

MAP = "runtime.cuTensorMapEncodeTiled"  # TVM's function that makes what the hardware needs to copy boxes
ORDERS = {CHUNK: 0, 64: 2, 128: 3}  # of 16 bytes in rows of so many, as it names them
PROMOTED = 2  # level-2 cache fetches 128 bytes


def grid(conv: Conv2d, tile: PersistentTile, gpu: Gpu) -> int:
    """Thread blocks: no more than run at once, as many for every block of channels."""
    field, blocks = Field(conv, tile), tile.pack(conv).blocks(conv)
    at_once = gpu.multiprocessors * max(gpu.shared // (field.shared_bytes + KIB), 1)
    return blocks * max(min(-(-field.patches // tile.groups), at_once // blocks), 1)


def persistent_kernel(conv: Conv2d, tile: PersistentTile, gpu: Gpu, name: str) -> Any:
    """The kernel over the tensors of `conv.arguments`."""
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        tensors = arguments(conv, cast(Any, tile.pack(conv)))
        boxes = _Boxes(conv, tile, tensors["data"])
        blocks = grid(conv, tile, gpu)
        with T.launch_thread("blockIdx.x", blocks) as bx, T.launch_thread("threadIdx.x", tile.threads) as tid:
            _Kernel(conv, tile, tensors, boxes, blocks, bx, tid).run()
    return builder.get()


class _Boxes:
    """The input as the hardware copies it: a step's part of a patch, by one box for every plane, or for all of them, channels first."""

    def __init__(self, conv: Conv2d, tile: PersistentTile, source: Any) -> None:
        self._conv, self._tile, self._field = conv, tile, Field(conv, tile)
        f, (height, width), channels = self._field, (conv.height, conv.width), tile.units * tile.unit
        if f.boxed:
            sizes, steps = (conv.in_channels, width, height, conv.batch), (1, conv.stride[1], conv.stride[0], 1)
            self._box = (channels, (f.pitch - 1) * steps[1] + 1, (f.lines - 1) * steps[2] + 1, 1)
        else:
            sizes, steps, (_, rows, cols) = (width, height, conv.in_channels, conv.batch), (1, 1, 1, 1), f.raw
            self._box = (cols, rows, channels, 1)
        strides = [math.prod(sizes[:axis]) * conv.itemsize for axis in (1, 2, 3)]
        self._map = tirx.Var("boxes", T.handle("tensormap").ty)
        T.Bind(T.tvm_stack_alloca("tensormap", 1), var=self._map)
        order = ORDERS[f.pixel_bytes]
        T.evaluate(T.call_packed(MAP, self._map, conv.dtype, 4, source.data, *sizes, *strides, *self._box, *steps, 0, order, PROMOTED, 0))

    @property
    def step_bytes(self) -> int:
        """Bytes that arrive for a step."""
        f = self._field
        return f.pixels * f.tile.slabs * 64 if f.boxed else math.prod(f.raw) * self._conv.itemsize

    def copy(self, to: Any, at: Expr, patch: Expr, part: Expr, phases: Expr) -> None:
        """One thread begins to copy a step of a patch to shared memory."""
        conv, tile, f = self._conv, self._tile, self._field
        down, across = f.counts
        n, top, left = patch // (down * across), patch // across % down * tile.rows, patch % across * tile.cols
        y, x = top * conv.stride[0] - conv.padding[0], left * conv.stride[1] - conv.padding[1]
        channel = part * (tile.units * tile.unit)
        call("expect_bytes", phases, self.step_bytes)
        if not f.boxed:
            call("copy_box", pointer(to, at, 0), T.address_of(self._map), x - f.lead, y, channel, n, phases)
            return
        for number, (row_, col) in enumerate(itertools.product(*map(range, f.planes))):
            place = pointer(to, at, number * f.plane * tile.units * tile.unit)
            call("copy_box", place, T.address_of(self._map), channel, x + col, y + row_, n, phases)


class _Kernel:
    def __init__(
        self, conv: Conv2d, tile: PersistentTile, tensors: dict[str, Any], boxes: _Boxes, blocks: int, block: Expr, tid: Expr
    ) -> None:
        self._conv, self._tile, self._tensors, self._boxes, self._tid = conv, tile, tensors, boxes, tid
        self._field, pack = Field(conv, tile), tile.pack(conv)
        self._steps, channel_blocks = pack.steps(conv), pack.blocks(conv)
        self._channel_block, place = block % channel_blocks, block // channel_blocks
        self._group = tid // LANES
        self._worker, self._workers = place * tile.groups + self._group, blocks // channel_blocks * tile.groups
        arena, f = Arena(self._field.shared_bytes, tile.dtype), self._field
        self._ring = arena.take("ring", f.ring, tile.dtype)
        self._raw = None if f.boxed else arena.take("raw", f.boxes, tile.dtype)
        self._filters = arena.take("filters", (f.filters,), tile.dtype)
        self._phases = arena.take("phases", (f.landings,), PHASES)

    def run(self) -> None:
        """Emits the block."""
        tile, steps = self._tile, self._steps
        self._begin()
        product = SharedProduct(self._conv, tile, self._filters, self._ring, self._tid)
        count = (self._field.patches - self._worker + self._workers - 1) // self._workers
        if not self._field.boxed:
            with T.If(count > 0), T.Then():
                self._rearrange(tirx.const(0, "int32"))
        with T.serial(count) as turn:
            product.clear()
            with T.serial(steps) as part:
                step = turn * steps + part
                call("group_barrier", self._group)  # all have multiplied what the next copies overwrite
                if self._field.boxed:
                    self._copy(step + tile.stages - 1)
                    call("wait_bulk", self._landing(step), step // tile.stages % 2)
                product.multiply(part, self._slot(step))
                if not self._field.boxed:
                    with T.If(self._exists(step + 1)), T.Then():
                        self._rearrange(step + 1)
                call("wait_products<0>")
            product.finish()
            patch = self._worker + turn * self._workers
            first = self._channel_block * tile.block_m
            patch_epilogue(self._conv, tile, self._tensors, Outputs(self._field, patch), first).write(product)

    def _begin(self) -> None:
        """Filters, and the first steps of every warpgroup, are on their way."""
        size = self._field.filters * self._conv.itemsize
        from_ = pointer(self._tensors["filter"], self._channel_block * self._field.filters)
        with T.If(self._tid == 0), T.Then():
            with T.unroll(self._field.landings) as i:
                call("start_phases", pointer(self._phases, i))
            call("copy_bulk", pointer(self._filters, 0), from_, size, pointer(self._phases, 0))
        barrier()
        for step in range(self._tile.stages - 1 if self._field.boxed else 1):
            self._copy(tirx.const(step, "int32"))
        call("wait_bulk", pointer(self._phases, 0), 0)

    def _patch(self, step: Expr) -> Expr:
        return self._worker + step // self._steps * self._workers

    def _exists(self, step: Expr) -> Expr:
        return self._patch(step) < self._field.patches

    def _slot(self, step: Expr) -> Expr:
        return self._group * self._tile.stages + step % self._tile.stages

    def _landing(self, step: Expr) -> Expr:
        """The barrier that counts what lands for a step."""
        return pointer(self._phases, 1 + (self._slot(step) if self._field.boxed else self._group))

    def _copy(self, step: Expr) -> None:
        """A thread of the warpgroup begins to copy a step, unless that lies behind the last."""
        to, at = (self._ring, self._slot(step)) if self._field.boxed else (self._raw, self._group)
        with T.If(tirx.all(self._tid % LANES == 0, self._exists(step))), T.Then():
            self._boxes.copy(to, at, self._patch(step), step % self._steps, self._landing(step))

    def _rearrange(self, step: Expr) -> None:
        """Makes of a step's box what products read; then the next may land in its place."""
        conv, tile, f = self._conv, self._tile, self._field
        call("wait_bulk", self._landing(step), step % 2)
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
                to = pointer(self._ring, self._slot(step), (unit * f.held + plane * f.plane + inner) * tile.unit)
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
