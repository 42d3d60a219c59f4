"""The tile of Winograd on tensor cores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from im2win.common.caching import hashed_once
from im2win.numerics.tolerance import trusted
from im2win.packing.winograd import WinogradPack
from im2win.packing.winograd_int8 import QuantisedPack
from im2win.schedules.cuda.arithmetic import NATIVE
from im2win.schedules.cuda.tiles.base import BaseTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

Mapped = Literal["bgemm", "sync_free"]
Fusion = Literal["none", "shmem", "llc"]
MAPPINGS, FUSIONS = get_args(Mapped), get_args(Fusion)
FRAGMENTS = {"16x16x16": (16, 16, 16), "32x8x16": (32, 8, 16), "8x32x16": (8, 32, 16)}
"""Tiles, filters and channels of WMMA's products of float16 and of int8."""
ARITHMETIC = {dtype: NATIVE[dtype].kind for dtype in ("float16", "int8")}
"""By a problem's element type: the arithmetic of its products. bfloat16 does not hold transformed tiles."""
WARP = 32
THREADS = 256  # threads of a block, for a transform that is a kernel of its own
WORD = 4  # bytes of neighbouring input channels that a thread of a transform loads
SPARE = 16  # bytes between rows in shared memory, so that loads of a fragment have no bank conflict


@hashed_once
@dataclass(frozen=True)
class TensorCoreTile(BaseTile):
    """Tiles of the batched products M[position] = V[position] U[position], and which kernels are fused.

    outputs: outputs along each side of a Winograd tile, m of F(m x m, 3x3).
    block_m, block_n, block_k: Winograd tiles and filters of a thread block, and channels of a step: TB_M, TB_N, TB_K of partial kernel
        fusion.
    fragment: shape of a WMMA product, a name in `FRAGMENTS`.
    mapping: "bgemm": a thread block has one position, its warps load the operands together and compute a fragment each. "sync_free": a
        thread block has all positions; a warp has some of them, one after the other, and loads its operands itself.
    fusion: of the input transform with the products: "none"; "shmem", transformed tiles stay in shared memory (PKF-Shmem); "llc", they pass
        through the last-level cache, in one launch (PKF-LLC).
    wave: with "llc", blocks of transformed tiles that are multiplied before the next are transformed; 0 for no such order.
    product: the kind of arithmetic: "f16", or "s8", where transformed tiles and filters are rounded to int8 (`packing.winograd_int8`) and
        accumulators are int32.
    groups: with "sync_free", rows of the tile whose positions are multiplied at the same time, each by as many warps as it has columns.
    """

    outputs: int
    block_m: int
    block_n: int
    block_k: int
    fragment: str
    mapping: str
    fusion: str = "none"
    wave: int = 0
    product: str = "f16"
    groups: int = 1

    @property
    def size(self) -> int:
        """Inputs along a side of a Winograd tile, t = m + 2."""
        return self.outputs + 2

    @property
    def positions(self) -> int:
        """Positions of a Winograd tile, t * t."""
        return self.size**2

    @property
    def shape(self) -> tuple[int, int, int]:
        """(tiles, filters, channels) of a fragment."""
        return FRAGMENTS[self.fragment]

    @property
    def fragments(self) -> tuple[int, int]:
        """(fragments of a block along tiles, along filters)."""
        return self.block_m // self.shape[0], self.block_n // self.shape[1]

    @property
    def warps(self) -> int:
        """Warps of a block of the products."""
        return self.size * self.groups if self.mapping == "sync_free" else math.prod(self.fragments)

    @property
    def threads(self) -> int:
        """Threads of a block of the products."""
        return WARP * self.warps

    @property
    def staged(self) -> bool:
        """Whether transformed tiles are copied to shared memory before they are multiplied; with "shmem" they are there already."""
        return self.fusion != "shmem"

    @property
    def transposed(self) -> bool:
        """Whether filters are transposed: their channels are contiguous, since int8 operands are words of four channels."""
        return ELEMENT_TYPES[self.dtype].integer

    @property
    def spare(self) -> int:
        """Elements of padding between rows in shared memory."""
        return SPARE // self.itemsize

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the reconstructor's rule sets for the kernels, in order."""
        fusion = () if self.fusion == "none" else (f"pkf-{self.fusion}",)
        return (("barriers",) if self.mapping == "sync_free" else ()) + fusion

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ELEMENT_TYPES[self.dtype].itemsize

    @property
    def accuracy(self) -> Accuracy:
        """"winograd", since transformed tiles are rounded."""
        return "winograd"

    def proven(self, conv: Conv2d) -> bool:
        """Whether the tile may serve a problem that it was not tuned for: its error is far enough from the tolerance."""
        return self.outputs <= 4 and trusted(conv, self.outputs, self.accuracy)

    @property
    def warp_m(self) -> int:
        """Winograd tiles of a warp."""
        return self.block_m if self.mapping == "sync_free" else self.shape[0]

    @property
    def warp_n(self) -> int:
        """Filters of a warp."""
        return self.block_n if self.mapping == "sync_free" else self.shape[1]

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.warp_m * self.warp_n // WARP

    @property
    def slabs(self) -> int:
        """Slabs of 64 bytes of a step, a part of one counted as one."""
        return -(-self.block_k // self.arithmetic.slab)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys count as alike; the tuner's first population takes one of them."""
        return self.outputs, self.mapping, self.fusion

    def features(self) -> dict[str, float]:
        """Numerical features of a tile, for the tuner's cost model."""
        return {
            "slabs": self.slabs, "stages": 1, "sync_free": self.mapping == "sync_free", "shmem": self.fusion == "shmem",
            "llc": self.fusion == "llc", "wave": self.wave, "outputs": self.outputs,
        }  # fmt: skip

    def pack(self, conv: Conv2d) -> WinogradPack | QuantisedPack:
        """The packing of filters: those of a block and a position are contiguous."""
        if ELEMENT_TYPES[self.dtype].integer:
            return QuantisedPack(self.outputs, self.block_n, self.block_k)
        return WinogradPack(self.outputs, self.block_n, channels=self.block_k)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a convolution as batched products of this tile's blocks.

    Transformed tiles V are [blocks, positions, block_m, depth]. Products M are [blocks, filter blocks, positions, block_m, block_n], with
    channels first [..., block_n, block_m]. What a thread block writes or reads of either is contiguous.
    """

    conv: Conv2d
    tile: TensorCoreTile

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of Winograd tiles that cover an image's output."""
        height, width = self.conv.output_size
        return -(-height // self.tile.outputs), -(-width // self.tile.outputs)

    @property
    def tiles(self) -> int:
        """Winograd tiles of all images."""
        return self.conv.batch * self.counts[0] * self.counts[1]

    @property
    def blocks(self) -> int:
        """Thread blocks along tiles; the last may reach beyond them."""
        return -(-self.tiles // self.tile.block_m)

    @property
    def filter_blocks(self) -> int:
        """Thread blocks along filters."""
        return self.tile.pack(self.conv).blocks(self.conv)

    @property
    def depth(self) -> int:
        """Channels, padded with zeros to whole steps."""
        return self.tile.pack(self.conv).depth(self.conv)

    @property
    def transformed(self) -> int:
        """Elements of V, of the problem's type."""
        return self.blocks * self.block_transformed

    @property
    def pitch(self) -> int:
        """Elements from a row of V to the next: its channels, and padding where V stays in shared memory."""
        return self.depth + (self.tile.spare if self.tile.fusion == "shmem" else 0)

    @property
    def block_transformed(self) -> int:
        """Elements of V of one block."""
        return self.tile.positions * self.tile.block_m * self.pitch

    @property
    def multiplied(self) -> int:
        """Elements of M, float32 or int32."""
        return self.blocks * self.filter_blocks * self.tile.positions * self.tile.block_m * self.tile.block_n

    @property
    def product_strides(self) -> tuple[int, int]:
        """Elements of M (from a tile to the next, from a filter to the next)."""
        return (self.tile.block_n, 1) if self.conv.layout == "NHWC" else (1, self.tile.block_m)

    @property
    def staged_bytes(self) -> int:
        """Bytes of shared memory for a block's copies of operands."""
        many = self.tile.warps if self.tile.mapping == "sync_free" else 1
        return self.tile.itemsize * many * (self.staged_filters + (self.staged_tiles if self.tile.staged else 0))

    @property
    def staged_tiles(self) -> int:
        """Elements of V of one step in shared memory: rows of a step's channels."""
        return self.tile.block_m * (self.tile.block_k + self.tile.spare)

    @property
    def staged_filters(self) -> int:
        """Elements of U of one step in shared memory: rows of a block's filters, or of a step's channels where U is transposed."""
        rows, row = (self.tile.block_n, self.tile.block_k) if self.tile.transposed else (self.tile.block_k, self.tile.block_n)
        return rows * (row + self.tile.spare)

    @property
    def held_bytes(self) -> int:
        """Bytes of V that a block keeps or passes on: t * t * TB_M * depth elements."""
        return self.tile.itemsize * self.block_transformed

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace between the kernels: V unless it stays in shared memory, M, and counters of waiting blocks."""
        counters = 4 * (1 + self.blocks) if self.tile.fusion == "llc" else 0
        spaces = (self.tile.itemsize * self.transformed if self.tile.fusion != "shmem" else 0, 4 * self.multiplied, counters)
        return sum(map(aligned, spaces))


ALIGNMENT = 128  # bytes, of every tensor in the workspace


def aligned(count: int) -> int:
    """Bytes rounded up to a multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT
