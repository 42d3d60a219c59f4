"""A convolution as one kernel whose blocks stay: one or a few for every multiprocessor, each computing patch after patch of the output.

Filters are copied to shared memory once. Every warpgroup goes its own way through patches of its own: while the unit multiplies one step's
windows, boxes bring the next ones', be they of the same patch or the next one's, and while one warpgroup writes a patch the others keep the
unit busy. Windows are the columns of products and lie in shared memory, as filters do: a tap is another address in the same patch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, cast

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.gpu import Gpu
from im2win.packing.mma_fragments import row
from im2win.schedules.cuda.cluster import block_place
from im2win.schedules.cuda.kernel import arguments
from im2win.schedules.cuda.matrix import Place, TensorProduct
from im2win.schedules.cuda.shared import CHUNK, Arena, Expr, barrier, call, pointer
from im2win.schedules.persistent.epilogue import Outputs, patch_epilogue, window_run
from im2win.schedules.persistent.tile import KIB, LANES, PHASES, Field, M, PersistentTile, channel_run
from im2win.spec.conv2d import Conv2d

MAP = "runtime.cuTensorMapEncodeTiled"  # TVM's function that makes what the hardware needs to copy boxes
ORDERS = {CHUNK: 0, 64: 2, 128: 3}  # of 16 bytes in rows of so many, as it names them
PROMOTED = 2  # level-2 cache fetches 128 bytes


def grid(conv: Conv2d, tile: PersistentTile, gpu: Gpu) -> int:
    """Thread blocks: no more than run at once, and whole clusters for every block of channels."""
    field, blocks = Field(conv, tile), tile.pack(conv).blocks(conv)
    at_once = gpu.multiprocessors * max(gpu.shared // (field.shared_bytes + KIB), 1)
    many = min(-(-field.patches // tile.groups), at_once // blocks)
    return blocks * max(many - many % tile.cluster, tile.cluster)


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
        self._channel_block, place = block_place(block, channel_blocks, tile.cluster)
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
            if self._tile.cluster == 1:
                call("copy_bulk", pointer(self._filters, 0), from_, size, pointer(self._phases, 0))
        if self._tile.cluster == 1:
            barrier()
        else:
            call("cluster_barrier")
            with T.If(self._tid == 0), T.Then():
                call(f"copy_shared<{self._tile.cluster}>", pointer(self._filters, 0), from_, size, pointer(self._phases, 0))
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
        across, take_ = f.pixels // many, ("take_pixels" if many > 1 else "take_pixel") + ("_s8" if conv.dtype == "int8" else "")
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


class SharedProduct(TensorProduct):
    """The products of a warpgroup, of filters with windows that both lie in shared memory."""

    _tile: Any

    def __init__(self, conv: Conv2d, tile: PersistentTile, filters: Any, ring: Any, tid: Expr) -> None:
        self._conv, self._field, self._filters, self._ring = conv, Field(conv, tile), filters, ring
        warp, lane = tid // 32 % 4, tid % 32
        self._warp, self._g, self._t = warp, lane // 4, lane % 4
        self._channels = channel_run(conv)
        run = self._channels if conv.layout == "NHWC" else window_run(conv, tile)
        super().__init__(conv, cast(Any, tile), tile.block_m // M, self._field.columns // 8, channels_are_rows=True, run=run)

    def clear(self) -> None:
        """Begins a patch."""
        self._clear(self._sums)

    def _window(self, place: Place) -> Any:
        return place[0] * 8, self._t * 2 + place[1]

    def _channel(self, place: Place) -> Expr:
        return row(place[0] * 4 + self._warp, place[1] * 8 + self._g, self._channels)

    def _singles(self, rows: bool, body: Callable[[Place], None]) -> None:
        if rows:
            super()._singles(rows, body)
        else:
            for j, e in itertools.product(self.kept, range(2)):
                body((j, e))

    def _runs(self, rows: bool, body: Callable[[list[Place]], None]) -> None:
        if rows:
            super()._runs(rows, body)
        else:
            for j in self.kept:
                for start in range(1) if self._run > 1 else range(2):
                    body([(j, (start + k) % 2) for k in range(self._run)])

    @property
    def t(self) -> Expr:
        """Which of four lanes this is: those that hold the same channels, of other columns."""
        return self._t

    def fours(self) -> tuple[Expr, Callable[[Expr], Expr]]:
        """Where a lane has exchanged sums with the one that holds the next two channels or those before: see `patch_epilogue`.

        Returns:
            Which of eight columns is the lane's, and the first of its four channels in the i-th product.
        """
        return self._t * 2 + self._g % 2, lambda i: (i * 4 + self._warp) * 16 + self._g // 2 * 4

    def channel(self, i: Expr, half: Expr) -> Expr:
        """The first or the second of two channels that a thread holds in the i-th product."""
        return self._channel((i, half))

    def sum(self, i: Expr, half: int, j: int, e: int) -> Expr:
        """The sum of such a channel, and of the first or the second of two columns that a thread holds of the j-th eight."""
        return self._sums[i, j, half * 2 + e]

    @property
    def rows(self) -> int:
        """Products of 64 channels."""
        return self._rows

    @property
    def kept(self) -> list[int]:
        """Runs of eight columns, of which some are outputs."""
        field = self._field
        inside = [i % field.pitch < field.tile.cols and i // field.pitch < field.tile.rows for i in range(field.columns)]
        return [j for j in range(self._cols) if any(inside[j * 8 : j * 8 + 8])]

    def _wait(self) -> None:
        call("finish_products")
        with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
            call("hold", pointer(self._sums, i, j, r))

    def multiply(self, part: Expr, slot: Expr) -> None:
        """Begins the products of all taps with a step's channels."""
        call("begin_products")
        for u, v in itertools.product(*map(range, self._conv.kernel)):
            for k, i in itertools.product(range(self._tile.units // 2), range(self._rows)):
                self._product(part, slot, u * self._conv.kernel[1] + v, self._field.shift(u, v), k, i)
        call("commit_products")

    def _product(self, part: Expr, slot: Expr, tap: int, shift: int, k: int, i: int) -> None:
        tile, f, kind = self._tile, self._field, {"float16": "f16", "int8": "s8"}[self._tile.dtype]
        at = ((part * math.prod(self._conv.kernel) + tap) * tile.units + 2 * k) * tile.block_m + i * M
        column = shift * tile.units + 2 * k if f.boxed else 2 * k * f.held + shift
        a, b = pointer(self._filters, at * tile.unit), pointer(self._ring, slot, column * tile.unit)
        name = f"wgmma_shared_{kind}<{f.columns}, {f.pixel_bytes}>"
        call(name, pointer(self._sums, i, 0, 0), a, tile.block_m * CHUNK, b, f.held * CHUNK)
