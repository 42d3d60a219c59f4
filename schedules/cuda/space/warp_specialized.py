"""The search space of warp-specialized kernels: legal tiles worth a trial."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.legality.boxes import PRODUCTS, SLABS
from im2win.schedules.cuda.legality.warp_specialized import (
    SHARED,
    no_channels_last,
    no_copy,
    no_lines,
    no_pixels,
    no_window_rows,
    unsupported_reason,
    violations,
)
from im2win.schedules.cuda.mainloop.registers import ADDRESSES, OPERANDS, enough
from im2win.schedules.cuda.mainloop.registers import MOST as MOST_REGISTERS
from im2win.schedules.cuda.model.warp_specialized import estimate
from im2win.schedules.cuda.tiles.fields import field_of, halo_tile
from im2win.schedules.cuda.tiles.persistent import EIGHT, KIB, MAX_BOX, M
from im2win.schedules.cuda.tiles.rearranged import RearrangedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile, channel_phases
from im2win.spec.conv2d import Conv2d

MOST = 12  # tiles kept for each of `SHAPES`, of `TMA_BOXES` and of `SHARED`: those that the cost model ranks first
SHAPES_KEPT = 2  # shapes of tiles of outputs that are kept, those of least cost
PIXELS = 32  # where a tile is a part of one row of pixels, its columns are a multiple of this, which a cluster of four can share
STORED = 32  # least columns of a part of a row that is stored channels first, where TMA boxes come from a copy
TILE_COLUMNS = 10  # cost of a tile, in columns of a product
PIXEL_COLUMNS = 0.5  # cost of copying a pixel, in columns of a product of one tap
# (channels of a block, warpgroups, ping-pong teams, most columns of a product), limited by registers.
SHAPES = (
    (64, 1, 2, 256), (128, 2, 1, 256), (128, 1, 2, 128), (256, 2, 1, 128), (64, 1, 1, 256), (128, 2, 1, 128), (64, 1, 2, 128),
    (192, 3, 1, 160), (128, 2, 1, 64), (256, 4, 1, 96), (64, 1, 1, 64),
)  # fmt: skip
CLUSTERS = (
    (1, "windows"), (2, "windows"), (2, "filters"), (4, "windows"), (4, "filters"),
    (2, "accumulators"), (4, "accumulators"), (8, "accumulators"),
)  # fmt: skip
SUMS = (1, 2, 4)  # blocks that share accumulators, for which shapes are chosen
DEPTHS = (2, 3, 4)  # pipeline stages of windows
DEEP = (6, 8)  # and of 1x1 kernels, of which a step multiplies so little that copies of few steps do not hide one another's latency
COPIES = 6  # most pipeline stages of filters, or as many as there are of windows


def output_tiles(conv: Conv2d, most: int, blocks: int = 1, at_once: int = 1, boxes: str = "halo") -> list[tuple[int, int, int]]:
    """(images, rows, cols) of tiles with at most `most` columns of a product, those first that multiply and copy least.

    Args:
        blocks: blocks of channels, each of which computes every tile. at_once: thread blocks that run at the same time.
        boxes: what TMA boxes bring, see `WarpSpecializedTile`.
    """
    found = [(-(-tiles * blocks // at_once) * cost, output_tile) for tiles, cost, output_tile in _covers(conv, most, boxes)]
    return [output_tile for _, output_tile in sorted(found)[:SHAPES_KEPT]]


@functools.lru_cache(maxsize=128)
def _covers(conv: Conv2d, most: int, boxes: str) -> list[tuple[int, float, tuple[int, int, int]]]:
    """(tiles that cover the output, cost of one, its images, rows and columns) of tiles with at most `most` columns of a product."""
    least = WarpSpecializedTile(PRODUCTS[conv.dtype], M, 1, 1, max(SLABS), 2, 1, tma_boxes=boxes)
    least = replace(least, slabs=max(least.slab_counts))
    one = field_of(conv, least).conv
    height, width = one.output_size
    found = []
    in_row = one.kernel == (1, 1) and height == 1 and width > most
    widths: Iterable[int]
    if least.lines or (least.channels_last and in_row):
        widths = _eights(width, most)
    else:
        widths = _in_row(width, most) if in_row else _sizes(width, most)
    if conv.layout == "NCHW" and (least.channels_last or least.window_rows):  # products cost little beside stores of few bytes
        widths = (cols for cols in widths if cols >= min(width, STORED))
    for cols in widths:
        for rows in _sizes(height, most // cols):
            whole = (rows, cols) == (height, width)
            for images in _sizes(one.batch, most // (rows * cols)) if whole else (1,):
                field = halo_tile(one, replace(least, images=images, rows=rows, cols=cols))
                copied = field.uncopied is None and (not isinstance(field, RearrangedHaloTile) or max(field.raw_box) <= MAX_BOX)
                if field.columns <= most and copied:
                    cost = field.columns + TILE_COLUMNS + PIXEL_COLUMNS / math.prod(one.kernel) * field.pixels
                    found.append((field.output_tiles, cost, (images, rows, cols)))
    return found


def _in_row(size: int, most: int) -> Iterator[int]:
    """Parts of a row of pixels: multiples of `PIXELS`, and of eight those that cover the row with fewer pixels beyond it."""
    shared = range(most // PIXELS * PIXELS, 0, -PIXELS)
    return iter(dict.fromkeys((*shared, *_eights(size, most))))


def _sizes(size: int, most: int) -> Iterator[int]:
    """Parts of a size up to `most`, the largest first; of those that cover the size with equally many parts, the smallest."""
    one = min(size, most)
    while one:
        one = -(-size // -(-size // one))
        yield one
        one -= 1


def _eights(size: int, most: int) -> Iterator[int]:
    """Multiples of eight up to `most`, or all of a smaller size; of those that cover the size with equally many parts, the smallest."""
    if size <= most:
        yield size
    parts = [-(-size // (EIGHT * eights)) for eights in range(1, most // EIGHT + 1)]
    for number in sorted(set(parts)):
        cols = EIGHT * -(-size // (EIGHT * number))
        if cols <= most and (number > 1 or size > most):
            yield cols


def _rings(conv: Conv2d, tile: WarpSpecializedTile, gpu: Gpu) -> Iterator[WarpSpecializedTile]:
    """The tile with as many pipeline stages of filters as fit, for one and for two thread blocks on a multiprocessor."""
    field = field_of(conv, tile)
    resident = (1, 2) if enough(field, gpu, 2) else (1,)
    for stages in (*DEPTHS, *(DEEP if conv.kernel == (1, 1) else ())):
        alone = replace(tile, stages=stages, filter_stages=0)
        needed = KIB + field_of(conv, alone).shared_bytes + 2 * 128
        for blocks in resident:
            copies = (gpu.shared // blocks - needed) // (field.filter_buffer[1] * conv.itemsize)  # their barriers are in the 128 bytes
            if copies >= 2:
                yield replace(alone, filter_stages=min(copies, max(COPIES, stages)))


def _tiles(conv: Conv2d, gpu: Gpu, shape: tuple[int, int, int, int], boxes: str) -> Iterator[WarpSpecializedTile]:
    block_m, groups, pingpong, columns = shape
    blocks = -(-conv.out_channels // block_m)
    if boxes == "lines":  # accumulators for each phase
        columns = min(columns, 2 * (MOST_REGISTERS - ADDRESSES) // (channel_phases(conv) * block_m // (M * groups)) // EIGHT * EIGHT)
    kernel = (conv.kernel[0], 1) if boxes == "window_rows" else conv.kernel
    taps = sorted({math.prod(kernel), kernel[1], 1}) if not boxes.endswith("taps") else [1]
    if MULTIPLIERS[conv.dtype].chain:  # sums that take over accumulators
        columns = min(columns, (MOST_REGISTERS - OPERANDS) // (block_m // (M * groups)) // EIGHT * EIGHT)
    found = [output_tiles(conv, columns, boxes=boxes)]
    found += (output_tiles(conv, columns, blocks, gpu.multiprocessors // together, boxes) for together in SUMS)
    shapes = dict.fromkeys(itertools.chain(*found))
    slab_counts = (4, 2, 1) if boxes in ("lines", "copied") else (2, 1)
    for (images, rows, cols), slabs, tap, (cluster, shared) in itertools.product(shapes, slab_counts, taps, CLUSTERS):
        more = {"images": images, "taps": tap, "pingpong": pingpong, "shared": shared, "tma_boxes": boxes}
        tile = WarpSpecializedTile(PRODUCTS[conv.dtype], block_m, rows, cols, slabs, 2, groups, cluster, **more)
        if not violations(conv, tile, gpu):
            yield from (one for one in _rings(conv, tile, gpu) if not violations(conv, one, gpu))


def space(conv: Conv2d, gpu: Gpu) -> list[WarpSpecializedTile]:
    """Every legal tile worth a trial, in a fixed order."""
    if unsupported_reason(conv) is not None:
        return []

    def seconds(tile: WarpSpecializedTile) -> float:
        return estimate(conv, tile, gpu).seconds

    found: list[WarpSpecializedTile] = []
    forms: tuple[str, ...] = ("halo", "taps") if math.prod(conv.kernel) > 1 else ("halo",)
    if conv.layout == "NCHW":
        reasons = {"rearranged": None, "lines": no_lines(conv), "copied": no_copy(conv)}
        forms = tuple(form for form, reason in reasons.items() if reason is None)
        if no_channels_last(conv) is None:
            forms += ("channels_last", "channels_last_taps") if math.prod(conv.kernel) > 1 else ("channels_last",)
    if no_pixels(conv) is not None:
        forms = ()
    if no_window_rows(conv) is None:
        forms += ("window_rows",)
    for shape, boxes in itertools.product(SHAPES, forms):
        tiles = sorted(_tiles(conv, gpu, shape, boxes), key=seconds)
        for shared in SHARED:
            found += itertools.islice((tile for tile in tiles if tile.shared == shared), MOST)
    return list(dict.fromkeys(found))
