"""The float64 reference that every kernel is checked against before it is timed."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16 by its name
import numpy as np
import numpy.typing as npt

from im2win.numerics.winograd_error import SPREAD
from im2win.spec import activations
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

Array = npt.NDArray[Any]
FLOAT8_SPREAD = 100.0  # standard deviation of random float8_e4m3fn outputs, some of which exceed its range of 448


def random_tensors(conv: Conv2d, seed: int) -> dict[str, Array]:
    """Normally distributed float32 tensors for every argument of a problem but its output, by name (see `Conv2d.arguments`)."""
    rng = np.random.default_rng(seed)
    shapes = {
        "data": conv.input_shape, "filter": conv.filter_shape, "bias": (conv.out_channels,), "scale": (conv.scales,),
        "residual": conv.output_shape,
    }  # fmt: skip
    return {name: rng.standard_normal(shapes[name], dtype=np.float32) for name in conv.arguments[:-1]}


def typed_tensors(conv: Conv2d, seed: int) -> dict[str, Array]:
    """Random tensors for every argument but the output, in the types of `Conv2d.dtypes`.

    They are normally distributed, integers with a standard deviation of 32 around the zero point; uint8 without a zero point are
    magnitudes. Scales make the spread of the outputs about the same, so that some outputs exceed the range of int8. float8_e4m3fn tensors
    have a standard deviation of 1, but outputs, bias and residual one of `FLOAT8_SPREAD` where outputs have this type, too.
    """
    made = {}
    for name, array in random_tensors(conv, seed).items():
        dtype, integers = conv.dtypes[name], ELEMENT_TYPES[conv.dtype].integer
        if ELEMENT_TYPES[conv.dtype].scaled:
            array = converted(array * np.float32(scaled_factor(conv, name)), dtype)
        elif name == "scale":
            array = array / np.float32(SPREAD * math.sqrt(math.prod(conv.filter_shape[1:])))
            array[conv.out_channels :] = step_numbers(conv)
        elif integers:
            limits = ELEMENT_TYPES[dtype].limits or (-127, 127)
            whole = np.rint(array * np.float32(SPREAD))
            whole = whole + np.float32(conv.zero_point) if name == "data" else whole
            array = np.clip(np.abs(whole) if dtype == "uint8" and not conv.zero_point else whole, *limits)
        made[name] = array.astype(dtype, copy=False)
    return made


def scaled_factor(conv: Conv2d, name: str) -> float:
    """The standard deviation of a random tensor of a float8_e4m3fn layer: see `typed_tensors`."""
    if name in ("data", "filter"):
        return 1.0
    spread = FLOAT8_SPREAD if ELEMENT_TYPES[conv.out_dtype].scaled else 1.0
    return spread / math.sqrt(math.prod(conv.filter_shape[1:])) if name == "scale" else spread


def converted(array: Array, dtype: str) -> Array:
    """float32 values in another floating-point type: rounded to nearest even, and saturated where the type has a largest value for that."""
    largest = ELEMENT_TYPES[dtype].largest
    with np.errstate(over="ignore"):  # large values become infinity
        return (np.clip(array, -largest, largest) if largest else array).astype(dtype)


def step_numbers(conv: Conv2d) -> Array:
    """Numbers for `Conv2d.own_steps`, with which some sums lie in the middle between two outputs; none for other problems."""
    return np.array([-125, 130, 0.8125, 0.4375, -1.75][: conv.scales - conv.out_channels], np.float32)


def reference(
    conv: Conv2d, x: Array, w: Array, bias: Array | None = None, residual: Array | None = None, scale: Array | None = None
) -> Array:
    """The convolution in float64, of `conv.output_shape`: one matrix product for each image and group, on a copy of the windows.

    A requantised output has the values of `conv.out_dtype`, computed by float32 operations as `Conv2d` defines them; an activation that
    rounds is rounded once.
    """
    planes = x if conv.layout == "NCHW" else x.transpose(0, 3, 1, 2)
    out_h, out_w = conv.output_size
    per_group, channels = conv.out_channels // conv.groups, conv.in_channels // conv.groups
    filters = w.astype(np.float64).reshape(conv.groups, per_group, -1)
    y = np.empty((conv.batch, conv.out_channels, out_h, out_w))
    top, left, bottom, right = conv.padding
    for n in range(conv.batch):
        padded = np.pad(planes[n].astype(np.float64) - conv.zero_point, ((0, 0), (top, bottom), (left, right)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, conv.window, axis=(1, 2))
        windows = windows[:, :: conv.stride[0], :: conv.stride[1], :: conv.dilation[0], :: conv.dilation[1]]
        for g in range(conv.groups):
            part = windows[g * channels : (g + 1) * channels].transpose(0, 3, 4, 1, 2).reshape(filters.shape[2], -1)
            y[n, g * per_group : (g + 1) * per_group] = (filters[g] @ part).reshape(per_group, out_h, out_w)
    if scale is not None and ELEMENT_TYPES[conv.dtype].scaled:
        return _requantised(conv, y.astype(np.float32), residual, scale, bias)
    if bias is not None:
        y += bias.astype(np.float64)[:, None, None]
    if scale is not None:
        return _requantised(conv, y.astype(np.float32), residual, scale)
    y = y if conv.layout == "NCHW" else y.transpose(0, 2, 3, 1)
    if residual is not None:
        y = y + residual
    return activations.reference(conv.activation, y)


def _requantised(conv: Conv2d, sums: Array, residual: Array | None, scale: Array, bias: Array | None = None) -> Array:
    """float32 [batch, out_channels, rows, columns] as values of the output's dtype, in float64. bias: what is added to scaled sums."""
    y = sums * scale.astype(np.float32)[: conv.out_channels, None, None]
    if bias is not None:
        y = y + bias.astype(np.float32)[:, None, None]
    y = y if conv.layout == "NCHW" else y.transpose(0, 2, 3, 1)
    if residual is not None and conv.own_steps:
        low, high, a, b, c = scale.astype(np.float32)[conv.out_channels :]
        y = np.clip(np.rint(y), low, high) * a + (residual.astype(np.float32) * b + c)
    elif residual is not None:
        y = y + residual.astype(np.float32)
    y = activations.reference(conv.activation, y.astype(np.float64)).astype(np.float32)
    if (limits := ELEMENT_TYPES[conv.out_dtype].limits) is not None:
        whole: Array = np.clip(np.rint(y).astype(np.float64) + conv.out_zero_point, *limits)
        return whole
    return converted(y, conv.out_dtype).astype(np.float64)


def error(y: Array, expected: Array) -> float:
    """Largest difference relative to the largest expected magnitude; NaN if y has a NaN."""
    scale = float(np.max(np.abs(expected))) or 1.0
    return float(np.max(np.abs(y - expected))) / scale
