"""The search space of multistage kernels: legal tiles that obviously waste little, for the tuner to sample and the cost model to rank."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.schedules.cuda.legality.multistage import violations
from im2win.schedules.cuda.loaders import channel_planes
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

# Tiles of a warp, channels x windows. On CUDA cores 8x8 to 12x12 accumulators of a thread keep loads below a tenth of the instructions.
FMA_WARPS = ((32, 64), (32, 96), (32, 128), (48, 64), (48, 96), (64, 32), (64, 64), (16, 128), (64, 48))
# Where a warp is 1 x 32 threads: accumulators of 16x4 to 12x8, 24x4, 32x4.
PLANE_WARPS = (
    (16, 128), (16, 224), (16, 256), (24, 128), (32, 128), (8, 256), (12, 224), (12, 256), (32, 96), (24, 224), (16, 160), (20, 160),
)  # fmt: skip
# Tiles of a warpgroup: it reads filters from shared memory once for every 64 windows, and windows once for all channels.
WARPGROUPS = (
    (128, 128), (64, 128), (128, 64), (64, 64), (256, 64), (96, 128), (192, 64), (64, 256), (32, 256), (96, 64), (32, 128), (48, 128),
    (16, 128),
)  # fmt: skip
ROW_WARPGROUPS = ((64, 64), (48, 64), (32, 64), (32, 128), (16, 128), (40, 64))
PRODUCT_WARPS = ((64, 64), (32, 64), (64, 32), (32, 32), (48, 64), (96, 32), (32, 128), (128, 32), (16, 64), (64, 48))
WARPS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (3, 2), (1, 4), (4, 1), (4, 2), (2, 4), (1, 8))
BANDS = (32, 128, 512)  # MiB: what level-2 cache holds, and more, with fewer launches
FEW_CHANNELS = 8  # most channels of a group for channel planes, which hold all of them
MAX_WASTE = 1.15  # most channels that a block computes, over those that exist


def products(conv: Conv2d, gpu: Gpu) -> list[str]:
    """The kinds of arithmetic for a problem's element type on a GPU."""
    return [name for name, one in PRODUCTS.items() if one.dtype == conv.dtype and (gpu.warpgroups or one.unit != "warpgroup")]


@functools.lru_cache(maxsize=256)
def output_tiles(conv: Conv2d, windows: int, most: int = 4) -> tuple[tuple[int, int, int], ...]:
    """(images, rows, cols) of the best tiles of at most so many outputs: those that waste least, then those with the smallest halo."""
    height, width = conv.output_size
    found = []
    for cols in range(1, min(width, windows) + 1):
        for rows in range(1, min(height, windows // cols) + 1):
            images = min(windows // (rows * cols), conv.batch)
            if images * rows * cols < 0.6 * min(windows, conv.batch * height * width):
                continue
            blocks = -(-width // cols) * -(-height // rows) * -(-conv.batch // images)
            useful = conv.batch * height * width / (blocks * windows)
            across, down = (cols - 1) * conv.stride[1] + conv.window[1], (rows - 1) * conv.stride[0] + conv.window[0]
            rim = across * down / (rows * cols * math.prod(conv.stride))
            stores = 0.02 if conv.layout == "NHWC" else 0.01 * min(math.gcd(cols, width), 4)
            found.append((useful - 0.04 * rim + stores, (images, rows, cols)))
    return tuple(output_tile for _, output_tile in sorted(found, reverse=True)[:most])


def _gathers(conv: Conv2d, plan: WindowSource) -> list[tuple[str, tuple[int, int, int]]]:
    """(order, no tile): the loop orders for copying windows tap by tap.

    Where a channel's taps are contiguous in memory, the order that copies them one after the other is among them.
    """
    few = conv.in_channels // conv.groups <= FEW_CHANNELS
    together = bool(plan.axes) and conv.layout == "NCHW"
    return [(order, (0, 0, 0)) for order in (("cuv", "uvc") if (few or together) and conv.kernel != (1, 1) else ("uvc",))]


def blocks(conv: Conv2d, warps: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(block_m, block_n, warp_m, warp_n) that waste few channels."""
    channels = conv.out_channels // conv.groups
    least = -(-channels // 16) * 16
    for (warp_m, warp_n), (across, down) in itertools.product(warps, WARPS):
        block_m = warp_m * across
        if block_m <= least and -(-channels // block_m) * block_m <= max(MAX_WASTE * channels, least):
            yield block_m, warp_n * down, warp_m, warp_n


def _plane_tiles(conv: Conv2d) -> Iterator[MultistageTile]:
    """Tiles with channel planes: for few channels, on CUDA cores."""
    total = channel_planes.rows(conv)
    counts = [rows for rows in range(1, total + 1) if total % rows == 0 and 6 <= rows * conv.kernel[1] <= 64]
    for block_m, block_n, warp_m, warp_n in blocks(conv, PLANE_WARPS):
        for output_tile, rows, stages in itertools.product(output_tiles(conv, block_n), counts, (2, 3)):
            if rows < total or stages == 2:
                yield MultistageTile("fma", block_m, block_n, warp_m, warp_n, rows, stages, "cuv", *output_tile)


def _tiles(conv: Conv2d, product: str, plan: WindowSource) -> Iterator[MultistageTile]:
    few = conv.in_channels // conv.groups <= FEW_CHANNELS
    if plan.halo and few:
        yield from _plane_tiles(conv) if product == "fma" else ()
        return
    unit = PRODUCTS[product].unit
    stages_of = (3, 4, 5) if unit == "warpgroup" else (2, 3, 4)
    for block in blocks(conv, {"core": FMA_WARPS, "warp": PRODUCT_WARPS, "warpgroup": WARPGROUPS}[unit]):
        forms = [("Cuvc", output_tile) for output_tile in output_tiles(conv, block[1])] if plan.halo else _gathers(conv, plan)
        for (order, output_tile), slabs, stages in itertools.product(forms, (1, 2), stages_of):
            yield MultistageTile(product, *block, slabs, stages, order, *output_tile)


def space(conv: Conv2d, gpu: Gpu, windows: WindowSource, products: Sequence[str]) -> list[MultistageTile]:
    """Every legal tile with these kinds of arithmetic that is worth a trial, in a fixed order."""
    tiles = (tile for product in products for tile in _tiles(conv, product, windows))
    return [tile for tile in tiles if not violations(conv, tile, gpu, windows)]
