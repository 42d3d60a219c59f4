"""The search space of multistage kernels: legal tiles that obviously waste little, for the tuner to sample and the cost model to rank."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import MULTIPLIERS, PRODUCTS, SHARED_PRODUCTS
from im2win.schedules.cuda.legality.multistage import multiplier_violations, window_violations
from im2win.schedules.cuda.loaders import channel_planes, im2col_taps
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
SLABS = (1, 2)
STAGES = {"core": (2, 3, 4), "warp": (2, 3, 4), "warpgroup": (3, 4, 5)}
MOST_AHEAD = 3  # most steps that copies run ahead with these stages
MOST_PLANE_DEPTH = 64  # most elements of the sum in a step of channel planes
FEW_CHANNELS = 8  # most channels of a group for channel planes, which hold all of them
MAX_WASTE = 1.15  # most channels that a block computes, over those that exist


def products(conv: Conv2d, gpu: Gpu) -> list[str]:
    """The kinds of arithmetic for a problem's element type on a GPU. Tensor cores multiply all types but float32 in IEEE arithmetic."""
    fitting = ((name, one) for name, one in SHARED_PRODUCTS.items() if one.dtype == conv.dtype)
    return [name for name, one in fitting if gpu.warpgroups or one.unit != "warpgroup"]


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


def _orders(conv: Conv2d, plan: WindowSource) -> tuple[str, ...]:
    """The loop orders for copying windows tap by tap.

    Where a channel's taps are contiguous in memory, the order that copies them one after the other is among them.
    """
    together = bool(plan.axes) and conv.layout == "NCHW"
    return ("cuv", "uvc") if (_few(conv) or together) and conv.kernel != (1, 1) else ("uvc",)


def blocks(conv: Conv2d, warps: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(block_m, block_n, warp_m, warp_n) that waste few channels."""
    channels = conv.out_channels // conv.groups
    least = -(-channels // 16) * 16
    for (warp_m, warp_n), (across, down) in itertools.product(warps, WARPS):
        block_m = warp_m * across
        if block_m <= least and -(-channels // block_m) * block_m <= max(MAX_WASTE * channels, least):
            yield block_m, warp_n * down, warp_m, warp_n


def _few(conv: Conv2d) -> bool:
    return conv.in_channels // conv.groups <= FEW_CHANNELS


def most_depth(conv: Conv2d, windows: WindowSource) -> int:
    """Most elements of the sum that a step of any tile has."""
    return MOST_PLANE_DEPTH if windows.halo and _few(conv) else SLABS[-1] * MULTIPLIERS[conv.dtype].slab


def _plane_tiles(conv: Conv2d) -> Iterator[MultistageTile]:
    """Tiles with channel planes: for few channels, on CUDA cores."""
    total = channel_planes.rows(conv)
    counts = [rows for rows in range(1, total + 1) if total % rows == 0 and 6 <= rows * conv.kernel[1] <= MOST_PLANE_DEPTH]
    for block_m, block_n, warp_m, warp_n in blocks(conv, PLANE_WARPS):
        for output_tile, rows, stages in itertools.product(output_tiles(conv, block_n), counts, (2, 3)):
            if rows < total or stages == 2:
                yield MultistageTile("fma", block_m, block_n, warp_m, warp_n, rows, stages, "cuv", *output_tile)


def _tiles(conv: Conv2d, product: str, orders: Sequence[str]) -> Iterator[MultistageTile]:
    """Tiles that copy windows tap by tap in these loop orders; halo tiles if there are none."""
    halo, gathered = not orders, [(order, (0, 0, 0)) for order in orders]
    if halo and _few(conv):
        yield from _plane_tiles(conv) if product == "fma" else ()
        return
    unit = PRODUCTS[product].unit
    for block in blocks(conv, {"core": FMA_WARPS, "warp": PRODUCT_WARPS, "warpgroup": WARPGROUPS}[unit]):
        forms = [("Cuvc", output_tile) for output_tile in output_tiles(conv, block[1])] if halo else gathered
        for (order, output_tile), slabs, stages in itertools.product(forms, SLABS, STAGES[unit]):
            yield MultistageTile(product, *block, slabs, stages, order, *output_tile)


@functools.lru_cache(maxsize=16)  # schedules that differ in their source of windows have most tiles in common
def _multiplied(conv: Conv2d, gpu: Gpu, product: str, orders: tuple[str, ...]) -> tuple[MultistageTile, ...]:
    """`_tiles` that are legal as far as their windows do not matter."""
    return tuple(tile for tile in _tiles(conv, product, orders) if not multiplier_violations(conv, tile, gpu))


def space(conv: Conv2d, gpu: Gpu, windows: WindowSource, products: Sequence[str]) -> list[MultistageTile]:
    """Every legal tile with these kinds of arithmetic that is worth a trial, in a fixed order."""
    orders = () if windows.halo else _orders(conv, windows)
    tiles = [tile for product in products for tile in _multiplied(conv, gpu, product, orders)]
    fetched = [order for order in orders if im2col_taps.fetches(conv, order, windows)]
    tiles += [replace(tile, fetched=1) for tile in tiles if tile.order in fetched]
    return [tile for tile in tiles if not window_violations(conv, tile, gpu, windows)]
