"""Filter packing of CUDA kernels: the fragment order in which warps read filters, computed ahead of time (numpy only)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.numerics.winograd_tiling import row_problem, tiles_of
from im2win.packing.winograd import transformed, transformed_rows
from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]

FORMS = ("rows", "lines", "products", "columns")
STEP_WORDS, WORD = 16, 4  # a slab: 16 words of 4 bytes
Index = Any


def column(tile: Index, place: Index, run: int) -> Index:
    """The warp's window for column `place` (0 to 7) of its `tile`-th matrix product.

    A lane holds the accumulators of columns 2*t and 2*t+1 of every product. The mapping makes them `run` neighbours over run/2 products,
    which one store writes.
    """
    if run <= 2:
        return tile * 8 + place
    tiles = run // 2
    return tile // tiles * (4 * run) + place // 2 * run + tile % tiles * 2 + place % 2


def row(tile: Index, place: Index, run: int) -> Index:
    """The warp's channel for row `place` (0 to 15) of its `tile`-th matrix product.

    A lane holds the accumulators of rows g and g+8 of every product. The mapping makes them `run` neighbours over run/2 products, which one
    store writes.
    """
    if run == 1:
        return tile * 16 + place
    tiles = run // 2
    return tile // tiles * (8 * run) + place % 8 * run + tile % tiles * 2 + place // 8


@dataclass(frozen=True)
class CudaPack:
    """Filters as [channel blocks, slabs, block * 64 bytes]: what a block reads for one slab of the sum is contiguous.

    The sum runs over channels, kernel rows and columns in `order`. It is padded with zero filters to whole steps of `slabs` slabs of 64
    bytes. A group's channels are padded to whole blocks.

    Attributes:
        form: layout inside a slab.
            "rows": [K in the slab, block]: a K step is a contiguous run of channels, for products on CUDA cores.
            "lines": [block, K in the slab]: the 64 bytes of a channel are contiguous, for `ldmatrix` from shared memory.
            "products": [block / 16, 2 products, 32 lanes, 4 words]: what lane 4*g + t reads for a product of 16 rows, as one load: the
            words of rows g and g + 8 at places t and t + 4. `row` maps rows to channels. Places t and t + 4 of the two products are words
            4*t to 4*t+3 of the slab; any order of the sum is correct if filters and windows agree.
            "columns": [2 products, 2 halves, block, 16 bytes]: what a wgmma reads; places t and t + 4 are those of "products". `column`
            maps columns to channels.
        block: output channels of a block.
        run: neighbouring channels that a lane holds, see `row` and `column`.
        outputs: 0 for plain filters. Otherwise filters are transformed for Winograd with so many outputs along a tile's side, and all other
            attributes describe the products of transformed tiles (`numerics.winograd_tiling`): tiles of a row with the order "Cuvc", else
            square tiles.
        parts: 0 packs filters unchanged. 1 rounds float32 filters to TF32, which tensor cores would truncate. 2 packs the TF32 part of
            every load, and behind it the rest.
    """

    form: str
    block: int
    order: str
    slabs: int
    run: int = 1
    parts: int = 0
    outputs: int = 0

    def blocks(self, conv: Conv2d) -> int:
        """Channel blocks of all groups."""
        return conv.groups * -(-(conv.out_channels // conv.groups) // self.block)

    def blocks_per_group(self, conv: Conv2d) -> int:
        """Channel blocks that hold one group's filters."""
        return self.blocks(conv) // conv.groups

    def place(self, conv: Conv2d, block: Index, k: Index, channel: Index) -> tuple[Index, Index, Index]:
        """Where element `k` of the sum of a channel of a block is, in the form "lines"."""
        slab = STEP_WORDS * WORD // conv.itemsize
        return block, k // slab, channel * slab + k % slab

    def _problem(self, conv: Conv2d) -> Conv2d:
        """The products of transformed tiles as a convolution."""
        return row_problem(conv, self.outputs) if self.order == "Cuvc" else tiles_of(conv, self.outputs, 0).problem

    def _step(self, conv: Conv2d) -> int:
        """Elements of the sum in a step."""
        return self.slabs * STEP_WORDS * WORD // conv.itemsize

    def depth(self, conv: Conv2d) -> int:
        """Elements of the sum, padded to whole steps ("Cuvc": to whole steps of channels)."""
        channels, step = conv.in_channels // conv.groups, self._step(conv)
        if self.order == "Cuvc":
            return -(-channels // step) * step * math.prod(conv.kernel)
        return -(-math.prod(conv.filter_shape[1:]) // step) * step

    def shape(self, conv: Conv2d) -> tuple[int, int, int]:
        """Shape of the packed filter, in elements."""
        if self.outputs:
            return replace(self, outputs=0).shape(self._problem(conv))
        slab = STEP_WORDS * WORD // conv.itemsize
        return self.blocks(conv), self.depth(conv) // slab, self.block * slab * max(self.parts, 1)

    def _ordered(self, conv: Conv2d, w: Array) -> Array:
        """Filters as [channels, K]."""
        if self.order == "Cuvc":
            step = self._step(conv)
            fill = -w.shape[1] % step
            whole = np.pad(w, ((0, 0), (0, fill), (0, 0), (0, 0)))
            w = whole.reshape(len(w), -1, step, *w.shape[2:]).transpose(0, 1, 3, 4, 2)
        elif self.order == "uvc":
            w = w.transpose(0, 2, 3, 1)
        return w.reshape(len(w), -1)

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """Packs filters of `conv.filter_shape` into `shape(conv)`, contiguous."""
        if self.outputs:
            problem = self._problem(conv)
            if self.order == "Cuvc":
                form = transformed_rows(w, self.outputs).astype(w.dtype)
            else:
                form = transformed(conv, w, self.outputs).transpose(2, 3, 0, 1).astype(w.dtype)  # [row, column, output, input channel]
            return replace(self, outputs=0).filter(problem, form.reshape(problem.filter_shape))
        groups, per_group = conv.groups, conv.out_channels // conv.groups
        flat = self._ordered(conv, w).reshape(groups, per_group, -1)
        blocks, slabs, _ = self.shape(conv)
        fill = ((0, 0), (0, blocks // groups * self.block - per_group), (0, self.depth(conv) - flat.shape[2]))
        blocked = np.pad(flat, fill).reshape(blocks, self.block, slabs, -1).transpose(0, 2, 1, 3)
        if self.form == "rows":
            laid = blocked.transpose(0, 1, 3, 2)
        elif self.form == "lines":
            laid = blocked
        else:
            laid = self._in_parts(self._as_products(blocked) if self.form == "products" else self._as_columns(blocked))
        return np.ascontiguousarray(laid).reshape(self.shape(conv))

    def _as_products(self, blocked: Array) -> Array:
        """[blocks, slabs, block, K in the slab] -> [blocks, slabs, block / 16, 2 products, load]."""
        order = [row(place // 16, place % 16, self.run) for place in range(self.block)]
        words = np.ascontiguousarray(blocked[:, :, order]).view(np.uint32)  # [blocks, slabs, block, 16]
        # place = 16*tile + 8*high + g, word = 4*t + 2*product + half  ->  tile, product, g, t, half, high
        parts = words.reshape(*words.shape[:2], self.block // 16, 2, 8, 4, 2, 2)
        laid = np.ascontiguousarray(parts.transpose(0, 1, 2, 6, 4, 5, 7, 3)).view(blocked.dtype)
        return laid.reshape(*laid.shape[:4], -1)

    def _as_columns(self, blocked: Array) -> Array:
        """[blocks, slabs, block, K in the slab] -> [blocks, slabs, all of them]."""
        order = [column(place // 8, place % 8, self.run) for place in range(self.block)]
        words = np.ascontiguousarray(blocked[:, :, order]).view(np.uint32)
        # word = 4*t + 2*product + half  ->  product, half, place, t
        parts = words.reshape(*words.shape[:3], 4, 2, 2)
        laid = np.ascontiguousarray(parts.transpose(0, 1, 4, 5, 2, 3)).view(blocked.dtype)
        return laid.reshape(*laid.shape[:2], -1)

    def _in_parts(self, laid: Array) -> Array:
        """[..., elements] -> the part of them that tensor cores read, and behind every run of elements the rest."""
        if self.parts == 0:
            return laid
        if self.parts == 1:
            return _rounded_tf32(laid)
        high = (laid.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        with np.errstate(invalid="ignore"):  # infinity - infinity is NaN
            return np.stack([high, laid - high], axis=-2)


def _rounded_tf32(w: Array) -> Array:
    """float32 rounded to the nearest value with 10 bits of fraction; infinities and NaN are unchanged."""
    rounded: Array = ((w.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(w), rounded, w).astype(np.float32)
