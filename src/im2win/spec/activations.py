"""The table of activations that a kernel can apply in its epilogue, one row each.

A row's `formula` is written once over an `Arithmetic`, which is numpy's float64 (the reference), tensor expressions (CPU kernels) or CUDA.
The other columns are facts that the rest of the package needs. A new activation is one row here, and one line in the tests' oracle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.spec.arithmetic import Arithmetic, Float64, Value

PARAMETER = "the activation's parameter"
"""Stands in an `Operator` for an argument that may have any value that the parameter may have."""


@dataclass(frozen=True)
class Parameter:
    """A number that an activation takes: a float32 that is at least `least` and below `below`."""

    name: str
    default: float
    least: float
    below: float

    def __contains__(self, value: float) -> bool:
        return self.least <= value < self.below


@dataclass(frozen=True)
class Operator:
    """A function of another framework that is an activation if its arguments have certain values.

    Attributes:
        arguments: by name, in the order in which they may be given: (value, default); a value may be `PARAMETER`.
        module: PyTorch's module with the same arguments.
        since: ONNX operator set that introduced it.
    """

    name: str
    arguments: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    module: str = ""
    since: int = 1

    def parameters(self, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        """The activation's parameters (one or none) for a call with these arguments; None if the call is another function."""
        found = []
        for name, (value, default) in self.arguments.items():
            actual = given.get(name, default)
            if value is PARAMETER and isinstance(actual, int | float):
                found.append(float(actual))
            elif isinstance(value, str) or not isinstance(actual, int | float):
                if value != actual:
                    return None
            elif not math.isclose(actual, value, rel_tol=1e-6):
                return None
        return tuple(found)

    def called(self, parameters: tuple[float, ...]) -> dict[str, Any]:
        """The arguments of a call that computes the activation with these parameters (one or none)."""
        return {name: parameters[0] if value is PARAMETER else value for name, (value, _) in self.arguments.items()}


Step = tuple[Any, ...]
"""An ONNX node to write: its operator, then inputs: `INPUT`, a number, or another `Step`."""
INPUT = "the activation's input"


@dataclass(frozen=True)
class Activation:
    """A row of the table.

    Attributes:
        name: in the key of a problem, before the parameter's value if there is one.
        formula: (arithmetic, y) or (arithmetic, y, parameter) -> activated y. No finite y gives NaN.
        torch: functions of torch.nn.functional, torch and aten that compute it; the first one is called.
        onnx: single operators that compute it.
        written: how it is written to ONNX if no operator computes it, or if few runtimes support the operator.
        integers: it maps integers to integers, so it may follow int32 sums.
        int8_outputs: it may precede requantisation to int8.
        rounds: it rounds even where sums are exact.
        bound: the largest output, if there is one.
        slope: the steepest slope, by which errors of sums grow or shrink.
        derivative: derivative with respect to its argument as a function of the output (and the parameter); without it, gradients compute
            the sum again.
    """

    name: str
    formula: Callable[..., Value]
    torch: tuple[Operator, ...]
    onnx: tuple[Operator, ...] = ()
    written: Step | None = None
    parameter: Parameter | None = None
    integers: bool = False
    int8_outputs: bool = False
    rounds: bool = True
    bound: float | None = None
    slope: float = 1.0
    derivative: Callable[..., Any] | None = None

    @property
    def squashes(self) -> bool:
        """Whether outputs are at most 1 for sums of any size. Errors are then relative to 1 instead of the sums."""
        return self.bound is not None and self.bound <= 1

    def key(self, *parameters: float) -> str | None:
        """The word in a problem's key, ``leaky_relu0.1``; None for parameters that are not allowed."""
        if self.parameter is None:
            return None if parameters else self.name
        value = np.float32(parameters[0] if parameters else self.parameter.default)
        written = np.format_float_positional(value, trim="-")
        return f"{self.name}{written}" if float(written) in self.parameter else None


def _none(a: Arithmetic, y: Value) -> Value:
    return y


def _relu(a: Arithmetic, y: Value) -> Value:
    return a.max(y, 0)


def _relu6(a: Arithmetic, y: Value) -> Value:
    return a.min(a.max(y, 0), 6)


def _silu(a: Arithmetic, y: Value) -> Value:
    return y / (1 + a.exp(0 - y))


def _leaky_relu(a: Arithmetic, y: Value, slope: float) -> Value:
    return a.max(y, slope * y)


def _sigmoid(a: Arithmetic, y: Value) -> Value:
    return 1.0 / (1.0 + a.exp(0.0 - y))


def _tanh(a: Arithmetic, y: Value) -> Value:
    return a.tanh(y)


def _hardsigmoid(a: Arithmetic, y: Value) -> Value:
    return a.min(1.0, a.max(0.0, y * (1 / 6) + 0.5))


def _hardswish(a: Arithmetic, y: Value) -> Value:
    return y * (a.min(6.0, a.max(0.0, y + 3.0)) * (1 / 6))


def _gelu(a: Arithmetic, y: Value) -> Value:
    return y * (0.5 + 0.5 * a.erf(y * math.sqrt(0.5)))


def _gelu_tanh(a: Arithmetic, y: Value) -> Value:
    """y / 2 * (1 + tanh(u)) is y / (1 + exp(-2 u)), for u = sqrt(2 / pi) * (y + 0.044715 y^3)."""
    twice = 2 * math.sqrt(2 / math.pi)
    return y / (1.0 + a.exp(y * (-twice - twice * 0.044715 * (y * y))))


ACTIVATIONS: dict[str, Activation] = {
    row.name: row
    for row in (
        Activation("none", _none, (), integers=True, int8_outputs=True, rounds=False),
        Activation(
            "relu", _relu, (Operator("relu", module="ReLU"),), (Operator("Relu"),), integers=True, int8_outputs=True, rounds=False,
            derivative=lambda y: y > 0,
        ),
        Activation(
            "relu6", _relu6,
            (
                Operator("relu6", module="ReLU6"),
                Operator("hardtanh", {"min_val": (0, -1.0), "max_val": (6, 1.0)}, module="Hardtanh"),
                Operator("clamp", {"min": (0, None), "max": (6, None)}),
            ),
            written=("Clip", INPUT, 0.0, 6.0), integers=True, rounds=False, bound=6.0, derivative=lambda y: (y > 0) & (y < 6),
        ),
        Activation(
            "silu", _silu, (Operator("silu", module="SiLU"),), (Operator("Swish", {"alpha": (1.0, 1.0)}, since=24),),
            written=("Mul", INPUT, ("Sigmoid", INPUT)),
        ),
        Activation(
            "leaky_relu", _leaky_relu, (Operator("leaky_relu", {"negative_slope": (PARAMETER, 0.01)}, module="LeakyReLU"),),
            (Operator("LeakyRelu", {"alpha": (PARAMETER, 0.01)}),), parameter=Parameter("slope", 0.01, 1e-6, 1.0),
            derivative=lambda y, slope: (y > 0) * (1 - slope) + slope,
        ),
        Activation(
            "sigmoid", _sigmoid, (Operator("sigmoid", module="Sigmoid"),), (Operator("Sigmoid"),), bound=1.0, slope=0.25,
            derivative=lambda y: y * (1 - y),
        ),
        Activation("tanh", _tanh, (Operator("tanh", module="Tanh"),), (Operator("Tanh"),), bound=1.0, derivative=lambda y: 1 - y * y),
        Activation(
            "hardsigmoid", _hardsigmoid, (Operator("hardsigmoid", module="Hardsigmoid"),),
            (Operator("HardSigmoid", {"alpha": (1 / 6, 0.2), "beta": (0.5, 0.5)}),), bound=1.0, slope=1 / 6,
            derivative=lambda y: ((y > 0) & (y < 1)) * (1 / 6),
        ),
        Activation("hardswish", _hardswish, (Operator("hardswish", module="Hardswish"),), (Operator("HardSwish", since=14),)),
        Activation(
            "gelu", _gelu, (Operator("gelu", {"approximate": ("none", "none")}, module="GELU"),),
            (Operator("Gelu", {"approximate": ("none", "none")}, since=20),),
        ),
        Activation(
            "gelu_tanh", _gelu_tanh, (Operator("gelu", {"approximate": ("tanh", "none")}, module="GELU"),),
            (Operator("Gelu", {"approximate": ("tanh", "none")}, since=20),),
        ),
    )
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def found(word: str) -> tuple[Activation, tuple[float, ...]] | None:
    """The row and the parameters (one or none) that a key's word names, allowed or not; None if it names no activation."""
    if word in ACTIVATIONS:
        row = ACTIVATIONS[word]
        return row, () if row.parameter is None else (row.parameter.default,)
    for row in ACTIVATIONS.values():
        number = word.removeprefix(row.name)
        if row.parameter is not None and number != word and number.replace(".", "", 1).isdecimal():
            return row, (float(number),)
    return None


def activation_of(word: str) -> Activation:
    """The row of a word that names an activation."""
    named = found(word)
    assert named is not None, word
    return named[0]


def checked(word: str) -> str:
    """The word in canonical form: ``leaky_relu`` becomes ``leaky_relu0.01``.

    Raises:
        ValueError: it names no activation, or its parameter is not allowed; the message is the rule.
    """
    named = found(word) if isinstance(word, str) else None
    if named is None:
        raise ValueError("one of " + ", ".join(ACTIVATIONS))
    row, parameters = named
    if (key := row.key(*parameters)) is None:
        limits = row.parameter
        assert limits is not None
        least = np.format_float_positional(limits.least)
        raise ValueError(f"{row.name} with a {limits.name} of at least {least} and below {limits.below:g}, as in {row.key()}")
    return key


def apply(word: str, arithmetic: Arithmetic, y: Value) -> Value:
    """Applies an activation to a value, in an arithmetic."""
    named = found(word)
    assert named is not None, word
    row, parameters = named
    return row.formula(arithmetic, y, *parameters)


def reference(word: str, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Applies an activation to a float64 array."""
    with np.errstate(over="ignore"):  # an exponential may become infinity, whose inverse is zero
        return np.ascontiguousarray(apply(word, Float64(), y))


def derivative(word: str, y: Any) -> Any:
    """The derivative of an activation with respect to its argument, computed from its output y, for rows that define it."""
    named = found(word)
    assert named is not None and named[0].derivative is not None, word
    return named[0].derivative(y, *named[1])


def of_onnx(operator: str, stated: Mapping[str, Any]) -> tuple[Activation, tuple[float, ...]] | None:
    """The row and the parameters of an ONNX operator with these attributes; None if the operator alone is no activation."""
    stated = {name: one.decode() if isinstance(one, bytes) else one for name, one in stated.items()}
    for row in ACTIVATIONS.values():
        for one in row.onnx:
            if one.name == operator and (parameters := one.parameters(stated)) is not None:
                return row, parameters
    return None


def torch_function(word: str, *, inplace: bool = False) -> Callable[[Any], Any]:
    """PyTorch's function for an activation of a tensor, in place if `inplace` and if PyTorch has such a function."""
    import torch

    named = found(word)
    assert named is not None, word
    row, parameters = named
    if not row.torch:
        return lambda y: y
    operator = row.torch[0]
    written = getattr(torch, f"{operator.name}_", None) or getattr(torch.nn.functional, f"{operator.name}_", None)
    if inplace and written is not None:
        return functools.partial(written, **operator.called(parameters))
    extra = {"inplace": True} if inplace and hasattr(getattr(torch.nn, operator.module)(), "inplace") else {}
    function = getattr(torch, operator.name, None) or getattr(torch.nn.functional, operator.name)
    return functools.partial(function, **operator.called(parameters), **extra)
