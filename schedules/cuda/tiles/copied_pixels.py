"""The layout of halo tiles with channels first that TMA boxes bring from a channels-last copy of the input."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.copied_lines import copied_run, of_copy
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class CopiedPixels(StagedHaloTile):
    """Halo tiles of a channels-last copy of the input, [images, rows, columns, channels]; `conv` is the problem of `of_pixels`.

    Boxes bring the channels of a pixel side by side, as those of a layer with channels last, and products take them as they arrive. Outputs
    are channels first.
    """

    boxed = True


def copies_all(conv: Conv2d) -> bool:
    """Whether the copy has all pixels of the input. That of a 1x1 kernel without padding has only those that windows read."""
    return conv.kernel != (1, 1) or any(conv.padding) or conv.stride == (1, 1)


@functools.lru_cache(maxsize=1024)
def of_pixels(conv: Conv2d) -> Conv2d:
    """The problem of the copy. For a 1x1 kernel without padding, every image is one row of the pixels that windows read."""
    return of_copy(conv) if conv.kernel == (1, 1) and not any(conv.padding) else conv


def pixel_elements(conv: Conv2d) -> int:
    """Elements of the copy."""
    return math.prod(of_pixels(conv).input_shape)


def pixel_run(conv: Conv2d) -> int:
    """Neighbouring pixels of the copy that a thread reads at once in every channel, up to 16 bytes with those between; 1 if unaligned."""
    if not copies_all(conv):
        return copied_run(conv) or 1
    return math.gcd(conv.height * conv.width, CHUNK // conv.itemsize)
