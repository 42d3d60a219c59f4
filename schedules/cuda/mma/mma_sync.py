"""Products on tensor cores: what all of them share, and the micro-kernel of a warp with `mma.sync`.

Lane 4*g + t of a warp holds the accumulators of rows g and g + 8 and columns 2*t and 2*t + 1. Which channels or windows these rows and
columns are is free: the assignment makes the accumulators of a lane neighbours in the output, as many as one store takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.packing.mma_fragments import column, row
from im2win.schedules.cuda.arithmetic import MULTIPLIERS, SLAB
from im2win.schedules.cuda.mma.fma import Run
from im2win.schedules.cuda.primitives import CHUNK, Expr, call, local, pointer
from im2win.schedules.cuda.tiles.multistage import MultistageTile, depth, promoted
from im2win.spec.conv2d import Conv2d

STEPS = 2  # instructions along the sum in a slab
PROMOTED = 512  # products of a float32 sum in one accumulator, before a fresh one continues it
SHRINK, SHRINK_STEP = 2.6e-7, 6.2e-9  # share of a sum of TF32 parts that truncation takes: fixed, and for each product; H200

Place = tuple[Expr, Expr]
"""(tile of rows or columns, which of the two that a lane holds of it)"""


def restored(products: int) -> float:
    """Factor that restores a float32 sum of this many products to its size.

    Every instruction truncates the partial sum, which is k/K of the whole on average after k of K products. So all outputs of a layer
    shrink by one common share.
    """
    return 1 + SHRINK + SHRINK_STEP * products


class TensorProduct:
    """Accumulators of a thread on tensor cores: [tiles of 16 rows, tiles of 8 columns, 4].

    Args:
        channels_are_rows: whether channels are the rows of products, and windows the columns; else the reverse.
        run: neighbouring outputs that one store takes: channels with channels last, else windows; see `row` and `column`.
    """

    def __init__(self, conv: Conv2d, tile: MultistageTile, rows: int, cols: int, *, channels_are_rows: bool, run: int) -> None:
        self._tile, self._rows, self._cols = tile, rows, cols
        self._channels_are_rows, self._along_channels, self._run = channels_are_rows, conv.layout == "NHWC", run
        self._every = -(-PROMOTED // tile.block_k) if promoted(conv, tile) else 0
        self._factor = 1.0
        if tile.arithmetic.parts == 2:
            products = depth(conv, tile)
            self._factor = restored(min(products, self._every * tile.block_k) if self._every else products)
        self._sums = local("sums", (rows, cols, 4), tile.sum_dtype)
        self._totals: Any = local("totals", (rows, cols, 4), tile.sum_dtype) if self._every else None

    def _begin(self) -> None:
        self._clear(self._sums)
        if self._every:
            self._clear(self._totals)

    def _clear(self, sums: Any) -> None:
        with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
            T.buffer_store(sums, tirx.const(0, self._tile.sum_dtype), [i, j, r])

    def _channel(self, place: Place) -> Expr:
        """Channel of the block for a row or column."""
        raise NotImplementedError

    def _window(self, place: Place) -> Expr:
        """Window of the block for a row or column."""
        raise NotImplementedError

    def _wait(self) -> None:
        """Waits until all products are complete."""

    def _add_totals(self) -> None:
        with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
            T.buffer_store(self._totals, self._totals[i, j, r] + self._sums[i, j, r], [i, j, r])

    def promote(self, step: Expr) -> None:
        """Every `PROMOTED` products adds the accumulators to totals and clears them.

        Tensor cores truncate accumulators towards zero, so that the error of long sums would grow with their length.
        """
        if self._every:
            with T.If(step % self._every == self._every - 1), T.Then():
                self._wait()
                self._add_totals()
                self._clear(self._sums)

    def finish(self) -> None:
        """After the last step: waits for all products, completes the sums and restores what truncation took of them."""
        self._wait()
        if self._every:
            self._add_totals()
            self._sums = self._totals
        if self._factor != 1.0:
            with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
                T.buffer_store(self._sums, self._sums[i, j, r] * tirx.const(self._factor, self._tile.sum_dtype), [i, j, r])

    # --- accumulators in the order of the epilogue -----------------------------------------------------------------------

    def _sum(self, channel: Place, window: Place) -> Any:
        (i, half), (j, e) = (channel, window) if self._channels_are_rows else (window, channel)
        return self._sums[i, j, half * 2 + e]

    def _singles(self, rows: bool, body: Callable[[Place], None]) -> None:
        """Calls `body` for every row or column of a lane."""
        if rows:
            with T.unroll(self._rows) as i, T.unroll(2) as half:
                body((i, half))
        else:
            with T.unroll(self._cols) as j:
                for e in range(2):
                    body((j, e))

    def _runs(self, rows: bool, body: Callable[[list[Place]], None]) -> None:
        """Calls `body` for every run of rows or columns that are neighbours in the output.

        A run takes two from each of run/2 tiles; runs of one take each row or column by itself.
        """
        tiles = max(self._run // 2, 1)
        with T.unroll((self._rows if rows else self._cols) // tiles) as group:
            for start in range(1) if self._run > 1 else range(2):
                body([(group * tiles + k // 2, (start + k) % 2) for k in range(self._run)])

    def each_window(self, body: Callable[[Expr, Callable[[Run], None]], None]) -> None:
        """Calls body(window, runs) for every window, or run of neighbours, of a thread; runs(take) calls `take` for its accumulators."""
        rows = self._channels_are_rows

        def channel_runs(window: Place) -> Callable[[Run], None]:
            return lambda take: self._runs(rows, lambda run: take(self._channel(run[0]), [self._sum(one, window) for one in run]))

        def window_runs(run: list[Place]) -> Callable[[Run], None]:
            return lambda take: self._singles(rows, lambda one: take(self._channel(one), [self._sum(one, window) for window in run]))

        if self._along_channels:
            self._singles(not rows, lambda window: body(self._window(window), channel_runs(window)))
        else:
            self._runs(not rows, lambda run: body(self._window(run[0]), window_runs(run)))


class MatrixProduct(TensorProduct):
    """The products of a warp with `mma.sync`, of 16 channels by 8 windows each."""

    def __init__(self, conv: Conv2d, tile: MultistageTile, operand: Any, tid: Expr, *, run: int) -> None:
        self._operand = operand
        warp, self._lane = tid // 32, tid % 32
        self._g, self._t = self._lane // 4, self._lane % 4
        self._m, self._n = warp % tile.warps[0] * tile.warp_m, warp // tile.warps[0] * tile.warp_n
        super().__init__(conv, tile, tile.warp_m // 16, tile.warp_n // 8, channels_are_rows=True, run=run)
        parts = ("high", "low") if tile.arithmetic.parts == 2 else ("word",)
        self._a = [local(f"a_{part}", (self._rows, 4), "uint32") for part in parts]
        self._b = [local(f"b_{part}", (self._cols, 4), "uint32") for part in parts]
        operand.prepare(self._cols, lambda j: self._column(j, self._g))
        self._begin()

    def _column(self, j: Expr, place: Expr) -> Expr:
        return self._n + column(j, place, 1 if self._along_channels else self._run)

    def _window(self, place: Place) -> Expr:
        return self._column(place[0], self._t * 2 + place[1])

    def _channel(self, place: Place) -> Expr:
        return self._m + row(place[0], place[1] * 8 + self._g, self._run if self._along_channels else 1)

    def multiply(self, filters: Any, step: Expr, register_set: int) -> None:
        """Adds the products of one step."""
        tile, elements = self._tile, CHUNK * self._tile.slab // SLAB
        for slab in range(tile.slabs):
            with T.unroll(self._cols) as j:
                call("load_words", pointer(self._b[0], j, 0), pointer(self._operand.shared, *self._operand.at(j, slab, self._t, step)))
                split(tile, self._b, j)
            for part in range(STEPS):
                for half, a in enumerate(self._a):
                    with T.unroll(self._rows) as i:
                        load = ((slab * tile.block_m // 16 + self._m // 16 + i) * STEPS + part) * len(self._a) + half
                        call("load_words", pointer(a, i, 0), pointer(filters, step % tile.stages, (load * 32 + self._lane) * elements))
                with T.unroll(self._rows) as i, T.unroll(self._cols) as j:
                    self._product(i, j, part)
        self.promote(step)

    def _product(self, i: Expr, j: Expr, part: int) -> None:
        name = f"product_{MULTIPLIERS[self._tile.dtype].kind}"
        for a, b in SPLIT_PRODUCTS[len(self._a) - 1]:
            call(name, pointer(self._sums, i, j, 0), pointer(self._a[a], i, 0), pointer(self._b[b], j, part * 2))


SPLIT_PRODUCTS = ([(0, 0)], [(1, 0), (0, 1), (0, 0)])
"""By parts less one: which parts of the two operands are multiplied, smallest first. What two low parts would give is lost."""


def split(tile: MultistageTile, words: list[Any], *at: Expr) -> None:
    """Converts a window's four words, at words[0][*at, :], to operands of tensor cores: TF32, or two TF32 parts of a float32."""

    def place(w: Expr) -> tuple[Expr, ...]:
        return (*at, w)

    if tile.arithmetic.parts == 1:
        with T.unroll(4) as w:
            T.buffer_store(words[0], T.call_extern("uint32", "im2win::rounded_tf32", words[0][place(w)]), [*at, w])
    elif tile.arithmetic.parts == 2:
        high, low = words
        with T.unroll(4) as w:
            part = T.call_extern("uint32", "im2win::low_part", high[place(w)], T.call_extern("uint32", "im2win::high_part", high[place(w)]))
            T.buffer_store(low, part, [*at, w])  # the low part first: the high part overwrites the word
            T.buffer_store(high, T.call_extern("uint32", "im2win::high_part", high[place(w)]), [*at, w])
