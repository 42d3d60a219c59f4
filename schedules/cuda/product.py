"""The micro-kernels: what a warp does with one step's slabs in shared memory.

"fma": a warp is 4 x 8 threads. Thread (a, b) holds channels 4*a to 4*a+3 of every 16 and windows b, b+8, ...: an outer product in registers
(thesis Alg. 9), of a window's elements as many at a time as the operand lets it load. Where that is one, a warp is 1 x 32 threads: one load
of filters then serves them all, and so does one of 32 neighbouring windows.
Tensor cores: the warp's tile is cut into products of 16 channels and 8 windows. Which channel a row of a product is, and which window a
column, is ours to say: so that the sums of a lane are as many neighbours in the output as one store takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.cuda_packing import column, row
from im2win.schedules.cuda.shared import CHUNK, Expr, call, local, pointer
from im2win.schedules.cuda.tile import SLAB, CudaTile

STEPS = 2  # products that a slab is long
Run = Callable[[Expr, list[Any]], None]
"""(channel, sums): takes the sums of neighbours in the output: windows (NCHW) or channels (NHWC), from this channel on."""


def fma_lanes(tile: CudaTile) -> tuple[int, int]:
    """Threads of a warp along channels and along windows, on CUDA cores."""
    return (1, 32) if tile.planes else (4, 8)


class FmaProduct:
    """Sums [windows, channels] of a thread, on CUDA cores.

    Args:
        run: neighbouring channels that one store takes, 1 or 4.
    """

    def __init__(self, tile: CudaTile, operand: Any, tid: Expr, *, run: int) -> None:
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
        """Channel of the block that row j of the sums is."""
        return self._m + j // 4 * (4 * self._across) + self._a * 4 + j % 4

    def window(self, i: Expr) -> Expr:
        """Window of the block that column i of the sums is."""
        return self._n + i * self._along + self._b

    def multiply(self, filters: Any, step: Expr) -> None:
        """Adds the product of one step."""
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
        """Adds the product of filters and windows at one index of the sum, the k-th of the step."""
        start = k * self._tile.block_m
        with T.unroll(self._rows // 4) as j, T.vectorized(4) as part:
            T.buffer_store(self._filter, filters[step % self._tile.stages, start + self.channel(j * 4) + part], [j * 4 + part])
        with T.unroll(self._cols) as i, T.unroll(self._rows) as j:
            T.buffer_store(self._sums, self._sums[i, j] + self._filter[j] * self._window[i, e], [i, j])

    def each_window(self, body: Callable[[Expr, Callable[[Run], None]], None]) -> None:
        """Calls body(window, runs) for every window of a thread; runs(take) then calls `take` for its sums."""
        with T.unroll(self._cols) as i:

            def runs(take: Run) -> None:
                with T.unroll(self._rows // self._run) as j:
                    take(self.channel(j * self._run), [self._sums[i, j * self._run + e] for e in range(self._run)])

            body(self.window(i), runs)


class MatrixProduct:
    """Sums of a warp on tensor cores: [tiles of 16 channels, tiles of 8 windows, 4].

    Args:
        run: neighbouring outputs that one store takes: of windows, or `along_channels`; see `row` and `column`.
    """

    def __init__(self, tile: CudaTile, operand: Any, tid: Expr, *, along_channels: bool, run: int) -> None:
        self._tile, self._operand, self._along_channels, self._run = tile, operand, along_channels, run
        warp, self._lane = tid // 32, tid % 32
        self._g, self._t = self._lane // 4, self._lane % 4
        self._m, self._n = warp % tile.warps[0] * tile.warp_m, warp // tile.warps[0] * tile.warp_n
        self._rows, self._cols = tile.warp_m // 16, tile.warp_n // 8
        self._sums = local("sums", (self._rows, self._cols, 4), tile.sum_dtype)
        parts = ("high", "low") if tile.product == "tf32x3" else ("word",)
        self._a = [local(f"a_{part}", (self._rows, 4), "uint32") for part in parts]
        self._b = [local(f"b_{part}", (self._cols, 4), "uint32") for part in parts]
        operand.prepare(self._cols, lambda j: self._window(j, self._g))
        with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
            T.buffer_store(self._sums, tirx.const(0, tile.sum_dtype), [i, j, r])

    def _window(self, j: Expr, place: Expr) -> Expr:
        return self._n + column(j, place, 1 if self._along_channels else self._run)

    def _channel(self, i: Expr, half: Expr) -> Expr:
        return self._m + row(i, half * 8 + self._g, self._run if self._along_channels else 1)

    def multiply(self, filters: Any, step: Expr) -> None:
        """Adds the product of one step."""
        tile, elements = self._tile, CHUNK * self._tile.slab // SLAB
        for slab in range(tile.slabs):
            with T.unroll(self._cols) as j:
                call("load_words", pointer(self._b[0], j, 0), pointer(self._operand.shared, *self._operand.at(j, slab, self._t, step)))
                self._split(j)
            for part in range(STEPS):
                for half, a in enumerate(self._a):
                    with T.unroll(self._rows) as i:
                        load = ((slab * tile.block_m // 16 + self._m // 16 + i) * STEPS + part) * len(self._a) + half
                        call("load_words", pointer(a, i, 0), pointer(filters, step % tile.stages, (load * 32 + self._lane) * elements))
                with T.unroll(self._rows) as i, T.unroll(self._cols) as j:
                    self._product(i, j, part)

    def _split(self, j: Expr) -> None:
        """Makes a window's words what the unit reads: TF32, or the two parts of a float32. Filters are packed like that."""
        if self._tile.product == "tf32":
            with T.unroll(4) as w:
                T.buffer_store(self._b[0], T.call_extern("uint32", "im2win::rounded_tf32", self._b[0][j, w]), [j, w])
        elif self._tile.product == "tf32x3":
            high, low = self._b
            with T.unroll(4) as w:
                part = T.call_extern("uint32", "im2win::low_part", high[j, w], T.call_extern("uint32", "im2win::high_part", high[j, w]))
                T.buffer_store(low, part, [j, w])  # first: the high part takes the word's place
                T.buffer_store(high, T.call_extern("uint32", "im2win::high_part", high[j, w]), [j, w])

    def _product(self, i: Expr, j: Expr, part: int) -> None:
        name = {"tf32": "product_tf32", "tf32x3": "product_tf32", "f16": "product_f16", "s8": "product_s8"}[self._tile.product]
        for a, b in [(1, 0), (0, 1), (0, 0)] if self._tile.product == "tf32x3" else [(0, 0)]:
            call(name, pointer(self._sums, i, j, 0), pointer(self._a[a], i, 0), pointer(self._b[b], j, part * 2))

    def each_window(self, body: Callable[[Expr, Callable[[Run], None]], None]) -> None:
        """Calls body(window, runs) for every window, or run of neighbours, of a thread; runs(take) then calls `take` for its sums."""
        tiles = max(self._run // 2, 1)  # products that hold the sums of a run, two each; a run of one has every second
        starts = range(1) if self._run > 1 else range(2)

        def channel_runs(j: Expr, e: int) -> Callable[[Run], None]:
            def runs(take: Run) -> None:
                with T.unroll(self._rows // tiles) as group:
                    for start in starts:
                        pairs = [(group * tiles + k // 2, (start + k) % 2) for k in range(self._run)]
                        take(self._channel(group * tiles, start), [self._sums[i, j, half * 2 + e] for i, half in pairs])

            return runs

        def window_runs(group: Expr, start: int) -> Callable[[Run], None]:
            def runs(take: Run) -> None:
                with T.unroll(self._rows) as i, T.unroll(2) as half:
                    sums = [self._sums[i, group * tiles + k // 2, half * 2 + (start + k) % 2] for k in range(self._run)]
                    take(self._channel(i, half), sums)

            return runs

        if self._along_channels:
            with T.unroll(self._cols) as j:
                for e in range(2):
                    body(self._window(j, self._t * 2 + e), channel_runs(j, e))
        else:
            with T.unroll(self._cols // tiles) as group:
                for start in starts:
                    body(self._window(group * tiles, self._t * 2 + start), window_runs(group, start))
