"""Kernel rows of few input channels as the channels of another problem, and the packing of its filters (numpy only, no compiler).

A first layer has three channels, where `wgmma` multiplies 16 at a time. In a copy of the input with channels last, what a kernel row reads
is contiguous: its taps, each with all channels. A row of a window is then a pixel of another problem, whose kernel has one column.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.packing.wgmma_smem import CHUNK, ChunkPack
from im2win.spec.conv2d import Conv2d


def pixel_elements(conv: Conv2d) -> int:
    """Elements of a pixel of the copy: the channels, and zeros, so that windows begin at multiples of 16 bytes."""
    unit = CHUNK // conv.itemsize
    multiple = unit // math.gcd(unit, conv.stride[1])
    return -(-conv.in_channels // multiple) * multiple


def row_elements(conv: Conv2d) -> int:
    """Elements of a row of a window in the copy, padded to a multiple of 16 bytes."""
    unit = CHUNK // conv.itemsize
    return -(-conv.kernel[1] * pixel_elements(conv) // unit) * unit


def copy_columns(conv: Conv2d) -> int:
    """Pixels of a row of the copy: all that windows read, with the padding to their left and right, padded to a multiple of 16 bytes."""
    pixel, unit = pixel_elements(conv), CHUNK // conv.itemsize
    elements = (conv.output_size[1] - 1) * conv.stride[1] * pixel + row_elements(conv)
    multiple = math.lcm(pixel, unit)
    return -(-elements // multiple) * multiple // pixel


@functools.lru_cache(maxsize=1024)
def window_row_problem(conv: Conv2d) -> Conv2d:
    """The problem whose pixels are the rows of the windows: its input has a column for each column of outputs, its kernel one column."""
    (top, _, bottom, _), width = conv.padding, conv.output_size[1]
    rows = {"kernel": (conv.kernel[0], 1), "stride": (conv.stride[0], 1), "dilation": (conv.dilation[0], 1)}
    return conv.with_(in_channels=row_elements(conv), width=width, padding=(top, 0, bottom, 0), **rows)


@dataclass(frozen=True)
class WindowRowPack(ChunkPack):
    """Filters of `window_row_problem`, packed as `ChunkPack` packs them. There is one group, and one phase."""

    @property
    def inner(self) -> ChunkPack:
        """The packing of the filters of `window_row_problem`."""
        return ChunkPack(self.block, self.slabs, self.run)

    def channels(self, conv: Conv2d) -> int:
        """Input channels of a block: elements of a row of a window."""
        return row_elements(conv)

    def shape(self, conv: Conv2d) -> tuple[int, int, int]:
        """Shape of the packed filter, in elements."""
        return self.inner.shape(window_row_problem(conv))

    def filter(self, conv: Conv2d, w: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Packs filters of `conv.filter_shape` into `shape(conv)`, contiguous."""
        problem, pixel, (rows, columns) = window_row_problem(conv), pixel_elements(conv), conv.kernel
        wide = np.zeros((conv.out_channels, problem.in_channels, rows, 1), w.dtype)
        taps = np.zeros((conv.out_channels, columns, pixel, rows), w.dtype)
        taps[:, :, : conv.in_channels] = w.transpose(0, 3, 1, 2)
        wide[:, : columns * pixel, :, 0] = taps.reshape(conv.out_channels, columns * pixel, rows)
        return self.inner.filter(problem, wide)
