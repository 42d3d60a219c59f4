"""Layout of a halo tile's pixels in shared memory, for multistage kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from im2win.common.caching import derived
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

Expr = Any


@dataclass(frozen=True)
class Geometry:
    """The halo tile of `images` x `rows` x `cols` windows. A pixel holds the channels of a step.

    By rows: every pixel is stored once. With a column stride s, every s-th pixel of a row is contiguous, so that pixels of neighbouring
    windows are neighbours.
    By windows (im2win): for every row of windows its `height` input rows, stored column by column, so that a window is one contiguous run.
    """

    conv: Conv2d
    images: int
    rows: int
    cols: int
    by_windows: bool

    @classmethod
    def of(cls, conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> Geometry:
        """The layout for a tile."""
        return _geometry(conv, tile.images, tile.rows, tile.cols, plan.staged == "windows")

    @property
    def height(self) -> int:
        """Rows that are stored for an image. By windows, the input rows of every row of windows are stored apart."""
        return self.rows * self.conv.kernel[0] if self.by_windows else (self.rows - 1) * self.conv.stride[0] + self.conv.window[0]

    @property
    def width(self) -> int:
        """Input columns of the halo tile."""
        return (self.cols - 1) * self.conv.stride[1] + self.conv.window[1]

    @property
    def _plane(self) -> int:
        """Pixels of an input row that one column parity has."""
        return -(-self.width // self.conv.stride[1])

    @property
    def _row(self) -> int:
        """Pixels stored for an input row."""
        return self.width if self.by_windows else self._plane * self.conv.stride[1]

    @derived
    def pixels(self) -> int:
        """Pixels stored in all, padded to a multiple of 8."""
        return -(-self.images * self.height * self._row // 8) * 8

    @property
    def copies(self) -> int:
        """Pixels to copy."""
        return self.images * self.height * self.width

    def source(self, row: Expr) -> Expr:
        """Input row, counted from the first of the halo tile, that a stored row holds."""
        if not self.by_windows:
            return row
        return row // self.conv.kernel[0] * self.conv.stride[0] + row % self.conv.kernel[0] * self.conv.dilation[0]

    def place(self, image: Expr, row: Expr, col: Expr) -> Expr:
        """Position of a pixel in shared memory. `row` counts stored rows, `col` input columns."""
        stride, taps = self.conv.stride[1], self.conv.kernel[0]
        if self.by_windows:
            return ((image * self.rows + row // taps) * self.width + col) * taps + row % taps
        return (image * self.height + row) * self._row + col % stride * self._plane + col // stride

    def stored(self, pixel: Expr) -> tuple[Expr, Expr, Expr]:
        """(image, row, col) of a stored pixel: the inverse of `place`."""
        stride, taps = self.conv.stride[1], self.conv.kernel[0]
        image = pixel // (self.height * self._row)
        if self.by_windows:
            line = pixel // (taps * self.width) % self.rows
            return image, line * taps + pixel % taps, pixel // taps % self.width
        return image, pixel // self._row % self.height, pixel % self._plane * stride + pixel // self._plane % stride

    def first(self, image: Expr, m: Expr, x: Expr) -> Expr:
        """Position of a window's first pixel."""
        return self.place(image, m * (self.conv.kernel[0] if self.by_windows else self.conv.stride[0]), x * self.conv.stride[1])

    def shift(self, u: Expr, v: Expr) -> Expr:
        """Distance in pixels from a window's first pixel to its tap (u, v)."""
        right = v * self.conv.dilation[1]
        return right * self.conv.kernel[0] + u if self.by_windows else self.place(0, u * self.conv.dilation[0], right)


@functools.lru_cache(maxsize=4096)
def _geometry(conv: Conv2d, images: int, rows: int, cols: int, by_windows: bool) -> Geometry:
    return Geometry(conv, images, rows, cols, by_windows)


def patch_counts(conv: Conv2d, tile: MultistageTile) -> tuple[int, int, int]:
    """(tiles along images, along rows, along columns) that cover the output."""
    sizes = zip((conv.batch, *conv.output_size), (tile.images, tile.rows, tile.cols), strict=True)
    down = [-(-size // part) for size, part in sizes]
    return down[0], down[1], down[2]


def patches_in_all(conv: Conv2d, tile: MultistageTile) -> int:
    """Number of tiles that cover the output."""
    return math.prod(patch_counts(conv, tile))
