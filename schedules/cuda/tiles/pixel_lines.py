"""The layout of tiles of 1x1 layers with channels first, whose products take pixels of each channel as they lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from im2win.common.caching import derived
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import EIGHT
from im2win.schedules.cuda.tiles.warp_specialized import LINE, channel_phases


@dataclass(frozen=True)
class PixelLines(StagedHaloTile):
    """Pixels of each channel, in lines of 64: the second operand of `wgmma` with its columns contiguous (MN-major).

    `conv` has one row of pixels for each image, and a tile of outputs takes a part of one image.

    TMA boxes begin at multiples of 16 bytes. Where channels do not, `phases` channels begin at as many places modulo 16 bytes. A step then
    has the channels of every phase by themselves, and its box begins up to seven pixels before the tile. The products of a phase have
    accumulators of their own, since their columns are shifted against those of other phases; the epilogue shifts them back and adds them.

    A stage is [lines of a channel, phases, channels of a phase, 64 pixels].
    """

    @derived
    def phases(self) -> int:
        """Least number of channels that together are a multiple of 16 bytes."""
        return channel_phases(self.conv)

    @property
    def sums(self) -> int:
        """Accumulators of an output, one for every phase."""
        return self.phases

    @derived
    def leads(self) -> list[int]:
        """Pixels of a line before the first of the tile, for every phase."""
        return [phase * self.conv.width % self.tile.unit for phase in range(self.phases)]

    @derived
    def axes(self) -> tuple[int, int, int]:
        """(elements of the channels of all phases, channels of a phase, images) of the tensor that boxes are cut from."""
        return self.phases * self.conv.width, self.conv.in_channels // self.phases, self.conv.batch

    @derived
    def channels(self) -> int:
        """Channels of a step."""
        return self.tile.units * self.tile.unit

    @derived
    def each(self) -> int:
        """Channels of a step in one phase."""
        return self.channels // self.phases

    @derived
    def share(self) -> int:
        """Channels of a phase that one block of a cluster copies."""
        return self.each // self.tile.window_blocks

    @property
    def uncopied(self) -> str | None:
        """See `StagedHaloTile.uncopied`."""
        tile, width, depth = self.tile, self.conv.width, MULTIPLIERS[self.tile.dtype].depth
        if tile.images != 1:
            return f"`images` (={tile.images}) must be 1 where products take lines of pixels"
        if tile.cols != width and tile.cols % tile.unit:
            return f"`cols` (={tile.cols}) must be {width}, or a multiple of {tile.unit}: boxes begin at multiples of 16 bytes"
        if self.each % depth:
            return f"`slabs` (={tile.slabs}) must be larger: a product takes {depth} channels of each of {self.phases} phases"
        if self.each % (tile.window_blocks * EIGHT):
            return f"`cluster` (={tile.cluster}) must cut the {self.each} channels of a phase in parts of 8"
        return None

    @derived
    def shared_part(self) -> tuple[int, int, int] | None:
        """(images, rows, pixels of a row) that a block copies: all, of its share of the channels."""
        return 1, 1, self.tile.cols

    @derived
    def columns(self) -> int:
        """Columns of a product: outputs of the tile and what lies before them, padded to a size that `wgmma` has."""
        return -(-(self.tile.cols + max(self.leads)) // EIGHT) * EIGHT

    @derived
    def lines_of_a_channel(self) -> int:
        """Lines of a channel in a stage."""
        return -(-self.columns // LINE)

    @derived
    def pixels(self) -> int:
        """Pixels of a channel that a step copies."""
        return self.lines_of_a_channel * LINE

    @derived
    def window_buffer(self) -> tuple[int, int]:
        """Shape of the pipeline stages of windows: [stages, elements]."""
        return self.tile.stages, self.pixels * self.channels

    @derived
    def sum_registers(self) -> int:
        """Registers of a thread for accumulators."""
        return self.phases * super().sum_registers

    @derived
    def step_bytes(self) -> int:
        """Bytes that arrive in a step, from all blocks that share it."""
        return math.prod(self.window_buffer[1:]) * self.conv.itemsize
