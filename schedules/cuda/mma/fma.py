"""The micro-kernel on CUDA cores: the product of a warp over the slabs of one step, from shared memory.

A warp is 4 x 8 threads. Thread (a, b) computes channels 4*a to 4*a+3 of every 16 and windows b, b+8, ...: an outer product in registers, as
in the GPU algorithm of im2win (arXiv 2306.14316). It loads as many elements of a window at once as the loader's layout allows. With channel
planes that is one element, and a warp is 1 x 32 threads: all threads then load the same filters, and 32 neighbouring windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import Expr, local
from im2win.schedules.cuda.tiles.multistage import MultistageTile

Run = Callable[[Expr, list[Any]], None]
"""(channel, sums): takes the sums of neighbours in the output: windows (NCHW) or channels (NHWC), from this channel on."""


def fma_lanes(tile: MultistageTile) -> tuple[int, int]:
    """(threads of a warp along channels, threads along windows) on CUDA cores."""
    return (1, 32) if tile.planes else (4, 8)


class FmaProduct:
    """Accumulators [windows, channels] of a thread, on CUDA cores.

    Args:
        run: neighbouring channels that one store takes, 1 or 4.
    """

    def __init__(self, tile: MultistageTile, operand: Any, tid: Expr, *, run: int) -> None:
        self._tile, self._operand, self._run = tile, operand, run
        warp, lane = tid // 32, tid % 32
        self._across, self._along = fma_lanes(tile)
        self._a, self._b = lane // self._along, lane % self._along
        self._m, self._n = warp % tile.warps[0] * tile.warp_m, warp // tile.warps[0] * tile.warp_n
        self._rows, self._cols = tile.warp_m // self._across, tile.warp_n // self._along
        self._sums = local("sums", (self._cols, self._rows), "float32")
        self._window = local("window", (self._cols, operand.width), "float32")
        self._filter = local("filter4", (self._rows,), "float32")
        operand.prepare(self._cols, self.window)
        with T.unroll(self._cols) as i, T.unroll(self._rows) as j:
            T.buffer_store(self._sums, tirx.const(0, "float32"), [i, j])

    def channel(self, j: Expr) -> Expr:
        """Channel of the block for column j of the accumulators."""
        return self._m + j // 4 * (4 * self._across) + self._a * 4 + j % 4

    def window(self, i: Expr) -> Expr:
        """Window of the block for row i of the accumulators."""
        return self._n + i * self._along + self._b

    def multiply(self, filters: Any, step: Expr, register_set: int) -> None:
        """Adds the products of one step."""
        width = self._operand.width
        for k, load in enumerate(self._operand.loads(step)):
            with T.unroll(self._cols) as i:
                *outer, at = load(i)
                if width == 1:
                    T.buffer_store(self._window, self._operand.shared[tuple([*outer, at])], [i, 0])
                else:
                    with T.vectorized(width) as part:
                        T.buffer_store(self._window, self._operand.shared[tuple([*outer, at + part])], [i, part])
            for e in range(width):
                self._outer_product(filters, step, k * width + e, e)

    def _outer_product(self, filters: Any, step: Expr, k: int, e: int) -> None:
        """Adds the outer product of filters and windows at one index of the sum, the k-th of the step."""
        start = k * self._tile.block_m
        with T.unroll(self._rows // 4) as j, T.vectorized(4) as part:
            T.buffer_store(self._filter, filters[step % self._tile.stages, start + self.channel(j * 4) + part], [j * 4 + part])
        with T.unroll(self._cols) as i, T.unroll(self._rows) as j:
            T.buffer_store(self._sums, self._sums[i, j] + self._filter[j] * self._window[i, e], [i, j])

    def finish(self) -> None:
        """Does nothing: no product is asynchronous."""

    def each_window(self, body: Callable[[Expr, Callable[[Run], None]], None]) -> None:
        """Calls body(window, runs) for every window of a thread; runs(take) calls `take` for each run of its accumulators."""
        with T.unroll(self._cols) as i:

            def runs(take: Run) -> None:
                with T.unroll(self._rows // self._run) as j:
                    take(self.channel(j * self._run), [self._sums[i, j * self._run + e] for e in range(self._run)])

            body(self.window(i), runs)
