"""What a conv call site of a quantised module computes: the integers of its filters, what they stand for, and how outputs are quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from im2win.frontends.quantisation import Array, Step, Steps, added, fits_int8, fits_int32, in_units, requantised, scales_of_sum, unit_of
from im2win.frontends.torch.plain import Parameters, Tensor, is_channels_last
from im2win.frontends.torch.source import Slot, Source
from im2win.spec.conv2d import Conv2d, ConvError

INTEGERS = {torch.int8: "int8", torch.uint8: "uint8", torch.qint8: "int8", torch.quint8: "uint8"}
"""The types of quantised tensors: plain integers, and PyTorch's own that hold their scale and zero point."""


@dataclass(frozen=True)
class Quantised:
    """How outputs are quantised: ``real = step * (integer - zero)``.

    Attributes:
        residual: how the integers of the residual are quantised, in the same type; None without a residual of integers.
    """

    step: float
    zero: int
    dtype: str
    residual: Step | None = None

    def applied(self, conv: Conv2d, unit: Array) -> Conv2d | None:
        """A convolution of integers whose outputs are quantised so; None if no `Conv2d` computes that.

        Args:
            conv, unit: see `im2win.frontends.quantisation.requantised`.
        """
        made = None
        if self.residual is None or self.residual.step == self.step:
            zero = None if self.residual is None else self.residual.zero
            made = requantised(conv, unit, self.step, self.zero, self.dtype, zero)
        if made is None and self.residual is not None:
            made = added(conv, unit, self._own, self.residual)
        return None if made is None else made[0]

    def scale(self, conv: Conv2d, unit: Array) -> Array:
        """The float32 scale of what `applied` returns."""
        if conv.own_steps and self.residual is not None:
            return scales_of_sum(unit, self._own, self.residual)
        return np.asarray((unit / np.float32(self.step)).astype(np.float32))

    @property
    def _own(self) -> Step:
        return Step(self.step, self.zero, self.dtype)


@dataclass(frozen=True)
class Filters:
    """Filters of integers, what they stand for, and the bias in real numbers."""

    stored: Array
    steps: Steps
    bias: Array | None

    def packed(self, data: Steps) -> tuple[Array, Array | None, Array]:
        """Filters in int8, bias in int32, and what the sums of products count, float32 [out_channels].

        Args:
            data: what the integers of the input stand for.

        Raises:
            ConvError: im2win cannot compute with them.
        """
        unit = unit_of(data, self.steps, len(self.stored))
        if unit is None:
            raise ConvError("its scales are not finite and positive")
        if not fits_int8(self.stored, self.steps):
            raise ConvError("its filters less their zero points are not int8")
        if self.bias is not None and not fits_int32(self.bias, unit):
            raise ConvError("its bias is no int32 in units of its scales")
        weight = np.ascontiguousarray(self.steps.shifted(self.stored).astype(np.int8))
        return weight, None if self.bias is None else in_units(self.bias, unit), unit


@dataclass(eq=False, kw_only=True)
class IntegerSource(Source):
    """A convolution of integers.

    Attributes:
        data: what the integers of the input stand for.
        read: reads the current filters and bias.
        run: what the module itself runs: (x, residual) -> output.
        text: the same in words.
        held: the tensors that `read` reads, the filters first; none for PyTorch's quantised modules, which keep them packed.
        state: what tells changes of what is not held: an object that a change replaces, then how outputs are quantised.
        out: how outputs are quantised; None where they are float32.
        whole: whether tensors are PyTorch's quantised ones, which hold scale and zero point, and have channels last.
    """

    data: Steps
    read: Callable[[], Filters]
    run: Callable[[Tensor, Tensor | None], Any]
    text: str = ""
    held: tuple[Slot, ...] = ()
    state: Callable[[], tuple[Any, ...]] = tuple
    out: Quantised | None = None
    whole: bool = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the parameters that are tensors, the filters first."""
        return self.held

    @property
    def fused(self) -> tuple[str, ...]:
        """What is fused into the convolution's kernel, in order."""
        return (*super().fused, *(("quantize",) if self.out is not None else ()))

    def parameters(self) -> Parameters:
        """The current filters and what else is held; of the filters the shape and memory format count."""
        weight, *rest = (slot() for slot in (self.held or (self.weight,)))
        return weight, *rest  # type: ignore[return-value]

    def problem(self, shape: Any, dtype: torch.dtype, *, channels_last: bool) -> Conv2d:
        """The problem for an input.

        Raises:
            ConvError: im2win does not support it; the message says why.
        """
        filters = self.read()
        _, bias, unit = filters.packed(self.data)
        if dtype not in INTEGERS or len(shape) != 4:
            raise ConvError(f"its input is {str(dtype).removeprefix('torch.')} of {len(shape)} dimensions, not int8 or uint8 of four")
        batch, channels, height, width = shape
        layout = "NHWC" if channels_last or self.whole else "NCHW"
        real = Conv2d(
            batch, channels, height, width, len(filters.stored), tuple(filters.stored.shape[2:]), self.stride, self.padding,
            self.dilation, self.groups, "float32", layout, bias is not None, self.residual, self.activation,
        )  # fmt: skip
        conv = real.with_(dtype=INTEGERS[dtype], out_dtype="float32", zero_point=int(self.data.zero[0]))
        if self.out is None:
            return conv
        made = self.out.applied(conv, unit)
        if made is None:
            raise ConvError(f"{self.activation} before the outputs are quantised is none that integers have")
        return made

    def problem_of(self, x: Tensor, weight: Tensor) -> Conv2d:
        """As `problem`, for a tensor."""
        if x.device.type != "cpu":
            raise ConvError(f"its input is on {x.device}; quantised modules run on the CPU")
        return self.problem(x.shape, x.dtype, channels_last=x.dim() == 4 and (is_channels_last(x) or is_channels_last(weight)))

    def operands(self, conv: Conv2d) -> tuple[Array, Array | None, Array]:
        """Filters, bias and scale, as `im2win.runtime.op.Op.bind` takes them.

        Args:
            conv: the `problem`.

        Raises:
            ConvError: the current parameters are none that im2win can compute with.
        """
        weight, bias, unit = self.read().packed(self.data)
        return weight, bias, unit if self.out is None else self.out.scale(conv, unit)
