"""Taps that fall into the padding: how many there are, and whether a layer has so many that kernels leave them out."""

from __future__ import annotations

import functools
from typing import Any

from im2win.spec.conv2d import Conv2d

MOST_NEEDED = {False: 0.75, True: 0.95}  # dilated or not: share of multiplications that are not by zero, above which all are done


def skips(conv: Conv2d) -> bool:
    """Whether register tiles leave out taps that fall into the padding."""
    return needed(conv) <= MOST_NEEDED[conv.dilation != (1, 1)]


def needed(conv: Conv2d) -> float:
    """Share of a layer's multiplications that are not by zero."""
    return multiplied(conv, 0, 1) * multiplied(conv, 1, 1)


@functools.lru_cache(maxsize=4096)
def multiplied(conv: Conv2d, axis: int, extent: int) -> float:
    """Share of the kernel's rows (axis 0) or columns (axis 1) that tiles of `extent` neighbouring outputs multiply, on average."""
    return sum(reached for reached, _ in _taps(conv, axis, extent)) / len(_taps(conv, axis, extent))


@functools.lru_cache(maxsize=4096)
def whole(conv: Conv2d, axis: int, extent: int) -> float:
    """Share of these rows or columns that lie inside the input for all outputs of their tile."""
    return sum(inside for _, inside in _taps(conv, axis, extent)) / max(sum(reached for reached, _ in _taps(conv, axis, extent)), 1)


def _taps(conv: Conv2d, axis: int, extent: int) -> list[tuple[bool, bool]]:
    """For every tile and tap: whether it lies inside the input for an output of the tile, and whether for all."""
    size, outputs = (conv.height, conv.width)[axis], conv.output_size[axis]
    found = []
    for start in range(0, outputs, extent):
        for tap in range(conv.kernel[axis]):
            least, most = read_place(conv, axis, start, tap), read_place(conv, axis, min(start + extent, outputs) - 1, tap)
            found.append((least < size and most >= 0, least >= 0 and most < size))
    return found


def read_place(conv: Conv2d, axis: int, output: Any, tap: Any) -> Any:
    """The row or column of the input that an output reads with a tap."""
    return output * conv.stride[axis] + tap * conv.dilation[axis] - conv.padding[axis]
