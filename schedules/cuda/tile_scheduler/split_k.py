"""Split-K: thread blocks share the sum over channels of a tile of the output, each its part of it."""

from __future__ import annotations

import math
from dataclasses import replace

from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d


def inner(tile: MultistageTile) -> MultistageTile:
    """The tile of each part's product."""
    return replace(tile, split=1)


def partial_sums(conv: Conv2d, tile: MultistageTile) -> int:
    """Accumulators of all parts that are stored, elements of 4 bytes."""
    return tile.split * math.prod(conv.output_shape)
