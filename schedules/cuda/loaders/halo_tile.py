"""Loader of halo tiles: the input under a tile of outputs is copied once for all taps, though windows overlap.

A pixel is 64 bytes a slab, the channels of one step. `Geometry` gives the layout. Tap (u, v) of every window is at the same distance from
the window's first pixel.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.arithmetic import SLAB
from im2win.schedules.cuda.loaders.halo_geometry import Geometry, patch_counts, patches_in_all
from im2win.schedules.cuda.primitives import CHUNK, WORD, Arena, Expr, barrier, call, local, padded, pointer
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

LANES = 4  # lanes of a warp that copy one pixel; the other lanes copy its 7 neighbours


def chunks(conv: Conv2d, tile: MultistageTile) -> int:
    """Number of channel blocks of a step; each has its own halo tile."""
    return -(-(conv.in_channels // conv.groups) // tile.block_k)


def _shape(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> tuple[int, int, int]:
    """[halo tiles in shared memory, slabs, elements of a slab].

    On CUDA cores pixels are 80 bytes apart, so that eight threads that read 16 bytes of eight pixels have no bank conflict.
    """
    pitch = (SLAB + CHUNK if tile.product == "fma" else SLAB) // conv.itemsize
    return min(chunks(conv, tile), 2), tile.slabs, Geometry.of(conv, tile, plan).pixels * pitch


def shared_bytes(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> int:
    """Bytes of shared memory that halo tiles and the offsets of their pixels take."""
    return padded(_shape(conv, tile, plan), tile.dtype) + padded((Geometry.of(conv, tile, plan).pixels,), "int32")


def unit_elements(conv: Conv2d) -> int:
    """Elements of a copy: 16 bytes of neighbouring channels, or one word; 0 if elements must be loaded through registers."""
    unit = CHUNK // conv.itemsize
    if conv.layout == "NHWC" and (conv.in_channels // conv.groups) % unit == 0:
        return unit
    return 1 if conv.itemsize == WORD else 0


class HaloWindows:
    """Maps the windows of a tile of outputs to the output."""

    def __init__(self, conv: Conv2d, tile: MultistageTile, plan: WindowSource, block: Expr) -> None:
        self._conv, self._tile = conv, tile
        self._geometry = Geometry.of(conv, tile, plan)
        _, down, across = patch_counts(conv, tile)
        self._corner = block // (down * across) * tile.images, block // across % down * tile.rows, block % across * tile.cols

    @staticmethod
    def blocks(conv: Conv2d, tile: MultistageTile) -> int:
        """Thread blocks along windows."""
        return patches_in_all(conv, tile)

    @staticmethod
    def run(conv: Conv2d, tile: MultistageTile) -> int:
        """Largest n such that n windows, from a multiple of n on, are neighbours in one output row."""
        return math.gcd(conv.output_size[1], tile.cols)

    def output(self, window: Expr) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x, conditions) of a window of the block: its output, and the conditions under which it exists."""
        conv, tile = self._conv, self._tile
        inner = window // (tile.rows * tile.cols), window // tile.cols % tile.rows, window % tile.cols
        n, m, x = (corner + i for corner, i in zip(self._corner, inner, strict=True))
        conditions = [window < tile.images * tile.rows * tile.cols] if tile.images * tile.rows * tile.cols < tile.block_n else []
        for at, size, part in zip((n, m, x), (conv.batch, *conv.output_size), (tile.images, tile.rows, tile.cols), strict=True):
            conditions += [at < size] if size % part else []
        return n, m, x, conditions

    def _prepare(self, count: int, window: Callable[[Expr], Expr], pitch: int) -> Any:
        """First pixels of the windows that a thread reads, times `pitch`: the i-th of `count` is window(i) of the block."""
        tile = self._tile
        first = local("first", (count,), "int32")
        with T.unroll(count) as i:
            p = window(i)
            if tile.images * tile.rows * tile.cols < tile.block_n:
                p = T.min(p, tile.images * tile.rows * tile.cols - 1)
            n, m, x = p // (tile.rows * tile.cols), p // tile.cols % tile.rows, p % tile.cols
            T.buffer_store(first, self._geometry.first(n, m, x) * pitch, [i])
        return first

    def _source_pixel(self, image: Expr, row: Expr, col: Expr) -> tuple[Expr, Expr]:
        """(offset in the input for channel 0, whether the pixel lies inside it) of a pixel of the halo tile."""
        conv = self._conv
        size = conv.in_channels * conv.height * conv.width
        per_pixel = 1 if conv.layout == "NCHW" else conv.in_channels
        n = self._corner[0] + image
        y = self._corner[1] * conv.stride[0] - conv.padding[0] + self._geometry.source(row)
        x = self._corner[2] * conv.stride[1] - conv.padding[1] + col
        return n * size + (y * conv.width + x) * per_pixel, tirx.all(n < conv.batch, y >= 0, y < conv.height, x >= 0, x < conv.width)


class HaloLoader(HaloWindows):
    """The halo tile of a thread block, one block of channels after the other. Copies for the next channels overlap the product."""

    def __init__(
        self, conv: Conv2d, tile: MultistageTile, plan: WindowSource, arena: Arena, source: Any, block: Expr, group: Expr, tid: Expr
    ) -> None:
        super().__init__(conv, tile, plan, block)
        self._source, self._tid, self._group = source, tid, group
        self._pitch = _shape(conv, tile, plan)[2] // self._geometry.pixels
        self.shared = arena.take("halo", _shape(conv, tile, plan), tile.dtype)
        self._unit = unit_elements(conv)
        size = CHUNK if self._unit > 1 else WORD  # bytes that a thread copies or stores at a time
        self._stored = size // conv.itemsize
        self._copies = tile.slabs * SLAB // size // LANES * self._geometry.pixels * LANES
        self._rounds = -(-self._copies // tile.threads)
        self._taps = self.taps(conv)
        self._spread = -(-self._rounds // max(self._taps - max(tile.ahead - 1, 0), 1))  # rounds of copies in a step
        self._offsets = self._fill_offsets(arena)
        self._fetched: Any = None if self._unit else local("fetched", (self._spread, self._stored), conv.dtype)

    @staticmethod
    def taps(conv: Conv2d) -> int:
        """Steps that read the same channels."""
        return math.prod(conv.kernel)

    def _fill_offsets(self, arena: Arena) -> Any:
        """Computes the table of every pixel's offset in the input, for channel 0; -1 where the pixel lies outside."""
        tile, g = self._tile, self._geometry
        offsets = arena.take("offsets", (g.pixels,), "int32")
        with T.serial(-(-g.pixels // tile.threads)) as i:
            pixel = i * tile.threads + self._tid
            with T.If(pixel < g.pixels), T.Then():
                offset, inside = self._source_pixel(*g.stored(pixel))
                T.buffer_store(offsets, tirx.Select(inside, offset, tirx.const(-1, "int32")), [pixel])
        barrier()
        return offsets

    # --- copies ------------------------------------------------------------------------------------------------------

    def _pieces(self, chunk: Expr, rounds: Any) -> Iterator[tuple[int, Expr, Expr, Expr, Expr, list[Expr]]]:
        """(number, copy, pixel, unit of the channel block, offset, conditions) of this thread's copies in some rounds."""
        conv, g = self._conv, self._geometry
        channels, stride = conv.in_channels // conv.groups, 1 if conv.layout == "NHWC" else conv.height * conv.width
        for number, round_ in enumerate(rounds):
            copy = round_ * self._tile.threads + self._tid
            pixel, unit = copy // LANES % g.pixels, copy // (LANES * g.pixels) * LANES + copy % LANES
            c = chunk * self._tile.block_k + unit * self._stored
            conditions = [self._offsets[pixel] >= 0]
            if channels % self._tile.block_k:
                conditions.append(c < channels)
            yield number, copy, pixel, unit, self._offsets[pixel] + (self._group * channels + c) * stride, conditions

    def _place(self, chunk: Expr, pixel: Expr, unit: Expr) -> list[Expr]:
        per_slab = self._tile.slab // self._stored
        return [chunk % self.shared.shape[0], unit // per_slab, pixel * self._pitch + unit % per_slab * self._stored]

    def _guarded(self, copy: Expr, rounds: int | None, body: Callable[[], None]) -> None:
        """Emits `body` under the condition that the copy exists.

        Args:
            rounds: index of the round, if it is a constant: the condition is left out where all threads have a copy.
        """
        if rounds is not None and (rounds + 1) * self._tile.threads <= self._copies:
            body()
        else:
            with T.If(copy < self._copies), T.Then():
                body()

    def _copy(self, chunk: Expr, rounds: Any) -> None:
        size = self._stored * self._conv.itemsize
        for _, copy, pixel, unit, offset, conditions in self._pieces(chunk, rounds):

            def one(pixel: Expr = pixel, unit: Expr = unit, offset: Expr = offset, conditions: list[Expr] = conditions) -> None:
                to = pointer(self.shared, *self._place(chunk, pixel, unit))
                call(f"copy_async<{size}>", to, pointer(self._source, offset), tirx.all(*conditions))

            self._guarded(copy, None, one)

    def _fetch(self, chunk: Expr, rounds: Any) -> None:
        conv = self._conv
        zero, stride = tirx.const(0, conv.dtype), 1 if conv.layout == "NHWC" else conv.height * conv.width
        channels = conv.in_channels // conv.groups
        for number, copy, _, unit, offset, conditions in self._pieces(chunk, rounds):
            for part in range(self._stored):
                c = chunk * self._tile.block_k + unit * self._stored + part
                inside = [copy < self._copies, conditions[0], *([c < channels] if channels % self._tile.block_k else [])]
                value = T.if_then_else(tirx.all(*inside), self._source[offset + part * stride], zero)
                T.buffer_store(self._fetched, value, [number, part])

    def _put(self, chunk: Expr, rounds: Any) -> None:
        for number, copy, pixel, unit, _, _ in self._pieces(chunk, rounds):

            def one(number: int = number, pixel: Expr = pixel, unit: Expr = unit) -> None:
                *outer, at = self._place(chunk, pixel, unit)
                with T.vectorized(self._stored) as part:
                    T.buffer_store(self.shared, self._fetched[number, part], [*outer, at + part])

            self._guarded(copy, None, one)

    # --- producer side ---------------------------------------------------------------------------------------------------

    def prologue(self, step: int) -> None:
        """Issues the copies of the first halo tile at step 0."""
        if step > 0:
            return
        for first in range(0, self._rounds, self._spread):
            rounds = range(first, min(first + self._spread, self._rounds))
            if self._unit:
                self._copy(0, rounds)
            else:
                self._fetch(0, rounds)
                self._put(0, rounds)

    def _later(self, step: Expr) -> tuple[Expr, list[Expr]]:
        """(the next block of channels, the rounds of its copies that this step issues)."""
        return step // self._taps + 1, [step % self._taps * self._spread + i for i in range(self._spread)]

    def _more(self, step: Expr, body: Callable[[Expr, list[Expr]], None]) -> None:
        if chunks(self._conv, self._tile) > 1:
            chunk, rounds = self._later(step)
            with T.If(chunk < chunks(self._conv, self._tile)), T.Then():
                body(chunk, rounds)

    def advance(self, step: Expr, ahead: int, stage: Expr) -> None:
        """Before the product of `step`: issues this step's share of the copies of the next channels."""
        self._more(step, self._copy if self._unit else self._fetch)

    def settle(self, step: Expr, stage: Expr) -> None:
        """After the product: stores the elements that `advance` loaded to registers."""
        if not self._unit:
            self._more(step, self._put)

    @property
    def copies(self) -> bool:
        """Whether copies are asynchronous. Elements of less than 4 bytes are loaded through registers."""
        return self._unit > 0

    # --- consumer side ---------------------------------------------------------------------------------------------------

    def prepare(self, count: int, window: Callable[[Expr], Expr]) -> None:
        """Computes the first pixels of the windows that a thread reads: the i-th of `count` is window(i) of the block."""
        self._first = self._prepare(count, window, self._pitch)

    def at(self, i: Expr, slab: int, chunk: Expr, step: Expr) -> list[Expr]:
        """Indices of 16 bytes of the i-th window in shared memory."""
        conv = self._conv
        shift = self._geometry.shift(step % self._taps // conv.kernel[1], step % conv.kernel[1])
        stage = step // self._taps % self.shared.shape[0]
        return [stage, slab, self._first[i] + shift * self._pitch + chunk * (CHUNK // conv.itemsize)]

    width = 4

    def loads(self, step: Expr) -> Iterator[Callable[[Expr], list[Expr]]]:
        """For every `width` indices of the sum in a step: i -> indices of the i-th window's elements in shared memory."""
        for slab, chunk in itertools.product(range(self._tile.slabs), range(4)):
            yield functools.partial(self.at, slab=slab, chunk=chunk, step=step)
