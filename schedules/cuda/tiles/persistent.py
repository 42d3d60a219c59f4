"""The numbers of a schedule whose thread blocks stay, and where the pixels of its patches lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from im2win.packing.wgmma_smem import ChunkPack
from im2win.schedules.cuda.arithmetic import MULTIPLIERS, SLAB
from im2win.schedules.cuda.primitives import CHUNK, Expr, padded
from im2win.schedules.cuda.tiles.base import BaseTile
from im2win.spec.conv2d import Conv2d

PHASES = "int64"  # type of a barrier that counts what lands
LANES = 128  # threads of a warpgroup
M = 64  # channels of a warpgroup's product
EIGHT = 8  # columns that four lanes hold of a channel, two each
KIB = 1024  # the unit's order of banks begins anew at every one


@dataclass(frozen=True)
class PersistentTile(BaseTile):
    """Patches of the output that warpgroups compute one after the other, each by itself, with filters that they share.

    product: the arithmetic, of a warpgroup: "wg_f16" or "wg_s8".
    block_m: output channels of a thread block, all of them computed by every warpgroup; their filters stay in shared memory.
    rows, cols: of a patch of the output, of one image.
    slabs: slabs of 64 bytes of every pixel of the input that one step takes to shared memory, for all taps.
    stages: steps that shared memory holds at a time for each warpgroup.
    groups: warpgroups of a block.
    """

    product: str
    block_m: int
    rows: int
    cols: int
    slabs: int
    stages: int
    groups: int

    @property
    def unit(self) -> int:
        """Elements of 16 bytes: neighbouring channels, which products read together."""
        return CHUNK * self.arithmetic.slab // SLAB

    @property
    def units(self) -> int:
        """Of a pixel, that a step takes."""
        return self.slabs * SLAB // CHUNK

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES * self.groups

    @property
    def block_n(self) -> int:
        """Outputs of a block's patches."""
        return self.warp_n * self.groups

    @property
    def warp_m(self) -> int:
        """Channels of a warpgroup."""
        return self.block_m

    @property
    def warp_n(self) -> int:
        """Outputs of a patch."""
        return self.rows * self.cols

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread, those between patch rows not counted."""
        return -(-self.block_m * self.warp_n // LANES)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys are so alike that the tuner begins with one of them."""
        return self.block_m, self.groups, -(-self.warp_n // 64)

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        return {"slabs": self.slabs, "stages": self.stages, "images": 1, "rows": self.rows, "cols": self.cols}

    def pack(self, conv: Conv2d) -> ChunkPack:
        """How filters are packed."""
        return ChunkPack(self.block_m, self.slabs, channel_run(conv))


def channel_run(conv: Conv2d) -> int:
    """Neighbouring channels that a thread holds of an output: two where one store can take them."""
    return 2 if conv.layout == "NHWC" and conv.out_channels % 2 == 0 else 1


@dataclass(frozen=True)
class HaloTile:
    """The input under a patch, in shared memory.

    The columns of a product are pixels side by side there, so patch rows follow one another without a gap, and outputs between them, for
    which windows reach from one row into the next, are computed and dropped. With a stride every parity of rows and columns is a plane of
    its own, in which neighbouring windows have neighbouring pixels.

    Channels last, a pixel's channels of a step lie together, as the hardware's copies of boxes bring them. Channels first, boxes bring rows
    of one channel; threads then make of them 16 bytes of every pixel side by side, and so on for the next channels.
    """

    conv: Conv2d
    tile: PersistentTile

    images = 1  # of the output
    sharing = 1  # blocks of a cluster that copy parts of it for each other
    single_taps = False  # whether a step brings what one tap reads only

    @property
    def boxed(self) -> bool:
        """Whether products read what boxes bring."""
        return self.conv.layout == "NHWC"

    @property
    def part(self) -> tuple[int, int, int]:
        """(images, rows, pixels of a row) of a plane that one block copies."""
        return 1, self.lines, self.pitch

    @property
    def planes(self) -> tuple[int, int]:
        """Parities of rows and of columns that some tap reads."""
        conv = self.conv
        parities = [max(i * d % s for i in range(k)) + 1 for k, d, s in zip(conv.kernel, conv.dilation, conv.stride, strict=True)]
        return parities[0], parities[1]

    @property
    def lines(self) -> int:
        """Patch rows of a plane."""
        conv = self.conv
        return self.tile.rows + (conv.kernel[0] - 1) * conv.dilation[0] // conv.stride[0]

    @property
    def lead(self) -> int:
        """Elements of a box's rows before the patch, channels first: boxes begin at whole 16 bytes."""
        return 0 if self.boxed else -self.conv.padding[1] % self.tile.unit

    @property
    def together(self) -> int:
        """Neighbouring pixels that a thread rearranges at a time: those of a word of each channel, where windows are neighbours."""
        return 4 // self.conv.itemsize if not self.boxed and self.conv.stride[1] == 1 else 1

    @property
    def margin(self) -> int:
        """Pixels before a patch row that no window reads: words begin there."""
        return self.lead % self.together

    @property
    def pitch(self) -> int:
        """Pixels of a patch row."""
        conv = self.conv
        needed = self.margin + self.tile.cols + (conv.kernel[1] - 1) * conv.dilation[1] // conv.stride[1]
        return -(-needed // self.together) * self.together

    @property
    def plane(self) -> int:
        """Pixels of a plane, filled up to eight, after which the unit's order of banks repeats."""
        return -(-self.lines * self.pitch // 8) * 8

    @property
    def pixels(self) -> int:
        """Pixels to copy."""
        return math.prod(self.planes) * self.lines * self.pitch

    @property
    def columns(self) -> int:
        """Columns of a product: outputs of the patch and those between its rows, as many as the unit takes."""
        multiple = MULTIPLIERS[self.tile.dtype].columns
        return -(-((self.tile.rows - 1) * self.pitch + self.tile.cols) // multiple) * multiple

    @property
    def held(self) -> int:
        """Pixels held, with those that the last columns read."""
        return math.prod(self.planes) * self.plane + 16

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel that lie together."""
        return self.tile.slabs * SLAB if self.boxed else CHUNK

    def shift(self, u: Expr, v: Expr) -> Expr:
        """Pixels from the first of a window to that of its tap (u, v)."""
        conv = self.conv
        (down, row), (across, col) = ((i * d // s, i * d % s) for i, d, s in zip((u, v), conv.dilation, conv.stride, strict=True))
        return (row * self.planes[1] + col) * self.plane + down * self.pitch + across + self.margin

    @property
    def counts(self) -> tuple[int, int]:
        """Patches along the rows and columns of an image's output."""
        height, width = self.conv.output_size
        return -(-height // self.tile.rows), -(-width // self.tile.cols)

    @property
    def patches(self) -> int:
        """Patches that cover the output."""
        return self.conv.batch * math.prod(self.counts)

    @property
    def raw(self) -> tuple[int, int, int]:
        """Shape of the box of a step, channels first: [channels, rows, columns], columns filled up to 16 bytes."""
        conv, tile = self.conv, self.tile
        rows, last = ((n - 1) * s + p for n, s, p in zip((self.lines, self.pitch), conv.stride, self.planes, strict=True))
        return tile.units * tile.unit, rows, -(-(self.lead - self.margin + last) // tile.unit) * tile.unit

    @property
    def ring(self) -> tuple[int, int]:
        """Shape of what products read: [steps of all warpgroups, elements], each of whole KiB."""
        tile = self.tile
        size = self.held * tile.units * CHUNK
        return tile.groups * tile.stages, -(-size // KIB) * KIB // self.conv.itemsize

    @property
    def boxes(self) -> tuple[int, int]:
        """Shape of what boxes bring for threads to rearrange: [warpgroups, elements]; none where products read it as it is."""
        size = 0 if self.boxed else math.prod(self.raw) * self.conv.itemsize
        return self.tile.groups, -(-size // KIB) * KIB // self.conv.itemsize

    @property
    def landings(self) -> int:
        """Barriers that count what lands: the filters', and one for everything that boxes bring."""
        return 1 + (self.ring if self.boxed else self.boxes)[0]

    @property
    def filters(self) -> int:
        """Elements of a block's filters."""
        return math.prod(self.tile.pack(self.conv).shape(self.conv)[1:])

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block takes."""
        dtype = self.tile.dtype
        return sum(padded(shape, dtype) for shape in (self.ring, self.boxes, (self.filters,))) + padded((self.landings,), PHASES)

    @property
    def sum_registers(self) -> int:
        """Registers of a thread for sums."""
        return self.tile.block_m // M * self.columns // 2


def window_run(conv: Conv2d, tile: PersistentTile) -> int:
    """Neighbouring outputs that one store takes, with channels first: two that a thread holds, where they are aligned."""
    even = all(size % 2 == 0 for size in (HaloTile(conv, tile).pitch, tile.cols, conv.output_size[1]))
    return 2 if even else 1
