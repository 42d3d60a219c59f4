"""The operations that formulas written once are evaluated with, and their float64 implementation as the reference."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

Value = Any
"""What an `Arithmetic` computes with; it has the operators + - * / with itself and with Python's numbers."""
_ERF = np.frompyfunc(math.erf, 1, 1)


class Arithmetic(Protocol):
    """The operations that formulas need in addition to + - * /."""

    def max(self, value: Value, other: Value) -> Value: ...
    def min(self, value: Value, other: Value) -> Value: ...
    def exp(self, value: Value) -> Value: ...
    def tanh(self, value: Value) -> Value: ...
    def erf(self, value: Value) -> Value: ...


class Float64:
    """The operations on numpy arrays of float64."""

    def max(self, value: Value, other: Value) -> Value:
        return np.maximum(value, other)

    def min(self, value: Value, other: Value) -> Value:
        return np.minimum(value, other)

    def exp(self, value: Value) -> Value:
        return np.exp(value)

    def tanh(self, value: Value) -> Value:
        return np.tanh(value)

    def erf(self, value: Value) -> Value:
        return np.asarray(_ERF(value), np.float64)
