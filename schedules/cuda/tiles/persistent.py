"""The tile of the persistent kernel with resident filters, and the layout of its halo tiles in shared memory."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from im2win.common.caching import derived, hashed_once
from im2win.packing.wgmma_smem import ChunkPack
from im2win.schedules.cuda.arithmetic import MULTIPLIERS, SLAB
from im2win.schedules.cuda.primitives import CHUNK, Expr, padded
from im2win.schedules.cuda.tiles.base import BaseTile
from im2win.spec.conv2d import Conv2d

PHASES = "int64"  # element type of an mbarrier
LANES = 128  # threads of a warpgroup
M = 64  # output channels (rows) of a `wgmma`
MAX_BOX = 256  # most elements along an axis of a TMA box
EIGHT = 8  # columns of a `wgmma` that four lanes hold for one channel, two each
KIB = 1024  # bytes after which the swizzle pattern of TMA and `wgmma` repeats


@hashed_once
@dataclass(frozen=True)
class PersistentTile(BaseTile):
    """Tiles of outputs that warpgroups compute one after the other, each by itself, with filters that all of them share.

    product: the kind of arithmetic of a warpgroup: "wg_f16", "wg_bf16" or "wg_s8".
    block_m: output channels of a thread block. Every warpgroup computes all of them; their filters stay in shared memory.
    rows, cols: rows and columns of a tile of outputs, in one image.
    slabs: number of 64-byte slabs of every input pixel that one step copies to shared memory, for all taps.
    stages: pipeline stages of each warpgroup.
    groups: warpgroups of a block.
    """

    sum_blocks = 1  # blocks of a cluster that compute the same outputs
    slab_counts = (1, 2)  # values of `slabs` that the loader has

    product: str
    block_m: int
    rows: int
    cols: int
    slabs: int
    stages: int
    groups: int

    @derived
    def unit(self) -> int:
        """Elements in 16 bytes of neighbouring channels, the unit in which `wgmma` reads shared memory."""
        return CHUNK * self.arithmetic.slab // SLAB

    @derived
    def units(self) -> int:
        """16-byte units of a pixel that a step copies."""
        return self.slabs * SLAB // CHUNK

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES * self.groups

    @property
    def block_n(self) -> int:
        """Outputs of a block, those of one tile for every warpgroup."""
        return self.warp_n * self.groups

    @property
    def warp_m(self) -> int:
        """Channels of a warpgroup."""
        return self.block_m

    @property
    def warp_n(self) -> int:
        """Outputs of a tile."""
        return self.rows * self.cols

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread that are outputs. Columns between the rows of a halo tile do not count."""
        return -(-self.block_m * self.warp_n // LANES)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys count as alike; the tuner's first population takes one of them."""
        return self.block_m, self.groups, -(-self.warp_n // 64)

    def features(self) -> dict[str, float]:
        """Numerical features of a tile, for the tuner's cost model."""
        return {"slabs": self.slabs, "stages": self.stages, "images": 1, "rows": self.rows, "cols": self.cols}

    def pack(self, conv: Conv2d) -> ChunkPack:
        """The packing of filters."""
        return ChunkPack(self.block_m, self.slabs, channel_run(conv))


@functools.lru_cache(maxsize=1024)
def _parities(conv: Conv2d) -> tuple[int, int]:
    down, across = (max(i * d % s for i in range(k)) + 1 for k, d, s in zip(conv.kernel, conv.dilation, conv.stride, strict=True))
    return down, across


@functools.lru_cache(maxsize=1024)
def beyond_first_tap(conv: Conv2d) -> tuple[int, int]:
    """Rows, and pixels of a row, of a parity plane beyond those of the first tap."""
    down, across = ((k - 1) * d // s for k, d, s in zip(conv.kernel, conv.dilation, conv.stride, strict=True))
    return down, across


def channel_run(conv: Conv2d) -> int:
    """Neighbouring output channels of a thread that one store takes: 2 with channels last and an even number of channels, else 1."""
    return 2 if conv.layout == "NHWC" and conv.out_channels % 2 == 0 else 1


@dataclass(frozen=True)
class HaloTile:
    """The halo tile, the input under a tile of outputs, and its layout in shared memory.

    The columns of a product are pixels that lie side by side. Rows of the halo tile follow one another without a gap. Windows that reach
    from one row into the next give columns between the rows of outputs: they are computed and dropped. With a stride, every parity of rows
    and columns is a parity plane, in which the pixels of neighbouring windows are neighbours.

    Channels last, the channels of a pixel that a step takes are contiguous, as TMA boxes bring them. Channels first, TMA boxes bring rows
    of one channel, and threads rearrange them: 16 bytes of every pixel side by side, then the next 16 bytes of every pixel.
    """

    conv: Conv2d
    tile: PersistentTile

    images = 1  # images of a tile of outputs
    sharing = 1  # blocks of a cluster that each copy a part of the halo tile for all
    single_taps = False  # whether a step brings only what one tap reads

    @property
    def boxed(self) -> bool:
        """Whether products read TMA boxes as they arrive; else threads rearrange them first."""
        return self.conv.layout == "NHWC"

    @derived
    def part(self) -> tuple[int, int, int]:
        """(images, rows, pixels of a row) of a plane that one block copies."""
        return 1, self.lines, self.pitch

    @derived
    def planes(self) -> tuple[int, int]:
        """Numbers of row parities and of column parities that taps read."""
        return _parities(self.conv)

    @derived
    def lines(self) -> int:
        """Rows of a plane."""
        return self.tile.rows + beyond_first_tap(self.conv)[0]

    @property
    def lead(self) -> int:
        """Elements of a box's rows before the halo tile, with channels first: boxes begin at a multiple of 16 bytes."""
        return 0 if self.boxed else -self.conv.padding[1] % self.tile.unit

    @property
    def together(self) -> int:
        """Pixels that a thread rearranges at a time: a 4-byte word of a channel where the column stride is 1, else one pixel."""
        return 4 // self.conv.itemsize if not self.boxed and self.conv.stride[1] == 1 else 1

    @property
    def margin(self) -> int:
        """Pixels before a row of the halo tile that no window reads, since words begin there."""
        return self.lead % self.together

    @derived
    def pitch(self) -> int:
        """Pixels of a row of a plane."""
        needed = self.margin + self.tile.cols + beyond_first_tap(self.conv)[1]
        return -(-needed // self.together) * self.together

    @property
    def plane(self) -> int:
        """Pixels of a plane, padded to a multiple of 8, after which the swizzle pattern repeats."""
        return -(-self.lines * self.pitch // 8) * 8

    @derived
    def pixels(self) -> int:
        """Pixels that a step copies, in all planes."""
        return math.prod(self.planes) * self.lines * self.pitch

    @derived
    def columns(self) -> int:
        """Columns of a product: outputs of the tile and columns between its rows, padded to a size that `wgmma` has."""
        multiple = MULTIPLIERS[self.tile.dtype].columns
        return -(-((self.tile.rows - 1) * self.pitch + self.tile.cols) // multiple) * multiple

    @property
    def stage_pixels(self) -> int:
        """Pixels that a stage has room for, with those that the last columns of a product read."""
        return math.prod(self.planes) * self.plane + 16

    @property
    def pixel_bytes(self) -> int:
        """Contiguous bytes of a pixel."""
        return self.tile.slabs * SLAB if self.boxed else CHUNK

    def shift(self, u: Expr, v: Expr) -> Expr:
        """Distance in pixels from a window's first tap to its tap (u, v)."""
        conv = self.conv
        (down, row), (across, col) = ((i * d // s, i * d % s) for i, d, s in zip((u, v), conv.dilation, conv.stride, strict=True))
        return (row * self.planes[1] + col) * self.plane + down * self.pitch + across + self.margin

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles of outputs along the rows and columns of an image."""
        height, width = self.conv.output_size
        return -(-height // self.tile.rows), -(-width // self.tile.cols)

    @derived
    def output_tiles(self) -> int:
        """Tiles that cover the output."""
        return self.conv.batch * math.prod(self.counts)

    @property
    def raw(self) -> tuple[int, int, int]:
        """Shape of a step's TMA box, channels first: [channels, rows, columns], columns padded to 16 bytes."""
        conv, tile = self.conv, self.tile
        rows, last = ((n - 1) * s + p for n, s, p in zip((self.lines, self.pitch), conv.stride, self.planes, strict=True))
        return tile.units * tile.unit, rows, -(-(self.lead - self.margin + last) // tile.unit) * tile.unit

    @derived
    def window_buffer(self) -> tuple[int, int]:
        """Shape of the pipeline stages that products read: [stages of all warpgroups, elements], a stage padded to whole KiB."""
        tile = self.tile
        size = self.stage_pixels * tile.units * CHUNK
        return tile.groups * tile.stages, -(-size // KIB) * KIB // self.conv.itemsize

    @property
    def box_buffer(self) -> tuple[int, int]:
        """Shape of the buffer for TMA boxes that threads rearrange: [warpgroups, elements]; 0 elements where products read boxes."""
        size = 0 if self.boxed else math.prod(self.raw) * self.conv.itemsize
        return self.tile.groups, -(-size // KIB) * KIB // self.conv.itemsize

    @property
    def full_barriers(self) -> int:
        """Number of full barriers: one for the filters and one for each buffer of a TMA box."""
        return 1 + (self.window_buffer if self.boxed else self.box_buffer)[0]

    @property
    def filters(self) -> int:
        """Elements of a block's filters."""
        return math.prod(self.tile.pack(self.conv).shape(self.conv)[1:])

    @derived
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block takes."""
        dtype = self.tile.dtype
        buffers = self.window_buffer, self.box_buffer, (self.filters,)
        return sum(padded(shape, dtype) for shape in buffers) + padded((self.full_barriers,), PHASES)

    @derived
    def sum_registers(self) -> int:
        """Registers of a thread for accumulators."""
        return self.tile.block_m // M * self.columns // 2

    @property
    def run_of_outputs(self) -> int:
        """Neighbouring outputs of a row that one store takes, channels first: the two columns of a thread if they are aligned, else 1."""
        even = all(size % 2 == 0 for size in (self.pitch, self.tile.cols, self.conv.output_size[1]))
        return 2 if even else 1
