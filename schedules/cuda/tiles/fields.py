"""The halo tile of a problem and a tile: of which kind it is, and the problem that it is copied from."""

from __future__ import annotations

import functools
import math

from im2win.packing.window_rows import window_row_problem
from im2win.schedules.cuda.tiles.copied_lines import CopiedLines, copy_elements, of_copy
from im2win.schedules.cuda.tiles.copied_pixels import CopiedPixels, of_pixels, pixel_elements
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.pixel_lines import PixelLines
from im2win.schedules.cuda.tiles.rearranged import RearrangedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.schedules.cuda.tiles.window_rows import WindowRows, row_copy_shape
from im2win.spec.conv2d import Conv2d

_KINDS: dict[str, type[StagedHaloTile]] = {
    "rearranged": RearrangedHaloTile, "lines": PixelLines, "copied": CopiedLines, "channels_last": CopiedPixels,
    "channels_last_taps": CopiedPixels, "window_rows": WindowRows,
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def field_of(conv: Conv2d, tile: WarpSpecializedTile) -> StagedHaloTile:
    """The halo tile of a problem."""
    if tile.copied:
        return halo_tile(of_copy(conv), tile)
    if tile.window_rows:
        return halo_tile(window_row_problem(conv), tile)
    whole = of_pixels(conv) if tile.channels_last else flat(conv)
    return halo_tile(of_a_tap(conv) if tile.single_taps else whole, tile)


def halo_tile(conv: Conv2d, tile: WarpSpecializedTile) -> StagedHaloTile:
    """The halo tile of the problem that it is copied from."""
    return _KINDS.get(tile.tma_boxes, StagedHaloTile)(conv, tile)


def copy_bytes(conv: Conv2d, tile: WarpSpecializedTile) -> int:
    """Bytes of the copy of the input that the first kernel of a tile makes; 0 where there is none."""
    return copied_elements(conv, tile) * conv.itemsize


def copied_elements(conv: Conv2d, tile: WarpSpecializedTile) -> int:
    """Elements of that copy."""
    if tile.channels_last:
        return pixel_elements(conv)
    if tile.window_rows:
        return math.prod(row_copy_shape(conv))
    field = field_of(conv, tile)
    return copy_elements(field) if isinstance(field, CopiedLines) else 0


@functools.lru_cache(maxsize=1024)
def flat(conv: Conv2d) -> Conv2d:
    """The problem that halo tiles are copied from: for a 1x1 kernel without stride and padding, all images as one row of pixels.

    Channels first, every image is such a row.
    """
    if conv.kernel == (1, 1) and conv.stride == (1, 1) and not any(conv.padding):
        if conv.layout == "NCHW":
            return conv.with_(height=1, width=conv.height * conv.width)
        return conv.with_(batch=1, height=1, width=conv.batch * conv.height * conv.width)
    return conv


@functools.lru_cache(maxsize=1024)
def of_a_tap(conv: Conv2d) -> Conv2d:
    """The problem whose halo tile is what one tap reads: a pixel for every output, as far apart as windows are."""
    height, width = ((size - 1) * s + 1 for size, s in zip(conv.output_size, conv.stride, strict=True))
    return conv.with_(height=height, width=width, kernel=1, padding=0, dilation=1)
