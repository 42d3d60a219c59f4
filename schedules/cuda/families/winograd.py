"""Winograd convolution: bands of transformed tiles and their products, or one kernel that transforms rows as it loads them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from im2win.device.gpu import Gpu
from im2win.numerics.winograd_tiling import FORMS, ROW_TAPS, forms, refusal, row_forms, row_problem, tiles_of
from im2win.schedules.cuda.families.multistage import MultistageTiles, least, products
from im2win.schedules.cuda.kernels.multistage import product_kernel
from im2win.schedules.cuda.kernels.winograd_bands import winograd_kernel, winograd_transform
from im2win.schedules.cuda.legality.winograd import ROWS, violations
from im2win.schedules.cuda.model import floor
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.model.winograd import estimate, in_bands
from im2win.schedules.cuda.space.winograd import BANDS, space
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL, TRANSFORM_PARTS


@dataclass(frozen=True)
class WinogradBands(MultistageTiles):
    """Schedules of `MultistageTile`s with `outputs` > 0: in bands, or along rows where the tile also has `rows` and `cols`."""

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem with that accuracy; None if one does."""
        return refusal(conv, accuracy)

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the smallest band's workspace; 0 for kernels that are not square, which only tiles along rows compute."""
        down, across = conv.kernel
        return min(tiles_of(conv, outputs, 0).workspace_bytes for outputs in FORMS[down]) if down == across and down in FORMS else 0

    def workspace_bytes(self, conv: Conv2d, tile: MultistageTile) -> int:
        """Bytes of a band's transformed tiles and products; 0 along rows."""
        return 0 if tile.in_rows else tiles_of(conv, tile.outputs, tile.band).workspace_bytes

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[MultistageTile]:
        """Every legal tile worth a trial, in a fixed order."""
        return space(conv, gpu, products(conv, gpu, accuracy))

    def violations(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""
        return violations(conv, tile, gpu)

    def estimate(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> Estimate:
        """The cost model's estimate for a legal tile."""
        return estimate(conv, tile, gpu)

    def floor(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> float:
        """Seconds that no tile of the space is estimated below."""
        kinds = products(conv, gpu, accuracy)
        found = [least(row_problem(conv, outputs), gpu, ROWS, kinds, outputs + ROW_TAPS - 1) for outputs in row_forms(conv)]
        for tiles in {tiles_of(conv, outputs, band) for outputs, band in itertools.product(forms(conv), BANDS)}:
            found.append(in_bands(conv, tiles, least(tiles.problem, gpu, WindowSource(), kinds), gpu))
        return floor.seconds(found)

    def kernels(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> dict[str, Any]:
        """Along rows one kernel. In bands the whole convolution, and the input transforms by themselves for measuring."""
        if tile.in_rows:
            return {SYMBOL: product_kernel(conv, tile, ROWS, SYMBOL)}
        return {SYMBOL: winograd_kernel(conv, tile, SYMBOL), TRANSFORM_PARTS: winograd_transform(conv, tile, TRANSFORM_PARTS)}
