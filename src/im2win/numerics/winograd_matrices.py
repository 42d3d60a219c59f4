"""Winograd's minimal filtering F(m, r): transform matrices from interpolation points as exact rationals, and their rounding errors.

    y = A^T [(G g) * (B^T d)]        d: m + r - 1 inputs, g: r taps, y: m outputs, y[i] = sum over k of g[k] * d[i + k]
    Y = A^T [(G g G^T) * (B^T d B)] A        the same in two dimensions

It needs m + r - 1 products instead of m * r (Winograd, Arithmetic Complexity of Computations, 1980; Lavin and Gray, arXiv 1509.09308). The
matrices are those of Toom and Cook, transposed: two polynomials are multiplied by their values at m + r - 2 points and infinity, and the
correlation is the transpose of that product. With N_i = product over j != i of (a_i - a_j),

    A^T[k][i] = a_i^k        G[i][k] = a_i^k / N_i        B^T[i][k]: coefficient k of the product over j != i of (x - a_j)

and for infinity the highest power alone. The choice of points determines how much rounding is amplified (Barabasz et al., arXiv
1803.10986).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.numerics.matvec_program import dyadic

Matrix = tuple[tuple[Fraction, ...], ...]
Array = npt.NDArray[Any]

# Found by search over 0, pairs of opposite fractions and at most one more, all up to 4 with denominators up to 4: the least `noise` with
# three taps. Such fractions multiply exactly in binary, and opposite points share most of a transform's operations.
_BEST_POINTS = {
    1: "0",
    2: "0 1",
    3: "0 1 -1",
    4: "0 3/2 -3/2 1/2",
    5: "0 3/4 -3/4 3/2 -3/2",
    6: "0 1/2 -1/2 1 -1 15/4",
    7: "0 1/2 -1/2 1 -1 2 -2",
    8: "0 3/4 -3/4 5/4 -5/4 2 -2 1/4",
    9: "0 1/2 -1/2 3/4 -3/4 5/4 -5/4 5/2 -5/2",
}
_MORE_POINTS = ("1", "-1", "7/4", "-7/4", "1/4", "-1/4", "4")
_LARGEST = 16  # points: with more, the rounding error exceeds float64's precision


class WinogradError(ValueError):
    """Sizes or points that define no transform. The message names the argument, its value and the rule."""


@dataclass(frozen=True)
class Transform:
    """The matrices of F(m, r) for m outputs and r taps; t = m + r - 1.

    Attributes:
        points: the t - 1 finite points; infinity is the last one.
        at, g, bt: A^T [m][t], G [t][r] and B^T [t][t]. Entries of A^T and B^T have power-of-two denominators, so floats hold them exactly;
            the remaining factors are in G, which is applied ahead of time.
    """

    outputs: int
    taps: int
    points: tuple[Fraction, ...]
    at: Matrix
    g: Matrix
    bt: Matrix

    @property
    def size(self) -> int:
        """Inputs of a tile, which is also the number of products: m + r - 1."""
        return self.outputs + self.taps - 1

    @property
    def dyadic(self) -> bool:
        """Whether G's denominators are powers of two as well, so that small integers are transformed and multiplied without rounding."""
        return all(dyadic(value) for row in self.g for value in row)

    @functools.cached_property
    def noise(self) -> float:
        """Amplification of rounding errors over direct summation for independent errors, as a root mean square.

        It is for one dimension; two dimensions have its square. It is the max over outputs k of sqrt(sum over i of (A^T[k][i] |G[i]|
        |B^T[i]|)^2 / r).
        """
        lengths = [_length(g) * _length(b) for g, b in zip(self.g, self.bt, strict=True)]
        return max(_length([float(a) * length for a, length in zip(row, lengths, strict=True)]) for row in self.at) / math.sqrt(self.taps)

    @property
    def bound(self) -> float:
        """Amplification of rounding errors in one dimension if all errors add up.

        It is the max over outputs k of sum over i of |A^T[k][i]| |G[i]|_1 |B^T[i]|_1 / r.
        """
        sums = [_sum(g) * _sum(b) for g, b in zip(self.g, self.bt, strict=True)]
        return float(max(sum(abs(a) * both for a, both in zip(row, sums, strict=True)) for row in self.at) / self.taps)


def _length(values: Iterable[Fraction | float]) -> float:
    return math.sqrt(sum(float(value) ** 2 for value in values))


def _sum(values: Iterable[Fraction]) -> Fraction:
    return sum((abs(value) for value in values), Fraction(0))


def minimal_operations(outputs: int, taps: int) -> int:
    """The least number of products for F(outputs, taps), which the algorithm reaches: outputs + taps - 1 (Winograd 1980).

    Raises:
        WinogradError: a size below 1.
    """
    for name, value in (("outputs", outputs), ("taps", taps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WinogradError(f"F(m, r): `{name}` (={value!r}) must be an integer of at least 1.")
    return outputs + taps - 1


@functools.cache
def default_points(count: int) -> tuple[Fraction, ...]:
    """Finite points with a small noise: the best known sets of up to nine points, then further fractions between those.

    Raises:
        WinogradError: fewer than 0 or more than 16.
    """
    if not 0 <= count <= _LARGEST:
        raise WinogradError(f"F(m, r): `outputs` + `taps` - 2 (={count}) points must be from 0 to {_LARGEST}.")
    if count == 0:
        return ()
    return tuple(map(Fraction, [*_BEST_POINTS[min(count, 9)].split(), *_MORE_POINTS][:count]))


def _times(polynomial: Sequence[Fraction], root: Fraction) -> list[Fraction]:
    """A polynomial, lowest coefficient first, multiplied by (x - root)."""
    low, high = [Fraction(0), *polynomial], [*polynomial, Fraction(0)]
    return [a - root * b for a, b in zip(low, high, strict=True)]


def _without(points: Sequence[Fraction], left_out: int | None) -> list[Fraction]:
    """Coefficients of the product of (x - a) over all points but one, lowest first."""
    polynomial = [Fraction(1)]
    for place, point in enumerate(points):
        if place != left_out:
            polynomial = _times(polynomial, point)
    return polynomial


def _odd_denominator(row: Sequence[Fraction]) -> Fraction:
    """The least factor that makes all denominators powers of two."""
    common = math.lcm(*(value.denominator for value in row))
    return Fraction(common // (common & -common))


@functools.cache
def _transform(outputs: int, taps: int, points: tuple[Fraction, ...]) -> Transform:
    size = len(points) + 1
    at: list[tuple[Fraction, ...]] = []
    g: list[tuple[Fraction, ...]] = []
    bt: list[tuple[Fraction, ...]] = []
    for place, point in enumerate(points):
        distance = math.prod((point - other for i, other in enumerate(points) if i != place), start=Fraction(1))
        rows = [[point**k for k in range(outputs)], [point**k / distance for k in range(taps)], [*_without(points, place), Fraction(0)]]
        by_a, by_b = _odd_denominator(rows[0]), _odd_denominator(rows[2])
        for store, row, factor in zip((at, g, bt), rows, (by_a, 1 / (by_a * by_b), by_b), strict=True):
            store.append(tuple(factor * value for value in row))
    factor = _odd_denominator(_without(points, None))
    at.append(tuple(Fraction(k == outputs - 1) for k in range(outputs)))
    g.append(tuple(Fraction(k == taps - 1) / factor for k in range(taps)))
    bt.append(tuple(factor * value for value in _without(points, None)))
    assert all(len(row) == size for row in bt)
    return Transform(outputs, taps, points, tuple(zip(*at, strict=True)), tuple(g), tuple(bt))


def transform(outputs: int, taps: int, points: Iterable[Fraction | int | str] | None = None) -> Transform:
    """The matrices of F(outputs, taps).

    Args:
        points: outputs + taps - 2 different finite points; `default_points` if None. Lavin and Gray's for F(4, 3) are 0, 1, -1, 2, -2.

    Raises:
        WinogradError: sizes below 1, or points that are too few, too many, not numbers or not all different.
    """
    count = minimal_operations(outputs, taps) - 1
    if points is None:
        return _transform(outputs, taps, default_points(count))
    try:
        given = tuple(Fraction(point) for point in points)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise WinogradError(f"F({outputs}, {taps}): `points` must be rational numbers: {error}.") from None
    if len(given) != count or len(set(given)) != count:
        shown = ", ".join(map(str, given))
        raise WinogradError(f"F({outputs}, {taps}): `points` (={shown}) must be {count} different numbers.")
    return _transform(outputs, taps, given)


def floats(matrix: Matrix) -> Array:
    """A matrix of rationals in float64."""
    return np.array([[float(value) for value in row] for row in matrix])
