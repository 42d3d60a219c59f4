"""The arithmetic of quantised models, whatever framework they are from: how a convolution of real numbers becomes one of integers.

Models state what integers stand for: ``real = scale * (integer - zero)``. A convolution of two such tensors is, with a filter whose zero is
0,

    real y[k] = sx * sw[k] * (sum over (x - zx) * w  +  bias / (sx * sw[k]))

which a `Conv2d` of integers computes with the scale sx * sw[k], or with sx * sw[k] / sy where its outputs are quantised with scale sy. The
bias is rounded to a multiple of sx * sw[k], in which quantised models store it already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

_MOST_BIAS = 2**30  # leaves room for the sums in int32
_FINE = 256  # parts of an output's step, to which a convolution is rounded that no step of its own is stated for
_UNLIMITED = 3e38
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Steps:
    """What integers stand for: ``scale * (integer - zero)``; one value for all, or one for every index of an axis.

    Attributes:
        scale: float32, 1-D.
        zero: int64, 1-D, as many as scales, or one.
    """

    scale: Array
    zero: Array
    axis: int

    def along(self, array: Array, rank: int) -> Array:
        """Scales or zeros in a shape that broadcasts with the tensor."""
        return array if array.size == 1 else array.reshape([-1 if place == self.axis % rank else 1 for place in range(rank)])

    def shifted(self, stored: Array) -> Array:
        """Integers less their zeros, in int64."""
        return np.asarray(stored.astype(np.int64) - self.along(self.zero, stored.ndim))

    def real(self, stored: Array) -> Array:
        """What integers stand for, in float64."""
        return np.asarray(self.shifted(stored) * self.along(self.scale.astype(np.float64), max(stored.ndim, 1)))


def unit_of(data: Steps, filters: Steps, channels: int) -> Array | None:
    """What the sums of products count: the product of the scales, float32 [channels]. None unless all are finite and positive.

    Args:
        data: of the input, with one scale.
        filters: with one scale, or one for each of the output's channels.
    """
    unit = np.broadcast_to(data.scale * filters.scale, channels).astype(np.float32)
    return unit if bool(np.isfinite(unit).all() and (unit > 0).all()) else None


def fits_int8(stored: Array, steps: Steps) -> bool:
    """Whether filters less their zeros are int8."""
    shifted = steps.shifted(stored)
    return not shifted.size or bool(shifted.min() >= -128 and shifted.max() <= 127)


def fits_int32(bias: Array, unit: Array) -> bool:
    """Whether a bias of real numbers fits int32 in these units, with room for the sums."""
    return bool(np.abs(np.broadcast_to(bias.reshape(-1), unit.shape) / unit).max() < _MOST_BIAS)


def in_units(bias: Array, unit: Array) -> Array:
    """A bias of real numbers in int32, in these units."""
    return np.rint(np.broadcast_to(bias.reshape(-1), unit.shape) / unit).astype(np.int32)


def requantised(conv: Conv2d, unit: Array, step: float, zero: int, dtype: str, before: int | None = None) -> tuple[Conv2d, Array] | None:
    """A convolution of integers whose outputs are quantised, with its float32 scale; None if no `Conv2d` computes that.

    Args:
        conv: with integer operands and the activation and residual of the real convolution.
        unit: see `unit_of`.
        step, zero, dtype: of the outputs: ``real = step * (integer - zero)``.
        before: zero of the integers that are added as the residual, which have the same step and type; None without a residual.
    """
    activation = _left_of(conv.activation, float(step), zero, dtype) if before is None else conv.activation
    if before is not None:
        if activation not in ("none", "relu") or (before and activation != "none"):
            return None
        zero -= before
    limits = ELEMENT_TYPES[dtype].limits
    assert limits is not None
    scale = (unit / np.float32(step)).astype(np.float32)
    if activation is None or not limits[0] <= zero <= limits[1] or not np.isfinite(scale).all():
        return None
    return conv.with_(out_dtype=dtype, out_zero_point=zero, activation=activation), scale


@dataclass(frozen=True)
class Step:
    """How one tensor is quantised: ``real = step * (integer - zero)``."""

    step: float
    zero: int
    dtype: str

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest integer."""
        found = ELEMENT_TYPES[self.dtype].limits
        assert found is not None, self.dtype
        return found


def added(conv: Conv2d, unit: Array, out: Step, residual: Step, own: Step | None = None) -> tuple[Conv2d, Array] | None:
    """A convolution of integers plus a residual with quantisation steps of its own (`Conv2d.own_steps`), quantised in those of the output.

    Args:
        conv: with integer operands, a residual, and the activation behind the addition.
        unit: see `unit_of`.
        own: the steps that the convolution itself is quantised in before the addition; None if it is added as it is.

    Returns:
        The problem and its float32 scales; None if no `Conv2d` computes that.
    """
    activation = _left_of(conv.activation, out.step, out.zero, out.dtype)
    scale = scales_of_sum(unit, out, residual, own)
    if activation is None or residual.dtype != out.dtype or not np.isfinite(scale).all():
        return None
    return conv.with_(out_dtype=out.dtype, out_zero_point=out.zero, activation=activation, own_steps=True), scale


def scales_of_sum(unit: Array, out: Step, residual: Step, own: Step | None = None) -> Array:
    """The scales of `added`, with the numbers that follow them."""
    step, low, high = out.step / _FINE, -_UNLIMITED, _UNLIMITED
    if own is not None:
        step, (low, high) = own.step, (float(limit - own.zero) for limit in own.limits)
    ratio = np.float32(residual.step) / np.float32(out.step)
    numbers = [low, high, np.float32(step) / np.float32(out.step), ratio, -residual.zero * ratio]
    return np.concatenate([unit / np.float32(step), np.array(numbers)]).astype(np.float32)


def _left_of(word: str, step: float, zero: int, dtype: str) -> str | None:
    """The activation that is left of one before outputs are quantised, whose saturation does the rest; None if it is none of `Conv2d`'s."""
    limits = ELEMENT_TYPES[dtype].limits
    assert limits is not None
    if word == "relu6" and round(6 / step) + zero >= limits[1]:
        word = "relu"
    if word == "relu":
        return "none" if zero == limits[0] else "relu"
    return "none" if word == "none" else None
