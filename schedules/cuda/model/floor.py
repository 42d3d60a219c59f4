"""Floors of the cost models: times that no tile is estimated below, so that ranking can pass over a whole schedule.

A floor counts what every tile has: the instructions of the products, shared by all multiprocessors; the latency of one block's steps, which
follow one another; input, stored windows and output in memory. It leaves out all waste. Its terms are those of the models in this package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.schedules.cuda.model.multistage import (
    CACHE_SHARE,
    COPY_LATENCY,
    GROUP_CYCLES,
    PRODUCT_CYCLES,
    SCHEDULERS,
    Estimate,
    traffic_of,
)
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

ROUNDING = 1e-9  # share by which floors are lower: their terms are rounded in another order than those of estimates


def product_cycles(conv: Conv2d, gpu: Gpu, product: str) -> float:
    """Cycles in which all multiprocessors multiply a problem's elements, without the other instructions."""
    one = PRODUCTS[product]
    products = math.prod(conv.output_shape) * math.prod(conv.filter_shape[1:]) * (3 if one.parts == 2 else 1)
    of_warp, of_warpgroup = PRODUCT_CYCLES.get(product, 0.0), SCHEDULERS * GROUP_CYCLES
    each = {"core": 1 / 32, "warp": 2 * of_warp / (16 * 8 * one.slab), "warpgroup": 2 * of_warpgroup / (64 * one.slab)}
    return products * each[one.unit] / (SCHEDULERS * gpu.multiprocessors)


def multistage(conv: Conv2d, gpu: Gpu, plan: WindowSource, products: Iterable[str], ahead: int, depth: int) -> Estimate:
    """An estimate that is at most that of any tile of the multistage kernels, in each of its times.

    Args:
        products: the kinds of arithmetic of the tiles.
        ahead, depth: most steps that a tile's copies run ahead, and most elements of the sum that a step has.
    """
    traffic = traffic_of(conv, plan)
    latency = traffic.parts * -(-math.prod(conv.filter_shape[1:]) // depth) * COPY_LATENCY / ahead
    busy = min((product_cycles(conv, gpu, product) for product in products), default=0.0)
    return Estimate(
        compute=max(busy, latency) / gpu.clock_hz,
        cache=CACHE_SHARE * 1.2 * conv.output_bytes / gpu.l2_bytes_s,
        memory=traffic.memory(conv.output_bytes, gpu),
        transform=traffic.transform(gpu),
        occupancy=0,
        shared_bytes=0,
    )


def persistent(conv: Conv2d, gpu: Gpu, product: str, begin: int) -> Estimate:
    """The same for persistent kernels whose halo tiles TMA copies, and which take `begin` cycles before and after all work."""
    return Estimate(
        compute=(begin + product_cycles(conv, gpu, product)) / gpu.clock_hz,
        cache=0.0,
        memory=(least_read(conv) + conv.output_bytes) / gpu.dram_bytes_s,
        transform=0.0,
        occupancy=0,
        shared_bytes=0,
    )


def least_read(conv: Conv2d) -> float:
    """Least number of bytes of the input that is read where TMA copies halo tiles: with channels first 1x1 kernels may leave out rows."""
    skipping = conv.layout == "NCHW" and conv.kernel == (1, 1) and not any(conv.padding)
    rows = conv.output_size[0] if skipping else conv.height
    return math.prod(conv.input_shape) * conv.itemsize * rows / conv.height


def seconds(estimates: Iterable[Estimate]) -> float:
    """The floor of a schedule whose tiles are each above one of these estimates; infinite for a schedule without tiles."""
    return min((one.seconds for one in estimates), default=math.inf) * (1 - ROUNDING)
