"""What formulas that are written once are computed with: the operations they need, and float64 to compare the others with."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

Value = Any
"""What an `Arithmetic` computes with; it has the operators + - * / with itself and with Python's numbers."""
_ERF = np.frompyfunc(math.erf, 1, 1)


class Arithmetic(Protocol):
    """The operations that formulas need beside + - * /."""

    def max(self, value: Value, other: Value) -> Value: ...
    def min(self, value: Value, other: Value) -> Value: ...
    def exp(self, value: Value) -> Value: ...
    def library_exp(self, value: Value) -> Value: ...
    def tanh(self, value: Value) -> Value: ...
    def erf(self, value: Value) -> Value: ...


class Float64:
    """Numpy arrays of float64."""

    def max(self, value: Value, other: Value) -> Value:
        return np.maximum(value, other)

    def min(self, value: Value, other: Value) -> Value:
        return np.minimum(value, other)

    def exp(self, value: Value) -> Value:
        return np.exp(value)

    library_exp = exp

    def tanh(self, value: Value) -> Value:
        return np.tanh(value)

    def erf(self, value: Value) -> Value:
        return np.asarray(_ERF(value), np.float64)
