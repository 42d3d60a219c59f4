"""Winograd's form in int8 in numpy, from its formula: what kernels must give to the last bit. Shares nothing with compute/ or src/."""

from __future__ import annotations

import numpy as np
from oracle import Array, Tensors

from im2win.spec.conv2d import Conv2d

BT = np.array([[-1, 0, 1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]])
G = np.array([[-1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
AT = np.array([[1, 1, 1, 0], [0, 1, -1, 1]])


def tiles(conv: Conv2d, x: Array) -> Array:
    """[batch, rows, columns, channels, 4, 4]: overlapping tiles of the padded input, zeros beyond."""
    top, left, _, _ = conv.padding
    rows, cols = (-(-extent // 2) for extent in conv.output_size)
    planes = x if conv.layout == "NCHW" else x.transpose(0, 3, 1, 2)
    whole = np.zeros((conv.batch, conv.in_channels, 2 * rows + 2 + conv.height, 2 * cols + 2 + conv.width), np.int64)
    whole[:, :, top : top + conv.height, left : left + conv.width] = planes
    found = [[whole[:, :, 2 * i : 2 * i + 4, 2 * j : 2 * j + 4] for j in range(cols)] for i in range(rows)]
    return np.array(found).transpose(2, 0, 1, 3, 4, 5)


def expected(conv: Conv2d, tensors: Tensors, scales: str = "channel") -> Array:
    """The output in int32: inputs in units of 4, filters in units of their largest magnitude / 127, sums times both in float32."""
    form = G @ tensors["filter"].astype(np.float64) @ G.T
    axes = {"tensor": (0, 1, 2, 3), "channel": (1, 2, 3)}[scales]
    scale = (np.abs(form).max(axis=axes, keepdims=True) / 127).astype(np.float32)
    u = np.rint(np.divide(form, scale, out=np.zeros_like(form), where=scale != 0))
    v = np.minimum(np.rint((BT @ tiles(conv, tensors["data"]) @ BT.T) / 4), 127)
    assert abs(u).max() <= 127 and v.min() >= -128
    sums = np.einsum("nyxcij,kcij->nyxkij", v.astype(np.int64), u.astype(np.int64), optimize=True)
    factors = np.broadcast_to(4 * scale[:, 0], (conv.out_channels, 1, 1))
    y = (AT @ sums @ AT.T).astype(np.float32) * factors
    whole = np.rint(y).astype(np.int32).transpose(0, 3, 1, 4, 2, 5)
    planes = whole.reshape(conv.batch, conv.out_channels, 2 * whole.shape[2], -1)[:, :, : conv.output_size[0], : conv.output_size[1]]
    if conv.bias:
        planes = planes + tensors["bias"][:, None, None]
    out = planes if conv.layout == "NCHW" else planes.transpose(0, 2, 3, 1)
    if conv.residual:
        out = out + tensors["residual"]
    return np.ascontiguousarray(np.maximum(out, 0) if conv.activation == "relu" else out)


def random_tensors(conv: Conv2d, seed: int, largest: bool = False) -> Tensors:
    """int8 inputs and filters over their whole range, or only its ends; int32 bias and residual."""
    rng = np.random.default_rng(seed)
    shapes = {"data": conv.input_shape, "filter": conv.filter_shape, "bias": (conv.out_channels,), "residual": conv.output_shape}

    def one(name: str) -> Array:
        if name not in ("data", "filter"):
            return rng.integers(-100000, 100000, shapes[name]).astype(np.int32)
        values = rng.choice([-128, 127], shapes[name]) if largest else rng.integers(-128, 128, shapes[name])
        return values.astype(np.int8)

    return {name: one(name) for name in conv.arguments[:-1]}
