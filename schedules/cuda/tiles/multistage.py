"""The numbers of a CUDA schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from im2win.numerics.tolerance import trusted
from im2win.numerics.winograd_tiling import ROW_TAPS
from im2win.schedules.cuda.tiles.base import BaseTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

ORDERS = ("cuv", "uvc", "Cuvc")
PROVEN_DEPTH = 3200  # products in a sum of TF32 parts; at 4608 the error is 1.1 times the tolerance of float32, at 3136 0.9 times
MAX_HELD = 208  # registers for sums and the words that products of a warpgroup still read

@dataclass(frozen=True)
class MultistageTile(BaseTile):
    """Tiles of the product of filters [channels, K] and windows [K, windows], and how they reach the multipliers.

    product: the arithmetic: "fma" (IEEE float32 on CUDA cores), or on tensor cores "tf32", "tf32x3" (float32 from three TF32 products),
        "f16", "s8"; those by a warpgroup have "wg_" before them.
    block_m, block_n: output channels and windows (output pixels) of a thread block.
    warp_m, warp_n: those of one warp, or warpgroup. With "fma" a warp is 4 x 8 threads, each an outer product of warp_m/4 x warp_n/8 in
        registers.
    slabs: slabs of 64 bytes of every window that one step of the sum takes to shared memory.
    stages: steps in shared memory at a time; copies run `ahead` steps ahead of the product.
    order: the order of the sum, outermost first: c channel, u kernel row, v kernel column. Filters are packed in it. "Cuvc" takes as many
        channels as a step holds, all their taps, then the next: the order for patches.
    images, rows, cols: a block's windows are a patch of the output: so many images, rows and columns of it, at most block_n in all. The
        input under the patch is copied once for all taps: in the order "Cuvc" some channels at a time; in the order "cuv" all channels at
        once, and a step is then `slabs` rows of the kernel (for few channels, on CUDA cores). All 0: a block's windows are `block_n`
        neighbours in memory, even across rows and images, and every tap is copied by itself.
    outputs: with Winograd's form, along each side of a tile; the rest then says how the products of transformed tiles are computed, as a
        1x1 convolution. With a patch, tiles are so many outputs of a row, and windows are transformed on their way to the product: see
        `winograd_rows`. 0 without.
    band: MiB that transformed tiles and their products may take at a time.
    split: with split-K, parts of the sum, neighbouring channels each; the rest then says how each part is computed.
    """

    LATER: ClassVar[tuple[str, ...]] = ("split",)

    product: str
    block_m: int
    block_n: int
    warp_m: int
    warp_n: int
    slabs: int
    stages: int
    order: str
    images: int = 0
    rows: int = 0
    cols: int = 0
    outputs: int = 0
    band: int = 0
    split: int = 1

    @property
    def patch(self) -> bool:
        """Whether a block's windows are a patch of the output."""
        return self.rows > 0

    @property
    def in_rows(self) -> bool:
        """Whether windows are transformed to Winograd's form along rows."""
        return self.patch and self.outputs > 0

    @property
    def positions(self) -> int:
        """Products of a window with each filter: of tiles of a row as many as they have columns, else 1."""
        return self.outputs + ROW_TAPS - 1 if self.in_rows else 1

    @property
    def planes(self) -> bool:
        """Whether the patch holds all channels, plane by plane."""
        return self.patch and self.order == "cuv"

    @property
    def warpgroup(self) -> bool:
        """Whether warpgroups multiply."""
        return self.arithmetic.unit == "warpgroup"

    @property
    def ahead(self) -> int:
        """Steps that copies run ahead of the product. The last product of a warpgroup may still be reading when the next step begins."""
        return self.stages - (2 if self.warpgroup else 1)

    @property
    def warps(self) -> tuple[int, int]:
        """Warps, or warpgroups, of a block along channels and along windows."""
        return self.block_m // self.warp_m, self.block_n // self.warp_n

    @property
    def lanes(self) -> int:
        """Threads of a warp, or warpgroup."""
        return 128 if self.warpgroup else 32

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.warps[0] * self.warps[1]

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.warp_m * self.warp_n // self.lanes

    @property
    def word_registers(self) -> int:
        """Registers of a warpgroup's thread for the windows of a slab: of 2 rows in every 64 windows 16 bytes each."""
        return self.positions * (self.warp_n // 64) * 2 * 4 * max(self.arithmetic.parts, 1)

    @property
    def halves(self) -> int:
        """Slabs whose windows a warpgroup's thread holds: two, where they fit beside the sums, so that products of one run on meanwhile."""
        return 1 if self.positions * self.accumulators + 2 * self.word_registers > MAX_HELD else 2

    @property
    def slab(self) -> int:
        """Elements of one window in a slab."""
        return self.arithmetic.slab

    @property
    def accuracy(self) -> Accuracy:
        """What of a float32 comes out; "winograd" where tiles are transformed in another type."""
        return "winograd" if self.outputs and not self.in_rows and self.dtype != "float32" else self.arithmetic.accuracy

    def proven(self, conv: Conv2d) -> bool:
        """Whether a tile that nobody tuned for this problem may be used.

        Not Winograd's form where its errors are near the tolerance, nor float32 along rows, which is still to be measured.
        """
        if self.outputs == 0 or self.in_rows:
            return self.outputs == 0 or ELEMENT_TYPES[self.dtype].narrow
        return self.outputs <= 4 and trusted(conv, self.outputs, self.accuracy)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys are so alike that the tuner begins with one of them."""
        return self.split, self.product, self.warp_m, self.warp_n, self.patch

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        return {
            "slabs": self.slabs, "stages": self.stages, "images": self.images, "rows": self.rows, "cols": self.cols,
            "channel_planes": self.order == "cuv", "outputs": self.outputs,
        }  # fmt: skip

    @property
    def block_k(self) -> int:
        """Elements of the sum that one step takes."""
        return self.slabs * self.slab


def promoted(conv: Conv2d, tile: MultistageTile) -> bool:
    """Whether sums are too long for tensor cores alone, which cut off what a float32 sum loses: see `matrix`."""
    return tile.arithmetic.parts == 2 and math.prod(conv.filter_shape[1:]) // tile.positions > PROVEN_DEPTH
