"""Loader of halo tiles with all of their few channels at once, as channel planes whose rows are copied in memory order.

A step of the sum is some rows of the kernel. A thread reads one element of each of its windows at a time, and neighbouring threads of a
warp read neighbouring elements.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.loaders.halo_geometry import Geometry
from im2win.schedules.cuda.loaders.halo_tile import HaloWindows
from im2win.schedules.cuda.primitives import WORD, Arena, Expr, call, padded, pointer
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d


def _shape(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> tuple[int, int]:
    return conv.in_channels // conv.groups, Geometry.of(conv, tile, plan).pixels


def shared_bytes(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> int:
    """Bytes of shared memory that the channel planes take."""
    return padded(_shape(conv, tile, plan), tile.dtype)


class Planes(HaloWindows):
    """The halo tile of a thread block's tile of outputs, with all channels of a group."""

    width = 1
    copies = True

    def __init__(
        self, conv: Conv2d, tile: MultistageTile, plan: WindowSource, arena: Arena, source: Any, block: Expr, group: Expr, tid: Expr
    ) -> None:
        super().__init__(conv, tile, plan, block)
        self._source, self._tid, self._group = source, tid, group
        self.shared = arena.take("planes", _shape(conv, tile, plan), tile.dtype)

    # --- producer side ---------------------------------------------------------------------------------------------------

    def prologue(self, step: int) -> None:
        """Issues the copies of the halo tile at step 0. Neighbouring threads copy neighbouring pixels of a row."""
        conv, tile, g = self._conv, self._tile, self._geometry
        if step > 0:
            return
        channels, stride = conv.in_channels // conv.groups, 1 if conv.layout == "NHWC" else conv.height * conv.width
        with T.serial(-(-g.copies // tile.threads)) as i:
            copy = i * tile.threads + self._tid
            with T.If(copy < g.copies), T.Then():
                pixel = copy // (g.height * g.width), copy // g.width % g.height, copy % g.width
                offset, inside = self._source_pixel(*pixel)
                to = g.place(*pixel)
                with T.unroll(channels) as c:
                    source = pointer(self._source, offset + (self._group * channels + c) * stride)
                    call(f"copy_async<{WORD}>", pointer(self.shared, c, to), source, inside)

    def advance(self, step: Expr, ahead: int, stage: Expr) -> None:
        """Does nothing: the prologue has copied everything."""

    def settle(self, step: Expr, stage: Expr) -> None:
        """Does nothing: all copies are asynchronous."""

    # --- consumer side ---------------------------------------------------------------------------------------------------

    def prepare(self, count: int, window: Callable[[Expr], Expr]) -> None:
        """Computes the first pixels of the windows that a thread reads: the i-th of `count` is window(i) of the block."""
        self._first = self._prepare(count, window, 1)

    def _at(self, i: Expr, step: Expr, row: int, v: int) -> list[Expr]:
        tap, rows = step * self._tile.slabs + row, self._conv.kernel[0]
        return [tap // rows, self._first[i] + self._geometry.shift(tap % rows, v)]

    def loads(self, step: Expr) -> Iterator[Callable[[Expr], list[Expr]]]:
        """For every index of the sum in a step: i -> indices of the i-th window's element in shared memory."""
        for row, v in itertools.product(range(self._tile.slabs), range(self._conv.kernel[1])):
            yield functools.partial(self._at, step=step, row=row, v=v)


def rows(conv: Conv2d) -> int:
    """Kernel rows of all channels of a group; a step is a whole number of them."""
    return math.prod(conv.filter_shape[1:3])
