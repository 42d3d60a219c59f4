"""What two layers have in common: whether the tile of one may serve the other, and how near their sizes are."""

from __future__ import annotations

import math
from typing import Any

from im2win.spec.conv2d import Conv2d


def family(conv: Conv2d) -> tuple[Any, ...]:
    """What two layers must have in common so that the tile of one may serve the other."""
    return conv.kernel, conv.stride, conv.dilation, conv.layout, conv.dtype, conv.groups == 1


def distance(a: Conv2d, b: Conv2d) -> tuple[float, float]:
    """Distance of two layers in factors of 2: first of the sizes that shape the loops, then of batch and epilogue, which hardly matter."""
    ratios = a.in_channels / b.in_channels, a.out_channels / b.out_channels, a.height / b.height, a.width / b.width, a.groups / b.groups
    shape = sum(map(abs, map(math.log2, ratios)))
    if a.padding != b.padding:
        shape += 0.25 * sum(x != y for x, y in zip(a.padding, b.padding, strict=True))
    epilogue = (a.bias != b.bias) + (a.residual != b.residual) + (a.activation != b.activation) + (a.out_dtype != b.out_dtype)
    return shape, abs(math.log2(a.batch / b.batch)) + 0.25 * epilogue
