"""The micro-kernel of a warpgroup with `wgmma` for the persistent kernel: filters and windows both in shared memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, cast

from tvm.tirx.script import builder as T

from im2win.packing.mma_fragments import row
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.mma.mma_sync import Place, TensorProduct
from im2win.schedules.cuda.primitives import CHUNK, Expr, call, pointer
from im2win.schedules.cuda.tiles.persistent import HaloTile, M, PersistentTile, channel_run
from im2win.spec.conv2d import Conv2d


class SharedProduct(TensorProduct):
    """The products of a warpgroup, filters by windows, both in shared memory."""

    _tile: Any

    def __init__(self, conv: Conv2d, tile: PersistentTile, filters: Any, stages: Any, tid: Expr) -> None:
        self._conv, self._field, self._filters, self._stages = conv, HaloTile(conv, tile), filters, stages
        warp, lane = tid // 32 % 4, tid % 32
        self._warp, self._g, self._t = warp, lane // 4, lane % 4
        self._channels = channel_run(conv)
        run = self._channels if conv.layout == "NHWC" else self._field.run_of_outputs
        super().__init__(conv, cast(Any, tile), tile.block_m // M, self._field.columns // 8, channels_are_rows=True, run=run)

    def clear(self) -> None:
        """Clears the accumulators, at the beginning of a tile."""
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
    def g(self) -> Expr:
        """Index of the lane's four lanes among the eight of a warp that hold different channels."""
        return self._g

    @property
    def t(self) -> Expr:
        """Index of the lane among the four that hold the same channels, of different columns."""
        return self._t

    def fours(self) -> tuple[Expr, Callable[[Expr], Expr]]:
        """Position of a lane's accumulators after the lane exchange with the lane of the next or previous two channels.

        See `lane_exchange.patch_epilogue`.

        Returns:
            (the lane's column of eight, a function of i: the first of its four channels in the i-th product).
        """
        return self._t * 2 + self._g % 2, lambda i: (i * 4 + self._warp) * 16 + self._g // 2 * 4

    def channel(self, i: Expr, half: Expr) -> Expr:
        """One of the two channels (half = 0 or 1) that a thread holds in the i-th product."""
        return self._channel((i, half))

    def sum(self, i: Expr, half: int, j: int, e: int) -> Expr:
        """The accumulator of that channel and of one of the two columns (e = 0 or 1) that a thread holds in the j-th run of eight."""
        return self._sums[i, j, half * 2 + e]

    @property
    def rows(self) -> int:
        """Products along channels, 64 channels each."""
        return self._rows

    @property
    def kept(self) -> list[int]:
        """Indices of those runs of eight columns that contain an output."""
        field = self._field
        inside = [i % field.pitch < field.tile.cols and i // field.pitch < field.tile.rows for i in range(field.columns)]
        return [j for j in range(self._cols) if any(inside[j * 8 : j * 8 + 8])]

    def _wait(self) -> None:
        call("finish_products")
        with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
            call("hold", pointer(self._sums, i, j, r))

    def multiply(self, part: Expr, stage: Expr) -> None:
        """Issues the products of all taps with a step's channels."""
        call("begin_products")
        for u, v in itertools.product(*map(range, self._conv.kernel)):
            for k, i in itertools.product(range(self._tile.units // 2), range(self._rows)):
                self._product(part, stage, u * self._conv.kernel[1] + v, self._field.shift(u, v), k, i)
        call("commit_products")

    def _product(self, part: Expr, stage: Expr, tap: int, shift: int, k: int, i: int) -> None:
        tile, f, kind = self._tile, self._field, MULTIPLIERS[self._tile.dtype].kind
        at = ((part * math.prod(self._conv.kernel) + tap) * tile.units + 2 * k) * tile.block_m + i * M
        column = shift * tile.units + 2 * k if f.boxed else 2 * k * f.stage_pixels + shift
        a, b = pointer(self._filters, at * tile.unit), pointer(self._stages, stage, column * tile.unit)
        name = f"wgmma_shared_{kind}<{f.columns}, {f.pixel_bytes}>"
        call(name, pointer(self._sums, i, 0, 0), a, tile.block_m * CHUNK, b, f.stage_pixels * CHUNK)
