"""The search space of persistent kernels: legal tiles worth a trial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.legality.boxes import MAX_COLUMNS, PRODUCTS, blocks_of
from im2win.schedules.cuda.legality.persistent import unsupported_reason, violations
from im2win.schedules.cuda.model.persistent import SMALL_COLUMNS
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.persistent import HaloTile, M, PersistentTile
from im2win.spec.conv2d import Conv2d

MOST = 6  # shapes of tiles kept for a number of columns, those of least cost
PIXEL_COLUMNS = 1.2  # cost of copying a pixel, in columns of a product of one tap
COLUMNS = (64, 128, 192, 256)  # most columns of a product


def output_tiles(conv: Conv2d, most: int) -> list[tuple[int, int]]:
    """(rows, cols) of tiles with at most `most` columns of a product, those first that multiply and copy least."""
    height, width = conv.output_size
    unit = 1 if conv.layout == "NHWC" else CHUNK // conv.itemsize
    step = unit // math.gcd(unit, conv.stride[1])  # TMA boxes begin at a multiple of 16 bytes
    found = []
    for cols in range(min(width, most) // step * step, 0, -step):
        if cols > max(8, step) and -(-width // cols) == -(-width // (cols - step)):
            continue  # narrower tiles cover the width with as many
        for rows in range(1, height + 1):
            field = HaloTile(conv, PersistentTile(PRODUCTS[conv.dtype], M, rows, cols, 1, 2, 1))
            if field.columns > most:
                break
            cost = field.columns + SMALL_COLUMNS + PIXEL_COLUMNS / math.prod(conv.kernel) * field.pixels
            found.append((field.output_tiles * cost, (rows, cols)))
    return [output_tile for _, output_tile in sorted(found)[:MOST]]


def _tiles(conv: Conv2d) -> Iterator[PersistentTile]:
    blocks = [block for block in blocks_of(conv) if block < conv.out_channels + M]
    for block_m, columns in itertools.product(blocks, COLUMNS):
        shapes = output_tiles(conv, min(columns, MAX_COLUMNS))
        for (rows, cols), slabs, stages, groups in itertools.product(shapes, (1, 2), (2, 3, 4), (1, 2, 3, 4)):
            yield PersistentTile(PRODUCTS[conv.dtype], block_m, rows, cols, slabs, stages, groups)


def space(conv: Conv2d, gpu: Gpu) -> list[PersistentTile]:
    """Every legal tile worth a trial, in a fixed order."""
    if unsupported_reason(conv) is not None:
        return []
    return list(dict.fromkeys(tile for tile in _tiles(conv) if not violations(conv, tile, gpu)))
