"""Loader of windows that copies every tap by itself: implicit im2col, whose matrix exists one step at a time in shared memory.

Where the sum's neighbouring elements lie apart (channels first) there are two ways. Groups of four lanes copy an element or word each of
eight neighbouring windows: asynchronously, but a warp reads four lines at a time. Or the tile's elements are `fetched`: the lanes of a warp
read one line, neighbouring windows of one element, and each stores 16 bytes of its own window at a time.

A window's slab is a row of 64 bytes. Eight lanes read eight rows at a time, 16 bytes each. Chunk q of row p lies at place q ^ (p / 2 % 4)
(a swizzle), so that these eight chunks, and the words that a warp writes, lie in different banks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import CHUNK, WORD, Arena, Expr, barrier, call, local, padded, pointer
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

CLOSE = 2  # elements between neighbouring windows, at most, whose elements neighbouring lanes fetch


def taps_are_whole(conv: Conv2d, tile: MultistageTile) -> bool:
    """Whether every step of the sum stays within one tap, so that its offset needs no table."""
    return tile.order == "uvc" and (conv.in_channels // conv.groups) % tile.block_k == 0


def unit_elements(conv: Conv2d, order: str, plan: WindowSource) -> int:
    """Elements of the widest copy (16, 8 or 4 bytes) that the source's strides allow; 0 if a word is not contiguous."""
    return _reads(conv, order, plan)[0]


@functools.lru_cache(maxsize=1024)
def _reads(conv: Conv2d, order: str, plan: WindowSource) -> tuple[int, bool, bool]:
    """(`unit_elements`, whether the sum's neighbouring elements are contiguous, whether taps may lie outside the source)."""
    strides, channels = plan.strides(conv), conv.in_channels // conv.groups
    along = strides.c == 1 and order == "uvc"
    rows = along and strides.v == channels and not strides.padded  # the taps of a row are contiguous, so a unit may hold several
    contiguous = channels * (conv.kernel[1] if rows else 1)
    steps = (strides.n, strides.m, strides.x, strides.u, strides.origin, *(() if rows else (strides.v,)))
    for size in (CHUNK, 8, WORD):
        unit = size // conv.itemsize
        if unit == 1:
            return 1, along, strides.padded
        if along and all(step % unit == 0 for step in (*steps, contiguous)):
            return unit, along, strides.padded
    return 0, along, strides.padded


def apart(conv: Conv2d, order: str, plan: WindowSource) -> bool:
    """Whether the sum's neighbouring elements lie apart in memory."""
    return not _reads(conv, order, plan)[1]


def fetches(conv: Conv2d, order: str, plan: WindowSource) -> bool:
    """Whether elements may be `fetched`: neighbouring windows are close in memory, and the sum's neighbouring elements lie apart."""
    return apart(conv, order, plan) and plan.strides(conv).x <= CLOSE


def lanes_along_sum(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> int:
    """Lanes of a warp that copy one window.

    As many as have a unit of a contiguous slab; else 4 beside 8 neighbouring windows. Of a `fetched` window, as few as the block's threads
    allow.
    """
    unit, along, _ = _reads(conv, tile.order, plan)
    if unit and along:
        return tile.slab // unit
    return next(lanes for lanes in ((1, 2, 4) if tile.fetched else (4,)) if lanes == 4 or tile.block_n * lanes % tile.threads == 0)


def copied_elements(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> int:
    """Elements of an asynchronous copy; 0 where elements are loaded one by one to registers."""
    return 0 if tile.fetched else unit_elements(conv, tile.order, plan)


def _table_shape(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> tuple[int, int]:
    """(numbers stored for a unit of the sum, units) of the table of offsets; (0, 0) where no table is needed."""
    if taps_are_whole(conv, tile):
        return 0, 0
    unit, _, padded_source = _reads(conv, tile.order, plan)
    depth = math.prod(conv.filter_shape[1:])
    return 2 if padded_source else 1, -(-depth // tile.block_k) * tile.block_k // max(unit, 1)


def _shape(tile: MultistageTile) -> tuple[int, int, int, int]:
    return tile.stages, tile.slabs, tile.block_n, tile.slab


def shared_bytes(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> int:
    """Bytes of shared memory that windows and the table of offsets take."""
    return padded(_shape(tile), tile.dtype) + padded(_table_shape(conv, tile, plan), "int32")


class Gather:
    """`block_n` neighbouring windows from a strided source.

    Args:
        source: the tensor that windows are read from, flat.
        block: index of the thread block along windows. group: group of channels.
    """

    def __init__(
        self, conv: Conv2d, tile: MultistageTile, plan: WindowSource, arena: Arena, source: Any, block: Expr, group: Expr, tid: Expr
    ) -> None:
        self._conv, self._tile, self._strides, self._source = conv, tile, plan.strides(conv), source
        self._group, self._first = group, block * tile.block_n
        self._unit = copied_elements(conv, tile, plan)
        self._parts = 1 if self._unit else (CHUNK if tile.fetched else WORD) // conv.itemsize  # elements loaded one by one, stored together
        self._per_entry = max(self._unit, 1)
        self._lanes = lanes_along_sum(conv, tile, plan)
        self.shared = arena.take("windows", _shape(tile), tile.dtype)
        warp, lane = tid // 32, tid % 32
        self._k = lane % self._lanes  # this thread's first unit of a slab
        self._row = warp * (32 // self._lanes) + lane // self._lanes
        self._rows = tile.block_n * self._lanes // tile.threads  # windows that a thread copies elements of
        self._step_rows = tile.block_n // self._rows
        self._table = None if taps_are_whole(conv, tile) else self._fill_table(arena, plan, tid)
        self._find_windows()
        self._fetched: Any = None if self._unit else local("fetched", (tile.slabs * tile.slab // self._lanes * self._rows,), conv.dtype)

    @staticmethod
    def blocks(conv: Conv2d, tile: MultistageTile) -> int:
        """Thread blocks along windows."""
        out_h, out_w = conv.output_size
        return -(-conv.batch * out_h * out_w // tile.block_n)

    @staticmethod
    def run(conv: Conv2d, tile: MultistageTile) -> int:
        """Largest n such that n windows, from a multiple of n on, are neighbours in one image."""
        return math.gcd(math.prod(conv.output_size), tile.block_n)

    # --- addresses, computed once -----------------------------------------------------------------------------------------

    def _tap(self, k: Expr) -> tuple[Expr, Expr, Expr]:
        """(c, u, v) of an index of the sum."""
        (rows, cols), channels = self._conv.kernel, self._conv.in_channels // self._conv.groups
        if self._tile.order == "uvc":
            return k % channels, k // channels // cols, k // channels % cols
        return k // (rows * cols), k // cols % rows, k % cols

    def _offset(self, c: Expr, u: Expr, v: Expr) -> Expr:
        return c * self._strides.c + u * self._strides.u + v * self._strides.v

    def _fill_table(self, arena: Arena, plan: WindowSource, tid: Expr) -> Any:
        """Computes the table of the offsets of the sum's units, so that no copy divides; -1 behind the last index.

        With padding a second row of the table has the position of the tap in the window, to test whether it lies inside the input.
        """
        conv, tile = self._conv, self._tile
        width, entries = _table_shape(conv, tile, plan)
        table = arena.take("taps", (width, entries), "int32")
        with T.serial(-(-entries // tile.threads)) as i:
            entry = i * tile.threads + tid
            with T.If(entry < entries), T.Then():
                k = entry * self._per_entry
                c, u, v = self._tap(k)
                inside = k < math.prod(conv.filter_shape[1:])
                T.buffer_store(table, tirx.Select(inside, self._offset(c, u, v), tirx.const(-1, "int32")), [0, entry])
                if self._strides.padded:
                    T.buffer_store(table, u * conv.dilation[0] * 65536 + v * conv.dilation[1], [1, entry])
        barrier()
        return table

    def output(self, window: Expr) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x, conditions) of a window of the block: its output, and the conditions under which it exists."""
        out_h, out_w = self._conv.output_size
        p, total = self._first + window, self._conv.batch * out_h * out_w
        return p // (out_h * out_w), p // out_w % out_h, p % out_w, [p < total] if total % self._tile.block_n else []

    def _find_windows(self) -> None:
        """Computes the addresses of this thread's windows and, with padding, their first input rows and columns."""
        conv, s = self._conv, self._strides
        last = conv.batch * math.prod(conv.output_size) - 1
        self._base = local("base", (self._rows,), "int32")
        self._corner = [local(name, (self._rows,), "int32") for name in ("top", "left")] if s.padded else []
        with T.unroll(self._rows) as i:
            window = T.min(self._first + self._row + i * self._step_rows, last) - self._first
            n, m, x, _ = self.output(window)
            channels = self._group * (conv.in_channels // conv.groups) * s.c
            T.buffer_store(self._base, n * s.n + m * s.m + x * s.x + channels + s.origin, [i])
            for corner, at, axis in zip(self._corner, (m, x), (0, 1), strict=False):
                T.buffer_store(corner, at * conv.stride[axis] - conv.padding[axis], [i])

    # --- copies ------------------------------------------------------------------------------------------------------

    def _conditions(self, i: Expr, entry: Any, tap: tuple[Expr, Expr] | None) -> list[Expr]:
        """Conditions under which a unit of window i is copied; otherwise it is zero."""
        conv, conditions = self._conv, []
        if entry is not None and math.prod(conv.filter_shape[1:]) % self._tile.block_k:
            conditions.append(entry[0] >= 0)
        if self._strides.padded:
            (down, right), (dilation_h, dilation_w) = tap or (0, 0), conv.dilation
            shifts = (down * dilation_h, right * dilation_w) if tap else (entry[1] // 65536, entry[1] % 65536)
            for corner, shift, size in zip(self._corner, shifts, (conv.height, conv.width), strict=True):
                conditions += [corner[i] + shift >= 0, corner[i] + shift < size]
        return conditions

    def _units(self, step: Expr) -> Iterator[tuple[int, Expr, Any, Any, Expr]]:
        """(slab, unit of the slab, table entry or None, (u, v) or None, offset) of this thread's units, the same for all its windows."""
        conv, tile = self._conv, self._tile
        parts, per_slab = self._parts, tile.slab // self._per_entry
        for slab, q, part in itertools.product(range(tile.slabs), range(per_slab // parts // self._lanes), range(parts)):
            unit = (q * self._lanes + self._k) * parts + part
            if self._table is not None:
                at = (step * tile.slabs + slab) * per_slab + unit
                entry = local("entry", (self._table.shape[0],), "int32")  # read once: the compiler must assume that a copy changes memory
                for i in range(int(self._table.shape[0])):
                    T.buffer_store(entry, self._table[i, at], [i])
                yield slab, unit, entry, None, entry[0]
            else:
                steps = conv.in_channels // conv.groups // tile.block_k
                tap, c = step // steps, step % steps * tile.block_k + slab * tile.slab
                u, v = tap // conv.kernel[1], tap % conv.kernel[1]
                yield slab, unit, None, (u, v), self._offset(c, u, v) + unit * self._per_entry * self._strides.c

    def _place(self, stage: Expr, slab: int, row: Expr, unit: Expr, size: int) -> list[Expr]:
        """Indices of a unit of `size` bytes in shared memory."""
        per_chunk = CHUNK // size
        return [stage, slab, row, (_swizzled(row, unit // per_chunk) * per_chunk + unit % per_chunk) * (size // self._conv.itemsize)]

    def _copy(self, step: Expr, stage: Expr) -> None:
        size = self._unit * self._conv.itemsize
        for slab, unit, entry, tap, offset in self._units(step):
            with T.unroll(self._rows) as i:
                to = pointer(self.shared, *self._place(stage, slab, self._row + i * self._step_rows, unit, size))
                conditions = self._conditions(i, entry, tap)
                inside = [tirx.all(*conditions)] if conditions else []
                call(f"copy_async<{size}>", to, pointer(self._source, self._base[i] + offset), *inside)

    def _fetch(self, step: Expr) -> None:
        """Loads elements to registers one by one."""
        zero = tirx.const(0, self._conv.dtype)
        for j, (_, _, entry, tap, offset) in enumerate(self._units(step)):
            with T.unroll(self._rows) as i:
                value = self._source[self._base[i] + offset]
                conditions = self._conditions(i, entry, tap)
                value = T.if_then_else(tirx.all(*conditions), value, zero) if conditions else value
                T.buffer_store(self._fetched, value, [self._register(i, j)])

    def _register(self, row: Expr, j: int) -> Expr:
        """Register of the j-th element of a row; elements that are stored together have neighbouring registers."""
        return (j // self._parts * self._rows + row) * self._parts + j % self._parts

    def _put(self, stage: Expr) -> None:
        """Stores the loaded elements to shared memory, a word or 16 bytes at a time."""
        parts = self._parts
        stores = self._tile.slab // parts // self._lanes
        for slab, q in itertools.product(range(self._tile.slabs), range(stores)):
            with T.unroll(self._rows) as i:
                row = self._row + i * self._step_rows
                *outer, at = self._place(stage, slab, row, q * self._lanes + self._k, parts * self._conv.itemsize)
                with T.vectorized(parts) as part:
                    T.buffer_store(self.shared, self._fetched[self._register(i, (slab * stores + q) * parts) + part], [*outer, at + part])

    # --- producer side ---------------------------------------------------------------------------------------------------

    def prologue(self, step: int) -> None:
        """Issues the copies of one of the first steps."""
        if self._unit:
            self._copy(step, step)
        else:
            self._fetch(step)
            self._put(step)

    def advance(self, step: Expr, ahead: int, stage: Expr) -> None:
        """Before the product of `step`: issues the copies, or the loads to registers, for the step `ahead` steps later."""
        (self._copy if self._unit else lambda later, _: self._fetch(later))(step + ahead, stage)

    def settle(self, step: Expr, stage: Expr) -> None:
        """After the product: stores the elements that `advance` loaded to registers."""
        if not self._unit:
            self._put(stage)

    @property
    def copies(self) -> bool:
        """Whether copies are asynchronous, not loads to registers."""
        return self._unit > 0

    # --- consumer side ---------------------------------------------------------------------------------------------------

    def prepare(self, count: int, window: Callable[[Expr], Expr]) -> None:
        """Sets which windows a thread reads: the i-th of `count` is window(i) of the block."""
        self._window = window

    def at(self, i: Expr, slab: int, chunk: Expr, step: Expr) -> list[Expr]:
        """Indices of 16 bytes of the i-th window in shared memory."""
        row = self._window(i)
        return [step % self._tile.stages, slab, row, _swizzled(row, chunk) * (CHUNK // self._conv.itemsize)]

    width = 4

    def loads(self, step: Expr) -> Iterator[Callable[[Expr], list[Expr]]]:
        """For every `width` indices of the sum in a step: i -> indices of the i-th window's elements in shared memory."""
        for slab, chunk in itertools.product(range(self._tile.slabs), range(4)):
            yield functools.partial(self.at, slab=slab, chunk=chunk, step=step)


def _swizzled(row: Expr, chunk: Expr) -> Expr:
    return chunk ^ (row // 2 % 4)
