"""PyTorch's computation of a convolution with its epilogue, the problem that it is, and its parameters with the normalisation folded in."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from im2win.spec.activations import torch_function
from im2win.spec.conv2d import Conv2d, ConvError
from im2win.spec.dtypes import EXCHANGED

Tensor = torch.Tensor
Maybe = Tensor | None
Parameters = tuple[Tensor, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]
"""weight, bias, and of the normalisation scale, shift, mean, variance and counter.

counter: `num_batches_tracked`. Nothing computes with it; but training writes mean and variance without PyTorch counting that as a change of
theirs, and counts batches here.
"""

DTYPES = {getattr(torch, name): name for name in EXCHANGED}

_functional = torch.nn.functional
_function = functools.cache(torch_function)


def symmetric(x: Tensor, padding: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    """x padded with what PyTorch's convolution cannot pad itself, and the symmetric padding that remains."""
    top, left, bottom, right = padding
    if (top, left) == (bottom, right):
        return x, (top, left)
    return _functional.pad(x, (left, right, top, bottom)), (0, 0)


def reference(
    x: Tensor, parameters: Parameters, residual: Tensor | None, eps: float, stride: Any, padding: Any, dilation: Any, groups: int,
    activation: str,
) -> Tensor:  # fmt: skip
    """The same function in PyTorch's own differentiable operators."""
    weight, bias, scale, shift, mean, variance, _ = parameters
    padded, sides = symmetric(x, padding)
    y = torch.conv2d(padded, weight, bias, stride, sides, dilation, groups)
    if mean is not None:
        y = _functional.batch_norm(y, mean, variance, scale, shift, False, 0.0, eps)
    return activate(activation, y if residual is None else y + residual)


def activate(name: str, y: Tensor) -> Tensor:
    """Applies an activation, given by its word in the key of a problem."""
    y = _function(name)(y)
    return y


def alike(residual: Tensor, shape: Any, x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the residual has the output's shape, x's device and the output's type, which is x's if None."""
    return residual.shape == shape and residual.dtype is (dtype or x.dtype) and residual.device == x.device


def memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """The output's memory format: channels-last if x or the weight is, as for PyTorch's convolution."""
    return torch.channels_last if is_channels_last(x) or is_channels_last(weight) else torch.contiguous_format


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the strides are those of channels-last memory, or of a part of it, even where a size is 1."""
    _, channels, height, width = tensor.shape
    batch_stride, channel_stride, row_stride, column_stride = tensor.stride()
    if channel_stride < 1 or column_stride < channel_stride * channels or channels == height == width == 1:
        return False
    return row_stride >= column_stride * width and batch_stride >= row_stride * height


def problem(
    x: Tensor, parameters: Parameters, residual: bool, stride: Any, padding: Any, dilation: Any, groups: int, activation: str
) -> Conv2d:
    """The problem of a call.

    Raises:
        ConvError: im2win does not support it; the message says why.
    """
    weight, bias, mean = parameters[0], parameters[1], parameters[4]
    if x.dim() != 4:
        raise ConvError("the input has no batch axis")
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ConvError(f"input and filters are {_plain(x.dtype)} and {_plain(weight.dtype)}, not both {' or '.join(DTYPES.values())}")
    if x.device != weight.device or x.device.type not in ("cpu", "cuda"):
        raise ConvError(f"input and filters are on {x.device} and {weight.device}, not both on the CPU or on one GPU")
    batch, channels, height, width = x.shape
    layout = "NHWC" if memory_format(x, weight) == torch.channels_last else "NCHW"
    return Conv2d(
        batch, channels, height, width, weight.shape[0], tuple(weight.shape[2:]), stride, padding, dilation, groups, DTYPES[x.dtype],
        layout, bias is not None or mean is not None, residual, activation,
    )  # fmt: skip


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def folded(parameters: Parameters, eps: float) -> tuple[Tensor, Tensor | None]:
    """Filters and bias with the normalisation folded in, computed in float64, of the weight's type."""
    weight, bias, scale, shift, mean, variance = (None if one is None else one.detach() for one in parameters[:6])
    assert weight is not None
    if mean is None or variance is None:
        return weight, bias
    factor = 1 / torch.sqrt(variance.double() + eps)
    if scale is not None:
        factor = factor * scale.double()
    offset = ((0 if bias is None else bias.double()) - mean.double()) * factor
    if shift is not None:
        offset = offset + shift.double()
    return (weight.double() * factor[:, None, None, None]).to(weight.dtype), offset.to(weight.dtype)
