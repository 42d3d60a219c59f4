"""Operations of activations as tensor expressions that LLVM vectorises: exp, tanh and erf by polynomials and their quotients.

A call of the C library would take one element at a time and ten times as long. Errors of float32 against float64, with eps = 2^-23:

- exp: relative, at most 1.5 eps, for arguments of -86.6 to 88. Beyond them the result stays at 2.5e-38 or 1.7e38.
- tanh: relative, at most 4 eps, everywhere; its magnitude is at most 1 + eps.
- erf: absolute, at most 4 eps, everywhere, and exactly 1 or -1 beyond 4 or -4.

NaN stays NaN: limits are the first operands of minima and maxima, whose comparison with NaN is false and gives the second operand.

Sources: exp reduces its argument as Cephes' expf does (Moshier); its polynomial is the minimax one of degree 6 with a constant of 1. The
quotients for tanh and erf are Eigen's (MathFunctionsImpl.h), in TVM `topi.fast_tanh` and `topi.fast_erf`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

Expr = Any

_EXP = (1.38436072e-3, 8.37419555e-3, 4.16680053e-2, 1.66664302e-1, 4.99999940e-1, 1.0, 1.0)
_ROUND = 12582912.0  # 1.5 * 2^23: a float32 of less than 2^22, added to it, becomes an integer in the lowest bits
_TANH = (
    (
        -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
        6.37261928875436e-04, 4.89352455891786e-03,
    ),
    (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)  # fmt: skip
_ERF = (
    (
        -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
        -2.95459980854025e-03, -1.60960333262415e-02,
    ),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02),
)  # fmt: skip


def _let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """body(value), with the value bound to a name: an expression that stands in several places would be compiled as often."""
    name = tirx.Var("t", "float32")
    return tirx.Let(name, value, body(name))


class TensorExpressions:
    """An `im2win.spec.arithmetic.Arithmetic` of TE expressions of float32."""

    def __init__(self, dtype: str = "float32") -> None:
        self._dtype = dtype

    def _const(self, value: Expr) -> Expr:
        return tirx.const(value, self._dtype) if isinstance(value, int | float) else value

    def max(self, value: Expr, other: Expr) -> Expr:
        return te.max(self._const(value), self._const(other))

    def min(self, value: Expr, other: Expr) -> Expr:
        return te.min(self._const(value), self._const(other))

    def exp(self, value: Expr) -> Expr:
        """2^n * e^r, where n is the integer nearest to value / ln 2 and |r| is at most ln 2 / 2. n is added to the exponent of e^r."""

        def of(value: Expr, rounded: Expr) -> Expr:
            n = rounded - self._const(_ROUND)
            r = value - n * self._const(0.693359375) - n * self._const(-2.12194440e-4)
            power = _let(r, lambda r: self._polynomial(_EXP, r))
            return tirx.reinterpret("float32", tirx.reinterpret("int32", power) + (tirx.reinterpret("int32", rounded) << 23))

        def limited(value: Expr) -> Expr:
            return _let(value * self._const(1.44269504088896341) + self._const(_ROUND), lambda rounded: of(value, rounded))

        return _let(self._within(value, -86.6, 88.0), limited)

    def tanh(self, value: Expr) -> Expr:
        """The quotient of an odd and an even polynomial."""
        return self._quotient(_TANH, self._within(value, -9.0, 9.0))

    def erf(self, value: Expr) -> Expr:
        """The quotient of an odd and an even polynomial."""
        four, one = self._const(4.0), self._const(1.0)
        inside = self._quotient(_ERF, self._within(value, -4.0, 4.0))
        return tirx.Select(value > four, one, tirx.Select(value < self._const(-4.0), self._const(-1.0), inside))

    def _within(self, value: Expr, least: float, most: float) -> Expr:
        return te.max(self._const(least), te.min(self._const(most), value))

    def _quotient(self, coefficients: Sequence[Sequence[float]], value: Expr) -> Expr:
        def of(value: Expr, square: Expr) -> Expr:
            over, under = (self._polynomial(one, square) for one in coefficients)
            return value * over / under

        return _let(value, lambda value: _let(value * value, lambda square: of(value, square)))

    def _polynomial(self, coefficients: Sequence[float], value: Expr) -> Expr:
        """A polynomial by Horner's scheme, the highest power's coefficient first."""
        total = self._const(coefficients[0])
        for one in coefficients[1:]:
            total = total * value + self._const(one)
        return total
