"""Cost model of Winograd; the tuner begins with the tiles that it ranks first."""

from __future__ import annotations

import math
from dataclasses import replace

from im2win.device.gpu import Gpu
from im2win.numerics.winograd_tiling import Tiles, tiles_of
from im2win.schedules.cuda.kernels.multistage import product_of
from im2win.schedules.cuda.model import multistage
from im2win.schedules.cuda.model.multistage import L2_SHARE, LAUNCH_S, Estimate
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

DRAM_SHARE = 2 / 3  # of the bandwidth of memory that transforms reach: bands are short


def estimate(conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> Estimate:
    """The estimate for a legal tile.

    In bands it is the time of all bands' products and transforms, whose tensors pass through level-2 cache if a band fits in it, else
    through memory.
    """
    if tile.in_rows:
        return multistage.estimate(conv, tile, gpu, WindowSource())
    tiles = tiles_of(conv, tile.outputs, tile.band)
    return in_bands(conv, tiles, multistage.estimate(*product_of(conv, tile), gpu, WindowSource()), gpu)


def in_bands(conv: Conv2d, tiles: Tiles, one: Estimate, gpu: Gpu) -> Estimate:
    """The estimate of all bands' products and transforms, from that of one band's products."""
    bands = math.prod(tiles.bands)
    given, output = (math.prod(shape) * conv.itemsize for shape in (conv.input_shape, conv.output_shape))
    speed = gpu.l2_bytes_s if tiles.workspace_bytes <= L2_SHARE else gpu.dram_bytes_s
    transforms = bands * (tiles.workspace_bytes / speed + 2 * LAUNCH_S) + (given + output) / (DRAM_SHARE * gpu.dram_bytes_s)
    return replace(
        one, compute=bands * one.compute, cache=bands * one.cache, memory=bands * tiles.workspace_bytes / speed,
        transform=transforms + bands * LAUNCH_S,
    )  # fmt: skip
