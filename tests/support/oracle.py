"""The oracle: convolution in float64 numpy, written tap by tap from the formula, sharing nothing with compute/ or `numerics.reference`.

    y[n, j, m, x] = act(sum over c, u, v of (I[n, g*C + c, m*s + u*d - top, x*s + v*d - left] - zero point) * w[j, c, u, v]
                        + bias[j] + residual[n, j, m, x])

with zeros outside the input; with a scale, and every step in float32,

    y = convert(act(float32(sum + bias[j]) * scale[j] + float32(residual[n, j, m, x]))),

where int8 and uint8 round halves to even, add the output's zero point, and have nothing beyond their ends. With float8_e4m3fn inputs the
bias is added to scaled sums, and outputs of this type have nothing beyond 448 and -448. For small integers every sum is
exact in float32 as well, so kernels must *equal* it; `exact_tensors` makes such inputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

# Integers of -4 to 4: a sum of up to 2**20 products stays below 2**24, where float32 still has every integer.
_SMALL = 4


def oracle(
    conv: Conv2d, data: Array, filter: Array, bias: Array | None = None, residual: Array | None = None, scale: Array | None = None
) -> Array:
    """The exact output in float64, of `conv.output_shape`, from tensors named as in `conv.arguments`."""
    images = np.asarray(data, np.float64) - conv.zero_point
    if conv.layout == "NHWC":
        images = np.moveaxis(images, 3, 1)
    top, left, bottom, right = conv.padding
    field = np.zeros((conv.batch, conv.in_channels, conv.height + top + bottom, conv.width + left + right))
    field[:, :, top : top + conv.height, left : left + conv.width] = images
    rows = (field.shape[2] - (conv.kernel[0] - 1) * conv.dilation[0] - 1) // conv.stride[0] + 1
    cols = (field.shape[3] - (conv.kernel[1] - 1) * conv.dilation[1] - 1) // conv.stride[1] + 1
    sums = np.zeros((conv.batch, conv.out_channels, rows, cols))
    channels, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    for group in range(conv.groups):
        part = field[:, group * channels : (group + 1) * channels]
        ours = slice(group * filters, (group + 1) * filters)
        for u in range(conv.kernel[0]):
            for v in range(conv.kernel[1]):
                y0, x0 = u * conv.dilation[0], v * conv.dilation[1]
                seen = part[:, :, y0 : y0 + (rows - 1) * conv.stride[0] + 1 : conv.stride[0]]
                seen = seen[:, :, :, x0 : x0 + (cols - 1) * conv.stride[1] + 1 : conv.stride[1]]
                sums[:, ours] += np.einsum("ncmx,jc->njmx", seen, np.asarray(filter[ours, :, u, v], np.float64))
    late = conv.dtype == "float8_e4m3fn"
    if bias is not None and not late:
        sums += np.asarray(bias, np.float64).reshape(1, -1, 1, 1)
    if scale is not None:
        channels = np.asarray(scale, np.float32)[: conv.out_channels].reshape(1, -1, 1, 1)
        sums = np.multiply(sums.astype(np.float32), channels, dtype=np.float32)
    if bias is not None and late:
        sums = np.add(sums, np.asarray(bias, np.float32).reshape(1, -1, 1, 1), dtype=np.float32)
    if conv.layout == "NHWC":
        sums = np.moveaxis(sums, 1, 3)
    if residual is not None and conv.own_steps:
        sums = _in_steps(sums, residual, np.asarray(scale, np.float32)[conv.out_channels :])
    elif residual is not None:
        sums = np.add(sums, np.asarray(residual, sums.dtype), dtype=sums.dtype)
    y = activated(conv.activation, sums)
    return y if scale is None else _converted(y, conv.out_dtype, conv.out_zero_point)


def _in_steps(sums: Array, residual: Array, numbers: Array) -> Array:
    """A convolution and a residual with quantisation steps of their own, in those of the output."""
    low, high, a, b, c = numbers
    lower, rest = np.floor(sums), sums - np.floor(sums)
    whole = lower + ((rest > 0.5) | ((rest == 0.5) & (lower % 2 != 0)))
    inside = np.where(whole < low, low, np.where(whole > high, high, whole)).astype(np.float32)
    other = np.add(np.multiply(residual, b, dtype=np.float32), c, dtype=np.float32)
    return np.add(np.multiply(inside, a, dtype=np.float32), other, dtype=np.float32)


def _converted(y: Array, dtype: str, zero_point: int) -> Array:
    if dtype not in ("int8", "uint8"):
        y = np.minimum(np.maximum(y, -448), 448) if dtype == "float8_e4m3fn" else y
        with np.errstate(over="ignore"):  # to infinity
            return y.astype(dtype).astype(np.float64)
    lower = np.floor(y.astype(np.float64))
    rest = y - lower
    up = (rest > 0.5) | ((rest == 0.5) & (lower % 2 != 0))
    least, most = (-128, 127) if dtype == "int8" else (0, 255)
    return np.minimum(np.maximum(lower + up + zero_point, least), most)


_ACTIVATIONS: dict[str, Any] = {
    "none": lambda y: y,
    "relu": lambda y: np.where(y > 0, y, 0.0),
    "relu6": lambda y: np.where(y > 6, 6.0, np.where(y > 0, y, 0.0)),
    "silu": lambda y: y * (1 + np.tanh(y / 2)) / 2,  # y * sigmoid(y), in the form that cannot overflow
    "leaky_relu": lambda y, slope: np.where(y > 0, y, slope * y),
    "sigmoid": lambda y: (1 + np.tanh(y / 2)) / 2,
    "tanh": np.tanh,
    "hardsigmoid": lambda y: np.where(y > 3, 1.0, np.where(y > -3, (y + 3) / 6, 0.0)),
    "hardswish": lambda y: np.where(y > 3, y, np.where(y > -3, y * (y + 3) / 6, 0.0)),
    "gelu": np.vectorize(lambda y: y * math.erfc(-y / math.sqrt(2)) / 2, otypes=[float]),
    "gelu_tanh": lambda y: y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) / 2,
}


def activated(word: str, y: Array) -> Array:
    """An activation of float64, by its word in the key of a problem."""
    name = word.rstrip("0123456789.") if word not in _ACTIVATIONS else word
    return np.ascontiguousarray(_ACTIVATIONS[name](y, *([float(word.removeprefix(name))] if word != name else [])))


def _shapes(conv: Conv2d) -> dict[str, tuple[int, ...]]:
    shapes = {
        "data": conv.input_shape, "filter": conv.filter_shape, "bias": (conv.out_channels,), "scale": (conv.scales,),
        "residual": conv.output_shape,
    }  # fmt: skip
    return {name: shapes[name] for name in conv.arguments[:-1]}


def exact_tensors(conv: Conv2d, seed: int = 0) -> Tensors:
    """Small integers stored as float32 for every argument but the output; no zeros among them, so that a lost product always shows."""
    rng = np.random.default_rng(seed)
    signs = (-1.0, 1.0)
    return {
        name: (rng.integers(1, _SMALL + 1, shape) * rng.choice(signs, shape)).astype(np.float32) for name, shape in _shapes(conv).items()
    }


def integers(conv: Conv2d) -> tuple[Array, Array, Array]:
    """x, w and the exact output of a problem without an epilogue."""
    tensors = exact_tensors(conv)
    return tensors["data"], tensors["filter"], oracle(conv, **tensors)


def normal_tensors(conv: Conv2d, seed: int = 0) -> Tensors:
    """Normally distributed float32 for every argument but the output."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in _shapes(conv).items()}


def assert_equal(conv: Conv2d, y: Array, expected: Array) -> None:
    """Every element equal, NaN nowhere; the message shows the first element that differs."""
    assert y.shape == expected.shape == conv.output_shape and y.dtype == np.float32, f"{y.dtype} {y.shape}, not float32 {expected.shape}"
    wrong = ~(y == expected)  # NaN is unequal to everything
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(f"{conv}: {wrong.sum()} of {y.size} outputs differ, the first at {first}: {y[first]}, not {expected[first]}")


def assert_close(conv: Conv2d, y: Array, expected: Array, tolerance: float) -> None:
    """Largest error at most `tolerance` times the largest expected value (or 1); NaN fails."""
    assert y.shape == expected.shape == conv.output_shape and y.dtype == np.float32, f"{y.dtype} {y.shape}, not float32 {expected.shape}"
    error = float(np.max(np.abs(y - expected))) / max(float(np.max(np.abs(expected))), 1.0)
    assert error <= tolerance, f"{conv}: relative error {error:.3g} is above {tolerance:.3g}"
