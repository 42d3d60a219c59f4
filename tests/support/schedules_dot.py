"""Tensors for problems in int8, uint8, bfloat16 and float16 whose outputs are exact."""

from __future__ import annotations

import numpy as np
from oracle import Tensors

from im2win.spec.conv2d import Conv2d

STEPS = [-1.75, -0.5, 0.25, 0.3, 0.75, 1.1, 1.25]
LIMITS = np.array([-100, 90, 0, 0, 0])  # added to the first two of the numbers of `Conv2d.own_steps`


def dot_tensors(conv: Conv2d, seed: int = 0) -> Tensors:
    """Integers over the whole range of an integer type, small ones stored as floats otherwise; scales that use the outputs' range."""
    rng = np.random.default_rng(seed)
    shapes = {"data": conv.input_shape, "filter": conv.filter_shape, "residual": conv.output_shape}
    limits = {"int8": (-128, 128), "uint8": (0, 256), "int32": (-5000, 5000)}
    tensors = {}
    for name in conv.arguments[:-1]:
        dtype, shape = conv.dtypes[name], shapes.get(name, (conv.out_channels,))
        if name == "scale":
            root = 40 * np.sqrt(np.prod(conv.filter_shape[1:]))
            tensors[name] = (rng.uniform(0.5, 2.0, shape) / root).astype(np.float32)
            if conv.own_steps:  # halves among the sums; limits that cut some of them off
                tensors[name] = np.append(tensors[name], rng.choice(STEPS, 5).astype(np.float32) + LIMITS).astype(np.float32)
        else:
            tensors[name] = rng.integers(*limits.get(dtype, (-4, 5)), shape).astype(dtype)
    return tensors
