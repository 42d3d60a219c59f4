"""Tensors of problems that requantise, and what kernels must make of them."""

from __future__ import annotations

import numpy as np
from oracle import Array, Tensors, exact_tensors, oracle

from im2win.spec.conv2d import Conv2d

# halves and quarters make ties, large ones values beyond int8, 0.1 what float32 rounds; half of them are negative
_SCALES = (0.5, -0.5, 3.0, -3.0, 0.25, -0.1, 0.1, -1.5)


def tensors(conv: Conv2d, seed: int = 0) -> Tensors:
    """Integers of the problem's types, scales in turn."""
    made = {name: array.astype(conv.dtypes[name]) for name, array in exact_tensors(conv, seed).items()}
    made["scale"] = np.resize(np.array(_SCALES, np.float32), conv.out_channels)
    return made


def right(conv: Conv2d, given: Tensors) -> Array:
    """The oracle's outputs, in the output's type."""
    return oracle(conv, **given).astype(conv.out_dtype)
