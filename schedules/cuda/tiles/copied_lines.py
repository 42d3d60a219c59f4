"""The layout of tiles of 1x1 layers with channels first whose products take lines of pixels from a copy of the input."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from im2win.common.caching import derived
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.persistent import EIGHT
from im2win.schedules.cuda.tiles.pixel_lines import PixelLines
from im2win.spec.conv2d import Conv2d

PAIR = 2  # neighbouring pixels of the copy that a thread of the first kernel writes, where it reads them one by one


@dataclass(frozen=True)
class CopiedLines(PixelLines):
    """Lines of pixels of a copy of the input, which has only the pixels that windows read; `conv` is the problem of `of_copy`.

    The copy is [groups of images, channels, images of a group, pixels], with `pitch` elements from one image to the next, a multiple of 16
    bytes: so all channels begin at such a multiple, and there is one phase. A group has as many images as a tile of outputs, whose pixels
    are columns of one product. Elements between images, and images beyond the last, are never written: they are columns of which no output
    comes.
    """

    @property
    def phases(self) -> int:
        """One: every channel of the copy begins at a multiple of 16 bytes."""
        return 1

    @derived
    def leads(self) -> list[int]:
        """Pixels of a line before the first of the tile: none."""
        return [0]

    @derived
    def copied_pitch(self) -> int:
        """Elements from one image of a channel of the copy to the next."""
        return -(-self.conv.width // self.tile.unit) * self.tile.unit

    @derived
    def pitch(self) -> int:
        """Columns of a product from one image to the next."""
        return self.tile.cols if self.tile.images == 1 else self.copied_pitch

    @derived
    def image_groups(self) -> int:
        """Groups of images in the copy."""
        return -(-self.conv.batch // self.tile.images)

    @derived
    def axes(self) -> tuple[int, int, int]:
        """(elements of a channel of a group, channels, groups) of the copy."""
        return self.tile.images * self.copied_pitch, self.conv.in_channels, self.image_groups

    @property
    def uncopied(self) -> str | None:
        """See `StagedHaloTile.uncopied`."""
        tile, width, depth = self.tile, self.conv.width, MULTIPLIERS[self.tile.dtype].depth
        if tile.cols != width and tile.cols % tile.unit:
            return f"`cols` (={tile.cols}) must be {width}, or a multiple of {tile.unit}: boxes begin at multiples of 16 bytes"
        if self.channels % (tile.window_blocks * max(EIGHT, depth)):
            return f"`cluster` (={tile.cluster}) must cut the {self.channels} channels of a step in parts of {max(EIGHT, depth)}"
        return None

    @derived
    def shared_part(self) -> tuple[int, int, int] | None:
        """(images, rows, pixels of a row) that a block copies: all, of its share of the channels."""
        return 1, 1, self._outputs

    @derived
    def columns(self) -> int:
        """Columns of a product: outputs of the tile and what lies between images, padded to a size that `wgmma` has."""
        return -(-self._outputs // EIGHT) * EIGHT


def copied_run(conv: Conv2d) -> int:
    """Neighbouring pixels of the copy that a thread reads at once, with those between them, up to 16 bytes of one row; 0 if it cannot."""
    across, most = conv.stride[1], CHUNK // conv.itemsize
    for read in (most, most // 2, most // 4):
        run = read // across
        if run > 1 and read % across == 0 and conv.output_size[1] % run == 0 and conv.width % read == 0:
            return run
    return 0


def copy_elements(field: CopiedLines) -> int:
    """Elements of the copy, with those that are never written."""
    return math.prod(field.axes)


@functools.lru_cache(maxsize=1024)
def of_copy(conv: Conv2d) -> Conv2d:
    """The problem of the copy: every image is one row of the pixels that windows read."""
    height, width = conv.output_size
    return conv.with_(height=1, width=height * width, stride=1)
