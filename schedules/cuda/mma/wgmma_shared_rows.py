"""The micro-kernel of a consumer warpgroup in the warp-specialized kernel, which computes its share of the block's channels."""

from __future__ import annotations

import itertools
from typing import Any, cast

from tvm.tirx.script import builder as T

from im2win.packing.mma_fragments import row
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.mma.mma_sync import Place, TensorProduct
from im2win.schedules.cuda.mma.wgmma_shared import SharedProduct
from im2win.schedules.cuda.primitives import CHUNK, Expr, call, local, pointer
from im2win.schedules.cuda.tiles.fields import halo_tile
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import LANES, M, channel_run
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d


class StagedProduct(SharedProduct):
    """The products of a warpgroup's channels with a stage of windows."""

    _field: StagedHaloTile

    def __init__(self, conv: Conv2d, tile: WarpSpecializedTile, filters: Any, stages: Any, tid: Expr) -> None:
        self._conv, self._field, self._filters, self._stages = conv, halo_tile(conv, tile), filters, stages
        warp, lane = tid // 32 % 4, tid % 32
        self._warp, self._g, self._t = warp, lane // 4, lane % 4
        self._channels, self._kept = channel_run(conv), self._field.kept
        run = self._channels if conv.layout == "NHWC" else self._field.run_of_outputs
        rows = tile.warp_m // M
        self._first = tid // LANES % tile.groups * rows  # this warpgroup's first of the block's runs of 64 channels
        TensorProduct.__init__(
            self, conv, cast(Any, tile), rows, self._field.columns // 8, channels_are_rows=True, run=run
        )
        self._chain = MULTIPLIERS[tile.dtype].chain
        self._products: Any = local("products", (rows, self._cols, 4), tile.sum_dtype) if self._chain else None

    def _channel(self, place: Place) -> Expr:
        return row((self._first + place[0]) * 4 + self._warp, place[1] * 8 + self._g, self._channels)

    def fours(self) -> tuple[Expr, Any]:
        """See `SharedProduct.fours`."""
        column, first = super().fours()
        return column, lambda i: first(self._first + i)

    @property
    def kept(self) -> list[int]:
        """Indices of the runs of eight columns that are written."""
        return self._kept

    def keep(self, runs: list[int]) -> None:
        """Sets the runs of eight columns that are written from here on."""
        self._kept = runs

    def four(self, i: Expr, j: Expr) -> Expr:
        """Address of a thread's four accumulators of the i-th product and the j-th run of eight columns."""
        return pointer(self._sums, i, j, 0)

    def clear(self) -> None:
        """Clears the accumulators, at the beginning of a tile."""
        super().clear()
        if self._chain:
            self._clear(self._products)

    def _wait(self) -> None:
        call("end_products")
        self._hold(self._sums)

    def _hold(self, sums: Any) -> None:
        with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
            call("hold", pointer(sums, i, j, r))

    def multiply_taps(self, first: int, window: Expr, filters: Expr) -> None:
        """Issues the products of `tile.taps` taps.

        Args:
            first: index of the first tap.
            window: stage of windows. filters: stage of filters, which holds those of these taps.
        """
        if self._chain:
            self._multiply_chains(first, window, filters)
            return
        call("begin_products")
        for tap, k in itertools.product(range(self._tile.taps), range(self._tile.units // 2)):
            self._issue("shared", self._sums, first, tap, k, window, filters)
        call("commit_products")

    def _multiply_chains(self, first: int, window: Expr, filters: Expr) -> None:
        """The same, with accumulators that take `Multiplier.chain` instructions and are then added to the sums."""
        places = list(itertools.product(range(self._tile.taps), range(self._tile.units // 2)))
        for begin in range(0, len(places), self._chain):
            call("begin_products")
            for number, (tap, k) in enumerate(places[begin : begin + self._chain]):
                self._issue("shared" if number else "first", self._products, first, tap, k, window, filters)
            call("commit_products")
            call("end_products")
            self._hold(self._products)
            call(f"take_over<{self._rows * self._cols * 4}>", pointer(self._sums, 0, 0, 0), pointer(self._products, 0, 0, 0))

    def _issue(self, form: str, sums: Any, first: int, tap: int, k: int, window: Expr, filters: Expr) -> None:
        """Issues the products of a tap with the k-th 32 bytes of a step's channels."""
        tile, f = self._tile, self._field
        name = f"wgmma_{form}_{MULTIPLIERS[tile.dtype].kind}<{f.columns}, {f.pixel_bytes}>"
        shift = f.shift(*divmod(first + tap, self._conv.kernel[1]))
        for i in range(self._rows):
            at = (tap * tile.units + 2 * k) * tile.block_m + (self._first + i) * M
            a = pointer(self._filters, filters, at * tile.unit)
            column = shift * tile.units + 2 * k if f.boxed else 2 * k * f.stage_pixels + shift
            b = pointer(self._stages, window, column * tile.unit)
            call(name, pointer(sums, i, 0, 0), a, tile.block_m * CHUNK, b, f.stage_pixels * CHUNK)
