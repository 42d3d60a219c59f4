"""Tensors of integer problems that show what random ones hide, as numpy arrays in the types of `Conv2d.dtypes`.

Random tensors of integers (`numerics.reference.typed_tensors`) are normally distributed with a standard deviation of 32. Sums of them
seldom leave the range of 16 bits, and requantised outputs are the same for some hundred sums in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from im2win.numerics.reference import Array, step_numbers
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

UNIT_SPREAD = 64.0  # standard deviation of the sums of `unit_tensors`, about
SMALL, LARGE = 32, 5000  # largest magnitudes of other integers: of bias and residual

Make = Callable[[Conv2d, int], dict[str, Array]]


def unit_tensors(conv: Conv2d, seed: int) -> dict[str, Array]:
    """Tensors of a requantised problem in which one unit of a sum shows in its output.

    Inputs and weights are small integers, so that sums have a standard deviation of about `UNIT_SPREAD`, and scales lie between 1 and 3 on
    either side of 0. Some are multiples of a half: products then lie in the middle between two integers, and show how a kernel rounds.
    """
    rng = np.random.default_rng([seed, 1])
    most = max(1, round(math.sqrt(3 * UNIT_SPREAD / math.sqrt(math.prod(conv.filter_shape[1:])))))
    halves = rng.integers(2, 6, conv.out_channels) / 2
    scale = np.where(rng.random(conv.out_channels) < 0.5, halves, rng.uniform(1, 3, conv.out_channels))
    scale *= rng.choice([-1, 1], conv.out_channels)
    return _filled(conv, rng, scale, lambda limits: (-most, most), SMALL)


def range_tensors(conv: Conv2d, seed: int) -> dict[str, Array]:
    """Tensors of an integer problem over the whole range of their types, so that sums need 32 bits; outputs exceed the range of int8."""
    rng = np.random.default_rng([seed, 2])
    scale = rng.uniform(0.5, 2.0, conv.out_channels) / (40 * math.sqrt(math.prod(conv.filter_shape[1:])))
    return _filled(conv, rng, scale, lambda limits: limits, LARGE)


def _filled(
    conv: Conv2d, rng: np.random.Generator, scale: Array, reach: Callable[[tuple[int, int]], tuple[int, int]], others: int
) -> dict[str, Array]:
    """Integers for every argument but the output: inputs and weights within a range, around the zero point; others up to `others`."""
    shapes = {"data": conv.input_shape, "filter": conv.filter_shape, "residual": conv.output_shape}
    made: dict[str, Any] = {}
    for name in conv.arguments[:-1]:
        dtype, shape = conv.dtypes[name], shapes.get(name, (conv.out_channels,))
        limits = ELEMENT_TYPES[dtype].limits
        if name == "scale":
            made[name] = np.concatenate([scale.astype(dtype), step_numbers(conv)])
            continue
        low, high = reach(limits) if name in ("data", "filter") and limits is not None else (-others, others)
        centre = conv.zero_point if name == "data" and (low, high) != limits else 0
        values = rng.integers(low, high + 1, shape) + centre
        made[name] = (values if limits is None else np.clip(values, *limits)).astype(dtype)
    return made


def special(conv: Conv2d) -> dict[str, Make]:
    """What a problem's kernels are checked with beside random tensors, by what it is; nothing for floating-point types."""
    if not ELEMENT_TYPES[conv.dtype].integer:
        return {}
    made: dict[str, Make] = {"values of the whole range": range_tensors}
    return made | {"scales near 1": unit_tensors} if conv.requantised else made
