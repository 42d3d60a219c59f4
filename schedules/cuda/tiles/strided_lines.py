"""The layout of tiles of strided 1x1 layers with channels first, whose products take every stride-th row of pixels as it lies in memory."""

from __future__ import annotations

from dataclasses import dataclass

from im2win.common.caching import derived
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.persistent import EIGHT
from im2win.schedules.cuda.tiles.pixel_lines import PixelLines
from im2win.schedules.cuda.tiles.warp_specialized import LINE, channel_phases
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class StridedLines(PixelLines):
    """Lines of pixels of those input rows that windows read, one line for each row of the tile of outputs.

    A product computes all pixels of these rows, and the epilogue keeps every `column_step`-th. TMA boxes leave out the other rows, whose
    tensor map has every stride-th row alone.
    """

    @derived
    def pitch(self) -> int:
        """Columns of a product from one row of outputs to the next."""
        return LINE

    @derived
    def column_step(self) -> int:
        """Columns of a product from one output to the next."""
        return self.conv.stride[1]

    @derived
    def _read(self) -> int:
        """Pixels of a row from the first that a window of the tile reads to the last."""
        return (self.tile.cols - 1) * self.column_step + 1

    @derived
    def _outputs(self) -> int:
        """Columns of a product from the first output to the last."""
        return (self.tile.rows - 1) * LINE + self._read

    def _is_output(self, column: int) -> bool:
        line, x = divmod(column, LINE)
        return line < self.tile.rows and x < self._read and x % self.column_step == 0

    @property
    def run_of_outputs(self) -> int:
        """One: the two columns of a thread are not two outputs."""
        return 1

    @derived
    def row_axes(self) -> tuple[int, int, int, int]:
        """(pixels of a row, channels, rows that windows read, images) of the input."""
        conv = self.conv
        return conv.width, conv.in_channels, conv.output_size[0], conv.batch

    @derived
    def strides(self) -> tuple[int, int, int]:
        """Elements of the input from one channel, row and image to the next."""
        plane = self.conv.height * self.conv.width
        return plane, self.conv.stride[0] * self.conv.width, self.conv.in_channels * plane

    @property
    def uncopied(self) -> str | None:
        """See `StagedHaloTile.uncopied`."""
        tile, width, depth = self.tile, self.conv.output_size[1], MULTIPLIERS[self.tile.dtype].depth
        if self._read > LINE:
            most = (LINE - 1) // self.column_step + 1
            return f"`cols` (={tile.cols}) must be at most {most}: a row of a tile is one line of {LINE} pixels"
        if tile.cols != width and tile.cols * self.column_step % tile.unit:
            return f"`cols` (={tile.cols}) times the stride must be a multiple of {tile.unit}: boxes begin at multiples of {CHUNK} bytes"
        if tile.images != 1:
            return f"`images` (={tile.images}) must be 1 where products take lines of pixels"
        if self.channels % (tile.window_blocks * max(EIGHT, depth)):
            return f"`cluster` (={tile.cluster}) must cut the {self.channels} channels of a step in parts of {max(EIGHT, depth)}"
        return None

    @derived
    def shared_part(self) -> tuple[int, int, int] | None:
        """(images, rows, pixels of a row) that a block copies: all, of its share of the channels."""
        return 1, self.tile.rows, self.tile.cols

    @derived
    def copied(self) -> int:
        """Columns of a product that TMA boxes bring: all."""
        return self.reach

    @derived
    def columns(self) -> int:
        """Columns of a product: pixels of the tile's rows and what lies between, padded to a size that `wgmma` has."""
        return -(-self._outputs // EIGHT) * EIGHT


def strided_rows(conv: Conv2d) -> bool:
    """Whether a tensor map can have every stride-th row of a problem: rows and channels begin at multiples of 16 bytes."""
    return channel_phases(conv) == 1 and conv.stride[0] * conv.width * conv.itemsize % CHUNK == 0
