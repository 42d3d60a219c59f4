"""The micro-kernel of a warpgroup with `wgmma`: 64 windows by up to 256 channels, windows in registers, filters in shared memory.

Windows are the rows of the product. A lane loads them as for `mma.sync`, 16 bytes at a time, so that every layout in shared memory serves,
and splits them into TF32 parts in registers. Products run asynchronously while the next slab is loaded to the other half of the registers.
"""

from __future__ import annotations

import itertools
from typing import Any

from tvm.tirx.script import builder as T

from im2win.packing.mma_fragments import column, row
from im2win.schedules.cuda.arithmetic import MULTIPLIERS, SLAB
from im2win.schedules.cuda.mma.mma_sync import SPLIT_PRODUCTS, STEPS, Place, TensorProduct, split
from im2win.schedules.cuda.primitives import CHUNK, Expr, call, local, pointer
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d

CHUNKS = 4  # chunks of 16 bytes that a slab has of a channel


class WarpgroupProduct(TensorProduct):
    """The products of a warpgroup with `wgmma`, windows in registers."""

    def __init__(self, conv: Conv2d, tile: MultistageTile, operand: Any, tid: Expr, *, run: int) -> None:
        self._operand = operand
        group, warp, lane = tid // 128, tid // 32 % 4, tid % 32
        self._g, self._t = lane // 4, lane % 4
        self._columns = tile.warp_m // 8
        super().__init__(conv, tile, tile.warp_n // 64, tile.positions * self._columns, channels_are_rows=False, run=run)
        self._m = group % tile.warps[0] * tile.warp_m
        self._n = group // tile.warps[0] * tile.warp_n + warp * (16 * self._rows)
        parts = ("high", "low") if tile.arithmetic.parts == 2 else ("word",)
        self._a = [local(f"a_{part}", (tile.halves * tile.positions, self._rows, 2, 4), "uint32") for part in parts]
        operand.prepare(self._rows * 2, lambda i: self._window((i // 2, i % 2)))
        self._begin()

    def _window(self, place: Place) -> Expr:
        return self._n + row(place[0], place[1] * 8 + self._g, 1 if self._along_channels else self._run)

    def _channel(self, place: Place) -> Expr:
        return self._m + column(place[0], self._t * 2 + place[1], self._run if self._along_channels else 1)

    def _wait(self) -> None:
        call("finish_products")
        with T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
            call("hold", pointer(self._sums, i, j, r))

    def multiply(self, filters: Any, step: Expr, register_set: int) -> None:
        """Issues the products of one step.

        Args:
            register_set: which half of the registers the step's first slab takes.
        """
        tile = self._tile
        for slab in range(tile.slabs):
            half = (register_set + slab) % tile.halves * tile.positions
            with T.unroll(self._rows) as i, T.unroll(2) as place:
                self._load(step, slab, half, i, place)
            call("begin_products")
            for part, position in itertools.product(range(STEPS), range(tile.positions)):
                for a, b in SPLIT_PRODUCTS[len(self._a) - 1]:
                    with T.unroll(self._rows) as i:
                        self._product(filters, step, slab, part, half, position, a, b, i)
            call("commit_products")
            call(f"wait_products<{tile.halves - 1}>")
        self.promote(step)

    def _load(self, step: Expr, slab: int, half: int, i: Expr, place: Expr) -> None:
        """Loads a window's words of one slab to registers, as operands of tensor cores."""
        window = pointer(self._operand.shared, *self._operand.at(i * 2 + place, slab, self._t, step))
        call("load_words", pointer(self._a[0], half, i, place, 0), window)
        split(self._tile, self._a, half, i, place)

    def _product(self, filters: Any, step: Expr, slab: int, part: int, half: int, position: int, a: int, b: int, i: Expr) -> None:
        tile, elements = self._tile, CHUNK * self._tile.slab // SLAB
        first = ((position * tile.slabs + slab) * len(self._a) + b) * CHUNKS
        at = ((first + part * 2) * tile.block_m + self._m) * elements
        words = [pointer(self._a[a], half + position, i, place, part * 2) for place in range(2)]
        kind = MULTIPLIERS[tile.dtype].kind
        read = pointer(filters, step % tile.stages, at)
        call(f"wgmma_{kind}<{tile.warp_m}>", pointer(self._sums, i, position * self._columns, 0), *words, read, tile.block_m * CHUNK)
