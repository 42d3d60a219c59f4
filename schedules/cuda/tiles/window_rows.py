"""The layout of halo tiles of layers of few input channels, whose pixels are rows of windows."""

from __future__ import annotations

from dataclasses import dataclass

from im2win.packing.window_rows import copy_columns, pixel_elements
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class WindowRows(StagedHaloTile):
    """Halo tiles of the problem of `packing.window_rows.window_row_problem`, cut from a copy of the input, [images, rows, columns, pixel].

    A pixel of the copy has the channels, and zeros behind them. What a kernel row reads for one output is contiguous there and begins at a
    multiple of 16 bytes. In the tensor map it is one pixel; neighbouring ones overlap. Zeros left and right of the image are in the copy,
    those above and below come from TMA.
    """

    boxed = True


def row_copy_shape(conv: Conv2d) -> tuple[int, int, int, int]:
    """Shape of the copy: [images, rows, columns, elements of a pixel]."""
    return conv.batch, conv.height, copy_columns(conv), pixel_elements(conv)


def row_strides(conv: Conv2d) -> tuple[int, int, int]:
    """Elements of the copy from one row of a window to the one of the next output, to that of the next input row, and of the next image."""
    _, height, columns, pixel = row_copy_shape(conv)
    return conv.stride[1] * pixel, columns * pixel, height * columns * pixel
