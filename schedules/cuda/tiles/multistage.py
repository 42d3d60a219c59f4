"""The tile of multistage kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from im2win.common.caching import derived, hashed_once
from im2win.numerics.tolerance import trusted
from im2win.numerics.winograd_tiling import ROW_TAPS
from im2win.schedules.cuda.tiles.base import BaseTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

ORDERS = ("cuv", "uvc", "Cuvc")
PROVEN_DEPTH = 3200  # products of TF32 parts in one accumulator: at 3136 the error is 0.5 times the tolerance of float32
MAX_HELD = 208  # most registers of a thread for accumulators and for the operands that a `wgmma` in flight still reads

@hashed_once
@dataclass(frozen=True)
class MultistageTile(BaseTile):
    """Tiles of the product of filters [channels, K] by windows [K, windows], and how their data reaches the multipliers.

    product: the kind of arithmetic: "fma" (IEEE float32 on CUDA cores), or on tensor cores "tf32", "tf32x3" (float32 from three TF32
        products), "f16", "bf16", "s8". The prefix "wg_" selects `wgmma` of a warpgroup.
    block_m, block_n: output channels and windows (output pixels) of a thread block.
    warp_m, warp_n: those of a warp or warpgroup. With "fma" a warp is 4 x 8 threads, and each computes an outer product of warp_m/4 x
        warp_n/8 in registers.
    slabs: number of 64-byte slabs of every window that one step of the sum copies to shared memory.
    stages: pipeline stages in shared memory; copies run `ahead` steps ahead of the product.
    order: loop order of the sum, outermost first: c channel, u kernel row, v kernel column. Filters are packed in it. "Cuvc" takes the
        channels of one step with all their taps, then the next channels; halo tiles need it.
    images, rows, cols: images, rows and columns of a thread block's tile of outputs, at most block_n outputs in all. Its halo tile is
        copied once for all taps: in the order "Cuvc" some channels at a time; in the order "cuv" all channels at once, as channel planes,
        and a step is `slabs` rows of the kernel (for few channels, on CUDA cores). All 0: a block computes `block_n` windows that are
        neighbours in memory, also across rows and images, and copies every tap by itself.
    outputs: for Winograd, outputs along each side of a tile; the other fields then describe the products of transformed tiles, as a 1x1
        convolution. With rows and cols, Winograd runs along rows: a tile is `outputs` pixels of a row, and windows are transformed while
        they are loaded, see `winograd.rows`. 0: no Winograd.
    band: for Winograd in bands, MiB that transformed tiles and their products take at a time.
    split: for split-K, number of parts of the input channels; the other fields then describe the product of one part.
    fetched: 1 where neighbouring lanes load the elements of neighbouring windows to registers, each those of its own, and store 16 bytes at
        a time to shared memory, see `loaders.im2col_taps`. 0: asynchronous copies, or words where elements are smaller than these copies.
    """

    LATER: ClassVar[tuple[str, ...]] = ("split", "fetched")

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
    fetched: int = 0

    @derived
    def halo(self) -> bool:
        """Whether a thread block computes a tile of outputs (rows x cols) and stages its halo tile."""
        return self.rows > 0

    @derived
    def in_rows(self) -> bool:
        """Whether Winograd runs along rows."""
        return self.halo and self.outputs > 0

    @derived
    def positions(self) -> int:
        """Products of a window with each filter: along rows one for each column of a Winograd tile, else 1."""
        return self.outputs + ROW_TAPS - 1 if self.in_rows else 1

    @derived
    def planes(self) -> bool:
        """Whether the halo tile holds all channels, as channel planes."""
        return self.halo and self.order == "cuv"

    @derived
    def warpgroup(self) -> bool:
        """Whether the tile uses `wgmma`."""
        return self.arithmetic.unit == "warpgroup"

    @derived
    def ahead(self) -> int:
        """Steps that copies run ahead of the product.

        With `wgmma` it is one less: the last product may still read its stage when the next step begins.
        """
        return self.stages - (2 if self.warpgroup else 1)

    @property
    def warps(self) -> tuple[int, int]:
        """(warps or warpgroups of a block along channels, those along windows)."""
        return self.block_m // self.warp_m, self.block_n // self.warp_n

    @property
    def lanes(self) -> int:
        """Threads of a warp, or of a warpgroup."""
        return 128 if self.warpgroup else 32

    @derived
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.warps[0] * self.warps[1]

    @derived
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.warp_m * self.warp_n // self.lanes

    @derived
    def word_registers(self) -> int:
        """Registers of a warpgroup's thread for a slab of windows: 16 bytes of each of 2 rows in every 64 windows."""
        return self.positions * (self.warp_n // 64) * 2 * 4 * max(self.arithmetic.parts, 1)

    @property
    def halves(self) -> int:
        """Slabs of windows that a warpgroup's thread holds in registers.

        Two where they fit beside the accumulators: one is loaded while the `wgmma` of the other runs.
        """
        return 1 if self.positions * self.accumulators + 2 * self.word_registers > MAX_HELD else 2

    @derived
    def slab(self) -> int:
        """Elements of one window in a slab."""
        return self.arithmetic.slab

    @derived
    def accuracy(self) -> Accuracy:
        """Accuracy of a float32 result; "winograd" where transformed tiles are rounded to another type."""
        return "winograd" if self.outputs and not self.in_rows and self.dtype != "float32" else self.arithmetic.accuracy

    def proven(self, conv: Conv2d) -> bool:
        """Whether the tile may serve a problem that it was not tuned for.

        False for Winograd whose error is near the tolerance, and for float32 along rows, whose error has not been measured.
        """
        if self.outputs == 0 or self.in_rows:
            return self.outputs == 0 or ELEMENT_TYPES[self.dtype].narrow
        return self.outputs <= 4 and trusted(conv, self.outputs, self.accuracy)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys count as alike; the tuner's first population takes one of them."""
        return self.split, self.product, self.warp_m, self.warp_n, self.halo, self.fetched

    def features(self) -> dict[str, float]:
        """Numerical features of a tile, for the tuner's cost model."""
        return {
            "slabs": self.slabs, "stages": self.stages, "images": self.images, "rows": self.rows, "cols": self.cols,
            "channel_planes": self.order == "cuv", "outputs": self.outputs, "fetched": self.fetched,
        }  # fmt: skip

    @derived
    def block_k(self) -> int:
        """Elements of the sum in one step."""
        return self.slabs * self.slab


def promoted(conv: Conv2d, tile: MultistageTile) -> bool:
    """Whether sums are too long for one accumulator of a tensor core, which truncates; see `mma_sync.TensorProduct.promote`."""
    return tile.arithmetic.parts == 2 and depth(conv, tile) > PROVEN_DEPTH


def depth(conv: Conv2d, tile: MultistageTile) -> int:
    """Products in one sum."""
    return math.prod(conv.filter_shape[1:]) // tile.positions
