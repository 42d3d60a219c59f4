"""Winograd along rows in one kernel: F(m, 3) for every row of a convolution's kernel, transformed while windows are loaded.

    y[i] = A^T sum over c, u of (G w[c, u]) * (B^T d[c, u])        d: m + 2 neighbouring inputs of a row, y: m neighbouring outputs

The halo tile of a tile of outputs lies in shared memory, as for direct convolution. A Winograd tile is m + 2 columns of a row; tiles begin
m columns apart. A thread of a warpgroup loads the columns and transforms them to the operands of m + 2 products, each with its own
accumulators. No transformed tile is stored, and the number of multiplications is (m + 2) / 3m of direct convolution's. Filters are
transformed ahead of time. The epilogue applies A^T. The form is that of Lavin and Gray 2015, arXiv 1509.09308, in one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm.tirx.script import builder as T

from im2win.numerics.winograd_matrices import transform
from im2win.numerics.winograd_tiling import ROW_TAPS
from im2win.schedules.cuda.loaders.halo_tile import HaloLoader
from im2win.schedules.cuda.mma.fma import Run
from im2win.schedules.cuda.mma.mma_sync import Place, split
from im2win.schedules.cuda.mma.wgmma import WarpgroupProduct
from im2win.schedules.cuda.primitives import Expr, call, local, pointer
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES


class TileRows(HaloLoader):
    """The halo tile of a thread block's Winograd tiles.

    The problem is `numerics.winograd_tiling.row_problem`: every column of a tile is a tap.
    """

    @staticmethod
    def taps(conv: Conv2d) -> int:
        """Steps that read the same channels: kernel rows, since a step takes all columns."""
        return conv.kernel[0]

    def column(self, i: Expr, slab: int, chunk: Expr, step: Expr, v: int) -> list[Expr]:
        """Indices of 16 bytes of column v of the i-th tile in shared memory."""
        stage = step // self._taps % self.shared.shape[0]
        shift = self._geometry.shift(step % self._taps, v)
        return [stage, slab, self._first[i] + shift * self._pitch + chunk * (self._tile.slab // 4)]

    def outputs_of(self, conv: Conv2d) -> RowOutputs:
        """Maps the outputs of tiles to the output of the convolution."""
        return RowOutputs(conv, self._tile, self)


class RowOutputs:
    """Outputs of a thread block's tiles: output e of tile p is window p * m + e."""

    def __init__(self, conv: Conv2d, tile: MultistageTile, tiles: TileRows) -> None:
        self._conv, self._outputs, self._tiles = conv, tile.outputs, tiles

    def output(self, window: Expr) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x, conditions) of a window of the block: its output, and the conditions under which it exists."""
        n, m, tile, conditions = self._tiles.output(window // self._outputs)
        x, width = tile * self._outputs + window % self._outputs, self._conv.output_size[1]
        return n, m, x, [*conditions, *([x < width] if width % self._outputs else [])]

    @staticmethod
    def run(conv: Conv2d, tile: MultistageTile) -> int:
        """Largest n such that n windows, from a multiple of n on, are neighbours in one output row."""
        return math.gcd(conv.output_size[1], tile.cols * tile.outputs)


def _two(row: tuple[Any, ...]) -> tuple[str, int, int]:
    """A row of B^T as (operation, left, right): each row of F(2, 3) adds or subtracts two inputs."""
    (left, a), (right, b) = ((place, value) for place, value in enumerate(row) if value)
    assert {abs(a), abs(b)} == {1} and (a, b) != (-1, -1), row
    return ("add", left, right) if a == b else ("subtract", left, right) if a > 0 else ("subtract", right, left)


class RowProduct(WarpgroupProduct):
    """The products of a warpgroup with transformed tiles.

    Args:
        run: neighbouring outputs that one store takes: of a row (several tiles' where it is longer than a tile) or along channels.
    """

    def __init__(self, conv: Conv2d, tile: MultistageTile, operand: TileRows, tid: Expr, *, run: int) -> None:
        self._outputs, self._whole = tile.outputs, conv.layout == "NHWC" or run > 1
        self._form = transform(tile.outputs, ROW_TAPS)
        self._inputs = local("inputs", (tile.positions, 4), "uint32")
        super().__init__(conv, tile, operand, tid, run=run if conv.layout == "NHWC" else max(run // tile.outputs, 1))

    def _load(self, step: Expr, slab: int, half: int, i: Expr, place: Expr) -> None:
        """Loads a tile's columns and transforms them."""
        operand, kind = self._operand, ELEMENT_TYPES[self._tile.dtype].short
        for v in range(self._tile.positions):
            column = pointer(operand.shared, *operand.column(i * 2 + place, slab, self._t, step, v))
            call("load_words", pointer(self._inputs, v, 0), column)
        for position, row in enumerate(self._form.bt):
            name, left, right = _two(row)
            words = pointer(self._a[0], half + position, i, place, 0)
            call(f"{name}_{kind}", words, pointer(self._inputs, left, 0), pointer(self._inputs, right, 0))
            split(self._tile, self._a, half + position, i, place)

    def finish(self) -> None:
        """After the last step: applies A^T, so that accumulators of tile columns become those of tile outputs."""
        super().finish()
        every, self._cols = self._columns, self._columns
        results = local("results", (self._outputs,), self._tile.sum_dtype)
        with T.unroll(self._rows) as i, T.unroll(every) as j, T.unroll(4) as r:
            sums = [self._sums[i, position * every + j, r] for position in range(self._tile.positions)]
            for output, row in enumerate(self._form.at):
                T.buffer_store(results, _combined(row, sums), [output])
            for output in range(self._outputs):
                T.buffer_store(self._sums, results[output], [i, output * every + j, r])

    def _output(self, channel: Place, tile: Place, output: int) -> Any:
        (j, e), (i, half) = channel, tile
        return self._sums[i, output * self._columns + j, half * 2 + e]

    def each_window(self, body: Callable[[Expr, Callable[[Run], None]], None]) -> None:
        """Calls body(window, runs) for every output, or run of neighbours, of a thread; runs(take) calls `take` for its accumulators."""
        outputs = range(self._outputs)

        def channel_runs(tile: Place, e: int) -> Callable[[Run], None]:
            return lambda take: self._runs(False, lambda run: take(self._channel(run[0]), [self._output(one, tile, e) for one in run]))

        def window_runs(places: list[tuple[Place, int]]) -> Callable[[Run], None]:
            return lambda take: self._singles(
                False, lambda one: take(self._channel(one), [self._output(one, tile, e) for tile, e in places])
            )

        def tile_rows(run: list[Place]) -> None:
            first, places = self._window(run[0]) * self._outputs, [(tile, e) for tile in run for e in outputs]
            if self._whole:
                body(first, window_runs(places))
            else:
                for e, place in enumerate(places):
                    body(first + e, window_runs([place]))

        def tile_channels(tile: Place) -> None:
            for e in outputs:
                body(self._window(tile) * self._outputs + e, channel_runs(tile, e))

        if self._along_channels:
            self._singles(True, tile_channels)
        else:
            self._runs(True, tile_rows)


def _combined(row: tuple[Any, ...], values: list[Any]) -> Any:
    """The dot product of a row of A^T, whose numbers are 0, 1 and -1, with values."""
    total: Any = None
    for factor, value in zip(row, values, strict=True):
        if factor:
            assert abs(factor) == 1, row
            total = (value if factor > 0 else -value) if total is None else total + value if factor > 0 else total - value
    return total
