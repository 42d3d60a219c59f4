"""Split-K: several thread blocks compute one tile of the output, each for a part of the input channels."""

from __future__ import annotations

import math
from dataclasses import replace

from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d


def inner(tile: MultistageTile) -> MultistageTile:
    """The tile of one part's product."""
    return replace(tile, split=1)


def partial_sums(conv: Conv2d, tile: MultistageTile) -> int:
    """Number of stored accumulators of all parts, 4 bytes each."""
    return tile.split * math.prod(conv.output_shape)
