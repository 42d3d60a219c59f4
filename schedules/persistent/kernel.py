"""A convolution as one kernel whose blocks stay: one or a few for every multiprocessor, each computing patch after patch of the output.

Filters are copied to shared memory once. Every warpgroup goes its own way through patches of its own: while the unit multiplies one step's
windows, its threads copy the next step's, be it of the same patch or the next one's, and while one warpgroup writes a patch the others keep the
unit busy. Windows are the columns of products and lie in shared memory, as filters do: a tap is another address in the same patch.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.cuda_packing import row
from im2win.gpu import Gpu
from im2win.problem import Conv2d
from im2win.schedules.cuda.epilogue import Epilogue, output_dtype
from im2win.schedules.cuda.kernel import arguments
from im2win.schedules.cuda.matrix import Place, TensorProduct
from im2win.schedules.cuda.shared import CHUNK, Arena, Expr, barrier, call, local, pointer
from im2win.schedules.persistent.tile import LANES, PHASES, Field, M, PersistentTile, channel_run

BEHIND = 3  # beats between a fetch and its store, so that threads need not wait for it
PROLOGUE = 4  # rounds of copies at a time, before the first product


def grid(conv: Conv2d, tile: PersistentTile, gpu: Gpu) -> int:
    """Thread blocks: no more than run at once, and a whole number for every block of channels."""
    field, blocks = Field(conv, tile), tile.pack(conv).blocks(conv)
    at_once = gpu.multiprocessors * max(gpu.shared // (field.shared_bytes + 1024), 1)
    return blocks * max(min(-(-field.patches // tile.groups), at_once // blocks), 1)


def persistent_kernel(conv: Conv2d, tile: PersistentTile, gpu: Gpu, name: str) -> Any:
    """The kernel over the tensors of `conv.arguments`."""
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        tensors = arguments(conv, tile.pack(conv))
        blocks = grid(conv, tile, gpu)
        with T.launch_thread("blockIdx.x", blocks) as bx, T.launch_thread("threadIdx.x", tile.threads) as tid:
            _Kernel(conv, tile, tensors, blocks, bx, tid).run()
    return builder.get()


class _Kernel:
    def __init__(self, conv: Conv2d, tile: PersistentTile, tensors: dict[str, Any], blocks: int, block: Expr, tid: Expr) -> None:
        self._conv, self._tile, self._tensors, self._tid = conv, tile, tensors, tid
        self._field, pack = Field(conv, tile), tile.pack(conv)
        self._steps, channel_blocks = pack.steps(conv), pack.blocks(conv)
        self._channel_block, self._group = block % channel_blocks, tid // LANES
        self._worker, self._workers = block // channel_blocks * tile.groups + self._group, blocks // channel_blocks * tile.groups
        arena = Arena(self._field.shared_bytes, tile.dtype)
        self._ring = arena.take("ring", self._field.ring, tile.dtype)
        self._filters = arena.take("filters", (self._field.filters,), tile.dtype)
        self._phases = arena.take("phases", (1,), PHASES)
        self._windows = Windows(conv, tile, tensors["data"], self._ring, tid)

    def run(self) -> None:
        """Emits the block."""
        tile, steps = self._tile, self._steps
        self._begin_filters()
        for step in range(tile.ahead):
            self._copy(tirx.const(step, "int32"))
        barrier()
        call("wait_bulk", pointer(self._phases, 0), 0)
        product = SharedProduct(self._conv, tile, self._filters, self._ring, self._tid)
        count = (self._field.patches - self._worker + self._workers - 1) // self._workers
        with T.serial(count) as turn:
            product.clear()
            with T.serial(steps) as part:
                step = turn * steps + part
                call(f"wait_copies<{tile.ahead - 1}>")
                call("fence_copies")
                call("group_barrier", self._group)
                copies = self._next(step + tile.ahead)
                product.multiply(part, self._group * tile.stages + step % tile.stages, copies)
                call("commit_copies")
                call("wait_products<0>")
            product.finish()
            patch = self._worker + turn * self._workers
            PatchEpilogue(self._conv, tile, self._tensors, Outputs(self._field, patch), self._channel_block * tile.block_m).write(product)

    def _begin_filters(self) -> None:
        size = self._field.filters * self._conv.itemsize
        with T.If(self._tid == 0), T.Then():
            call("start_phases", pointer(self._phases, 0))
            from_ = pointer(self._tensors["filter"], self._channel_block * self._field.filters)
            call("copy_bulk", pointer(self._filters, 0), from_, size, pointer(self._phases, 0))

    def _next(self, step: Expr) -> Copies:
        """The copies of a step of this warpgroup, which may lie behind its last."""
        patch = self._worker + step // self._steps * self._workers
        slot = self._group * self._tile.stages + step % self._tile.stages
        return Copies(self._windows, patch, step % self._steps, slot)

    def _copy(self, step: Expr) -> None:
        """All copies of a step, before the first product."""
        copies = self._next(step)
        rounds = self._windows.rounds
        for first in range(0, rounds, PROLOGUE):
            shares = range(first, min(first + PROLOGUE, rounds))
            copies.begin(shares, 0)
            copies.end(shares, 0)
        call("commit_copies")


class Windows:
    """How threads of a warpgroup copy a step of a patch: 16 bytes of a pixel at a time."""

    def __init__(self, conv: Conv2d, tile: PersistentTile, source: Any, ring: Any, tid: Expr) -> None:
        self.conv, self.tile, self.field, self.source, self.ring = conv, tile, Field(conv, tile), source, ring
        self._lane = tid % LANES
        self.asynchronous = conv.layout == "NHWC"
        self._row = self.field.pixels if self.asynchronous else -(-self.field.pixels // 32) * 32  # whole warps, each on one unit
        self.copies = self._row * tile.units
        self.rounds = -(-self.copies // LANES)
        most = max(-(-self.rounds // beats(conv, tile)), -(-PROLOGUE // (BEHIND + 1)))
        self.fetched: Any = None if self.asynchronous else local("fetched", ((BEHIND + 1) * most, tile.unit), conv.dtype)
        self.most = most

    def piece(self, round_: Expr) -> tuple[Expr, Expr, list[Expr]]:
        """(unit, pixel, under which conditions there is such a copy) of this thread's copy in a round."""
        copy = round_ * LANES + self._lane
        exists = [copy < self.copies] if self.copies % LANES else []
        if self.asynchronous:
            return copy % self.tile.units, copy // self.tile.units, exists
        pixel = copy % self._row
        return copy // self._row, pixel, [*exists, *([pixel < self.field.pixels] if self._row > self.field.pixels else [])]

    def at(self, patch: Expr, pixel: Expr) -> tuple[Expr, list[Expr]]:
        """(where a pixel of a patch lies in the input, for channel 0, and when it does)."""
        conv, tile, f = self.conv, self.tile, self.field
        down, across = f.counts
        n, top, left = patch // (down * across), patch // across % down * tile.rows, patch % across * tile.cols
        plane, inner = pixel // f.plane, pixel % f.plane
        y = (top + inner // f.pitch) * conv.stride[0] + plane // f.planes[1] - conv.padding[0]
        x = (left + inner % f.pitch) * conv.stride[1] + plane % f.planes[1] - conv.padding[1]
        per_pixel = conv.in_channels if conv.layout == "NHWC" else 1
        size = conv.in_channels * conv.height * conv.width
        return n * size + (y * conv.width + x) * per_pixel, [y >= 0, y < conv.height, x >= 0, x < conv.width]


class Copies:
    """The copies of one step, in shares."""

    def __init__(self, windows: Windows, patch: Expr, part: Expr, slot: Expr) -> None:
        self._w, self._patch, self._part, self._slot = windows, patch, part, slot
        self._exists, self.most = patch < windows.field.patches, windows.most

    def share(self, beat: int, beats: int) -> range:
        """Rounds behind the products of a beat."""
        rounds = self._w.rounds
        return range(rounds * beat // beats, rounds * (beat + 1) // beats)

    def begin(self, share: range, first: int) -> None:
        """Begins copies of some rounds; those that pass through registers take them from the `first` on."""
        w = self._w
        for number, round_ in enumerate(share, first):
            unit, pixel, conditions = w.piece(round_)
            offset, inside = w.at(self._patch, pixel)
            channel = self._part * (w.tile.units * w.tile.unit) + unit * w.tile.unit
            if w.asynchronous:
                whole = [channel < w.conv.in_channels] if w.conv.in_channels % (w.tile.units * w.tile.unit) else []
                with T.If(tirx.all(self._exists, *conditions)), T.Then():
                    to = pointer(w.ring, self._slot, unit, pixel * w.tile.unit)
                    call(f"copy_async<{CHUNK}>", to, pointer(w.source, offset + channel), tirx.all(*inside, *whole))
            else:
                self._fetch(number, offset, channel, [self._exists, *conditions, *inside])

    def _fetch(self, number: int, offset: Expr, channel: Expr, conditions: list[Expr]) -> None:
        w = self._w
        conv, area = w.conv, w.conv.height * w.conv.width
        for part in range(w.tile.unit):
            c = channel + part
            whole = [c < conv.in_channels] if conv.in_channels % (w.tile.units * w.tile.unit) else []
            value = T.if_then_else(tirx.all(*conditions, *whole), w.source[offset + c * area], tirx.const(0, conv.dtype))
            T.buffer_store(w.fetched, value, [number, part])

    def end(self, share: range, first: int) -> None:
        """Stores what `begin` fetched; asynchronous copies end by themselves."""
        w = self._w
        for number, round_ in enumerate(share if not w.asynchronous else (), first):
            unit, pixel, conditions = w.piece(round_)

            def store(number: int = number, unit: Expr = unit, pixel: Expr = pixel) -> None:
                with T.vectorized(w.tile.unit) as part:
                    T.buffer_store(w.ring, w.fetched[number, part], [self._slot, unit, pixel * w.tile.unit + part])

            if conditions:
                with T.If(tirx.all(*conditions)), T.Then():
                    store()
            else:
                store()


def beats(conv: Conv2d, tile: PersistentTile) -> int:
    """Parts of a step, each one product deep: threads copy between them."""
    return math.prod(conv.kernel) * tile.units // 2


class SharedProduct(TensorProduct):
    """The products of a warpgroup, of filters with windows that both lie in shared memory."""

    def __init__(self, conv: Conv2d, tile: PersistentTile, filters: Any, ring: Any, tid: Expr) -> None:
        self._conv, self._field, self._filters, self._ring = conv, Field(conv, tile), filters, ring
        warp, lane = tid // 32 % 4, tid % 32
        self._warp, self._g, self._t = warp, lane // 4, lane % 4
        self._channels = channel_run(conv)
        run = self._channels if conv.layout == "NHWC" else window_run(conv, tile)
        super().__init__(conv, tile, tile.block_m // M, self._field.columns // 8, channels_are_rows=True, run=run)

    def clear(self) -> None:
        """Begins a patch."""
        self._clear(self._sums)

    def _window(self, place: Place) -> Expr:
        return place[0] * 8 + self._t * 2 + place[1]

    def _channel(self, place: Place) -> Expr:
        return row(place[0] * 4 + self._warp, place[1] * 8 + self._g, self._channels)

    def _wait(self) -> None:
        call("finish_products")
        with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
            call("hold", pointer(self._sums, i, j, r))

    def multiply(self, part: Expr, slot: Expr, copies: Copies) -> None:
        """Adds the products of all taps with a step's channels; behind those of each beat go its share of `copies`."""
        conv, count = self._conv, beats(self._conv, self._tile)
        under_way: list[tuple[range, int]] = []
        taps = itertools.product(*map(range, conv.kernel))
        for beat, ((u, v), k) in enumerate(itertools.product(taps, range(self._tile.units // 2))):
            call("begin_products")
            for i in range(self._rows):
                self._product(part, slot, u * conv.kernel[1] + v, self._field.shift(u, v), k, i)
            call("commit_products")
            if len(under_way) > BEHIND:
                copies.end(*under_way.pop(0))
            under_way.append((copies.share(beat, count), beat % (BEHIND + 1) * copies.most))
            copies.begin(*under_way[-1])
        for share in under_way:
            copies.end(*share)

    def _product(self, part: Expr, slot: Expr, tap: int, shift: int, k: int, i: int) -> None:
        tile, kind = self._tile, {"float16": "f16", "int8": "s8"}[self._tile.dtype]
        at = ((part * math.prod(self._conv.kernel) + tap) * tile.units + 2 * k) * tile.block_m + i * M
        a, b = pointer(self._filters, at * tile.unit), pointer(self._ring, slot, 2 * k, shift * tile.unit)
        leading = tile.block_m * CHUNK, self._field.held * CHUNK
        call(f"wgmma_shared_{kind}<{self._field.columns}>", pointer(self._sums, i, 0, 0), a, leading[0], b, leading[1])


def window_run(conv: Conv2d, tile: PersistentTile) -> int:
    """Neighbouring outputs that one store takes, with channels first: two that a thread holds, where they are aligned."""
    even = all(size % 2 == 0 for size in (Field(conv, tile).pitch, tile.cols, conv.output_size[1]))
    return 2 if even else 1


class Outputs:
    """Where the columns of a patch's product lie in the output."""

    def __init__(self, field: Field, patch: Expr) -> None:
        self._field, (down, across) = field, field.counts
        self._corner = patch // (down * across), patch // across % down * field.tile.rows, patch % across * field.tile.cols

    def output(self, window: Expr) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x) of a column, and under which conditions it is an output."""
        field, tile, (height, width) = self._field, self._field.tile, self._field.conv.output_size
        row_, col = window // field.pitch, window % field.pitch
        (n, top, left), conditions = self._corner, []
        if field.pitch > tile.cols:
            conditions.append(col < tile.cols)
        if height % tile.rows:
            conditions.append(top + row_ < height)
        if field.columns > tile.rows * field.pitch:
            conditions.append(row_ < tile.rows)
        if width % tile.cols:
            conditions.append(left + col < width)
        return n, top + row_, left + col, conditions


class PatchEpilogue(Epilogue):
    """Writes the sums of a patch."""

    def __init__(self, conv: Conv2d, tile: PersistentTile, tensors: dict[str, Any], operand: Outputs, first: Expr) -> None:
        self._conv, self._tile, self._tensors, self._operand = conv, tile, tensors, operand
        self._first, self._group = first, tirx.const(0, "int32")
        self._run = channel_run(conv) if conv.layout == "NHWC" else window_run(conv, tile)
        self._values = local("values", (self._run,), output_dtype(conv))
