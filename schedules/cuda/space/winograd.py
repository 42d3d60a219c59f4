"""The search space of Winograd."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from im2win.compute.lowered import oriented, transform_bytes
from im2win.device.gpu import Gpu
from im2win.numerics.winograd_tiling import forms, row_forms, row_problem, tiles_of
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.schedules.cuda.legality.winograd import violations
from im2win.schedules.cuda.space import multistage
from im2win.schedules.cuda.space.multistage import FEW_CHANNELS, blocks, output_tiles
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

ROW_WARPGROUPS = ((64, 64), (48, 64), (32, 64), (32, 128), (16, 128), (40, 64))
BANDS = (32, 128, 512)  # MiB: what level-2 cache holds, and more, with fewer launches


def space(conv: Conv2d, gpu: Gpu, products: Sequence[str]) -> list[MultistageTile]:
    """Every legal tile with these kinds of arithmetic that is worth a trial, in a fixed order."""
    rows = [tile for tile in _row_tiles(conv, products) if not violations(conv, tile, gpu)]
    return [*rows, *_band_tiles(conv, gpu, products)]


def _row_tiles(conv: Conv2d, products: Sequence[str]) -> Iterator[MultistageTile]:
    """Tiles along rows. A warpgroup has accumulators for every column of a Winograd tile, so that it takes fewer channels."""
    few = conv.in_channels // conv.groups <= FEW_CHANNELS
    for product, outputs in itertools.product(products, () if few else row_forms(conv)):
        for block in blocks(conv, ROW_WARPGROUPS) if PRODUCTS[product].unit == "warpgroup" else ():
            for output_tile, slabs, stages in itertools.product(output_tiles(row_problem(conv, outputs), block[1]), (1, 2), (3, 4, 5)):
                yield MultistageTile(product, *block, slabs, stages, "Cuvc", *output_tile, outputs=outputs)


def _band_tiles(conv: Conv2d, gpu: Gpu, products: Sequence[str]) -> Iterator[MultistageTile]:
    """Tiles in bands: those of the product of transformed tiles, with every band that differs.

    No band is larger than im2win's tensor, unless all bands are. Six outputs a side leave no room for errors beside float32's own, so that
    they need exact arithmetic. A single TF32 product is never used: the transforms would amplify its error.
    """
    most = transform_bytes(conv, oriented("ncmku", conv.layout))
    exact = [product for product in products if PRODUCTS[product].accuracy == "exact"]
    accurate = [product for product in products if PRODUCTS[product].accuracy != "tf32"]
    for outputs in forms(conv):
        least = tiles_of(conv, outputs, BANDS[0])
        cut = {band: tiles_of(conv, outputs, band) for band in reversed(BANDS)}
        bands = {tiles: band for band, tiles in cut.items() if tiles == least or tiles.workspace_bytes <= most}
        problem = next(iter(bands)).problem
        for tile in multistage.space(problem, gpu, WindowSource(), accurate if outputs <= 4 else exact):
            yield from (replace(tile, outputs=outputs, band=band) for band in bands.values())
