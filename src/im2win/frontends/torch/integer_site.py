"""A conv call site of a quantised module, and what PyTorch has to compute the same with integers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from im2win.frontends.torch.bound import Bound, note
from im2win.frontends.torch.call_site import CallSite, autocast_to, by_place, dispatches, needs_grad
from im2win.frontends.torch.integers import IntegerSource
from im2win.frontends.torch.plain import Parameters, Tensor, alike
from im2win.frontends.torch.planning import Decision
from im2win.frontends.torch.source import OwnPath
from im2win.runtime.op import Op
from im2win.spec.activations import activation_of
from im2win.spec.conv2d import Conv2d, ConvError
from im2win.spec.dtypes import ELEMENT_TYPES

ONEDNN = "onednn.qconv2d_pointwise"
_ATTRIBUTES: dict[str, tuple[str, list[float]]] = {
    "none": ("none", []), "relu": ("relu", []), "relu6": ("hardtanh", [0.0, 6.0]), "hardswish": ("hardswish", []), "silu": ("swish", []),
}  # fmt: skip
"""Activations by the names and numbers that oneDNN's operator takes."""
_MOST_APART = 0.02  # share of the outputs that may be rounded to the other side; with more, they are compared in float64
_REAL = 1e-4  # error of float32 outputs over the largest one, beside the rounding of the bias


class IntegerBound(Bound):
    """As `Bound`, for filters of integers with what they stand for.

    Args:
        source: reads them.
    """

    def __init__(self, name: str, op: Op, source: IntegerSource) -> None:
        super().__init__(name, op, 0.0)
        self._source, self._state = source, source.state()
        self._known = False

    def __deepcopy__(self, memo: Any) -> IntegerBound:
        return IntegerBound(self.name, self.op, copy.deepcopy(self._source, memo))

    def fresh(self, given: Any, addresses: tuple[int, ...] | None = None) -> bool:
        """Whether these are the bound parameters, unchanged."""
        if self._source.whole:
            return self._known and _same(self._source.state(), self._state)
        return super().fresh(given, addresses)

    def refresh(self, parameters: Parameters, *, force: bool = False) -> None:
        """Packs the filters again if they have changed, or always with `force`.

        Raises:
            ConvError: the current ones are none that im2win can compute with, or outputs are quantised in another way than before.
        """
        state = self._source.state()
        if state[1:] != self._state[1:]:
            raise ConvError("its outputs are quantised in another way than on the example")
        super().refresh(parameters, force=force or not _same(state, self._state))
        self._state, self._known = state, True

    def _folded(self, parameters: Parameters) -> tuple[Any, ...]:
        weight, bias, scale = self._source.operands(self.op.conv)
        return torch.from_numpy(weight), bias, scale

    def _empty(self, x: Tensor) -> Tensor:
        out = self._source.out
        if not self._source.whole or out is None:
            return super()._empty(x)
        y: Tensor = torch._empty_affine_quantized(
            self.output_shape, scale=out.step, zero_point=out.zero, dtype=x.dtype, memory_format=torch.channels_last
        )
        return y

    def remember(self) -> None:
        """Lets later calls bypass Python; those with PyTorch's quantised tensors cannot."""
        if not self._source.whole:
            super().remember()


@dataclass(eq=False)
class IntegerSite(CallSite):
    """A conv call site of integers.

    Exporters, tracers, dispatch modes, autocast, function transforms and gradients see what the module itself runs, and so does
    `torch.compile` where tensors are PyTorch's quantised ones.
    """

    source: IntegerSource

    @property
    def out_dtype(self) -> str:
        """The type of the outputs."""
        return "float32" if self.source.out is None else self.source.out.dtype

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The output. `residual` is required where the source adds one, refused elsewhere."""
        if torch.compiler.is_compiling() and (self.source.whole or not by_place()):
            return self._own(x, residual)
        return super().__call__(x, residual)

    def now(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The output of a call that no compiler traces."""
        return self.general(x, residual) if self.source.whole else super().now(x, residual)

    def general(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The output of a call that is not remembered, or not plain."""
        given = [table[name] for table, name in self._present]
        plain = not torch.compiler.is_compiling() and type(x) is Tensor and autocast_to(x) is None and not dispatches()
        if not plain or forward_ad._current_level >= 0 or (torch.is_grad_enabled() and self._differentiable(residual, given)):
            return self._own(x, residual)
        return self.run(x, residual, given)

    def run(self, x: Tensor, residual: Tensor | None, given: list[Tensor]) -> Tensor:
        """The path of a plain call."""
        if self.source.whole and (x.q_scale() != self._scale or x.q_zero_point() != self.source.data.zero[0]):
            return self._own(x, residual)
        try:
            return super().run(x, residual, given)
        except ConvError as error:
            note(f"{self.name} {error}", f"{self.name}: {error}: PyTorch computes it")
            return self._own(x, residual)

    @property
    def _scale(self) -> float:
        return float(self.source.data.scale[0])

    def _differentiable(self, residual: Tensor | None, given: list[Tensor]) -> bool:
        return self.source.out is None and needs_grad(residual, *given)

    def _own(self, x: Tensor, residual: Tensor | None) -> Tensor:
        y: Tensor = self.source.run(x, residual)
        return y

    def _plain(self, x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
        return self._own(x, residual)

    def _problem(self, x: Tensor, parameters: Parameters) -> Conv2d:
        return self.source.problem_of(x, parameters[0])

    def _adds(self, residual: Tensor | None, shape: Any, x: Tensor) -> bool:
        return residual is None or alike(residual, shape, x, getattr(torch, self.out_dtype))

    def _bound(self, decision: Decision) -> Bound:
        assert decision.op is not None
        return IntegerBound(decision.name, decision.op, self.source)

    def _rival(self, conv: Conv2d, x: Tensor, residual: Tensor | None) -> OwnPath | None:
        return None if self.source.whole else onednn(self.source, x, residual)

    def _compare(self, conv: Conv2d, x: Tensor, residual: Tensor | None, parameters: Parameters, y: Tensor) -> tuple[float, float]:
        """The error on this input against PyTorch, and the tolerance.

        Of quantised outputs the error is in their range of values: one step, to which PyTorch's float32 may round where integers do not, is
        allowed. Of float32 outputs it is relative to the largest; the bias is rounded to a multiple of the product of the scales.
        """
        got = self.run(x, residual, [table[name] for table, name in self._present])
        _, _, unit = self.source.read().packed(self.source.data)
        if self.source.out is None:
            largest = float(y.abs().max()) or 1.0
            rounding = 0.6 * float(unit.max()) if conv.bias else 0.0
            return float((got - y).abs().max()) / largest, _REAL + activation_of(conv.activation).slope * rounding / largest
        limits = ELEMENT_TYPES[self.source.out.dtype].limits
        assert limits is not None
        span = limits[1] - limits[0]
        apart = (_integers(got) - _integers(y)).abs()
        if float((apart > 0).float().mean()) <= _MOST_APART:
            return float(apart.max()) / span, 1.0 / span
        allowed = (0.501 + 0.5 * float((unit / self.source.out.step).max())) / span
        return float((_integers(got) - self._exact(conv, x, residual).clamp(*limits)).abs().max()) / span, allowed

    def _exact(self, conv: Conv2d, x: Tensor, residual: Tensor | None) -> Tensor:
        """Quantised outputs before they are rounded, in float64."""
        s, out, filters = self.source, self.source.out, self.source.read()
        assert out is not None
        real = torch.from_numpy(filters.steps.real(filters.stored))
        bias = None if filters.bias is None else torch.from_numpy(filters.bias)
        top, left, bottom, right = s.padding
        data = (_integers(x).double() - float(s.data.zero[0])) * float(s.data.scale[0])
        sums = torch.conv2d(torch.nn.functional.pad(data, (left, right, top, bottom)), real, bias, s.stride, 0, s.dilation, s.groups)
        if residual is not None:
            step, zero = (out.step, 0) if out.residual is None else (out.residual.step, out.residual.zero)
            sums = sums + (_integers(residual).double() - float(zero)) * step
        relu = s.activation == "relu6" or s.activation == "relu"
        sums = sums.clamp(0, 6 if s.activation == "relu6" else None) if relu else sums
        return sums / out.step + out.zero


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether what is not held is unchanged: the object is the same one, and the numbers are equal."""
    return one[1:] == other[1:] and all(a is b for a, b in zip(one[:1], other[:1], strict=True))


def _integers(x: Tensor) -> Tensor:
    """The integers of a tensor in int32."""
    return (x.int_repr() if x.is_quantized else x).int()


def onednn(source: IntegerSource, x: Tensor, residual: Tensor | None) -> OwnPath | None:
    """What `torch.compile` makes of a convolution of integers with its epilogue; None where PyTorch has no such operator for it.

    Tensors have channels last, as they have in compiled programs between such operators.
    """
    packet = getattr(torch.ops.onednn, "qconv2d_pointwise", None)
    top, left, bottom, right = source.padding
    if packet is None or source.activation not in _ATTRIBUTES or (top, left) != (bottom, right):
        return None
    filters, out = source.read(), source.out
    if filters.steps.zero.any():
        return None
    channels = len(filters.stored)
    scales = torch.from_numpy(filters.steps.scale).expand(channels).contiguous()
    bias = None if filters.bias is None else torch.from_numpy(filters.bias).float()
    step, zero = float(source.data.scale[0]), int(source.data.zero[0])
    numbers = [*source.stride], [top, left], [*source.dilation], source.groups
    attribute, parameters = _ATTRIBUTES[source.activation]
    kind = torch.float32 if out is None else getattr(torch, out.dtype)
    to = (1.0, 0) if out is None else (out.step, out.zero)
    try:
        packed = torch.ops.onednn.qconv_prepack(torch.from_numpy(filters.stored), scales, step, zero, *numbers, list(x.shape))
        data, zeros = x.contiguous(memory_format=torch.channels_last), torch.zeros(channels, dtype=torch.int64)
        before = data, step, zero, packed, scales, zeros
        run: Callable[[Tensor, Tensor | None], Any]
        if residual is None:

            def run(x: Tensor, residual: Tensor | None) -> Any:
                return packet.default(*before, bias, *numbers, *to, kind, attribute, parameters, "")
        else:
            sums = residual.clone(memory_format=torch.channels_last)
            of_sum = (1.0, 0) if out is None or out.residual is None else (out.residual.step, out.residual.zero)

            def run(x: Tensor, residual: Tensor | None) -> Any:
                return packet.binary(*before, sums, bias, *numbers, *to, kind, *of_sum, "sum", 1.0, attribute, parameters, "")

        run(x, residual)
    except (RuntimeError, TypeError, AttributeError):  # PyTorch without oneDNN, or of a version with other arguments
        return None
    return OwnPath(run, f"{ONEDNN} {attribute}{'' if residual is None else ' sum'} {kind} {to}")
