"""Programs for a constant matrix times a vector: straight-line code that shares sums between pairs of rows or columns.

A step is one multiply-add, `left + factor * right`. Code generators for CPU and GPU turn it into an instruction on scalars or vectors. Two
kinds of sums are shared, as in hand-written transforms (Lavin and Gray, arXiv 1509.09308):

    rows e + f*o and e - f*o          e and o are computed once
    columns a and b of equal size     a + b and a - b are computed once, and every row takes one of them
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

Matrix = Sequence[Sequence[Fraction]]
_Row = dict[int, Fraction]  # value -> its factor, none of them 0

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A new value, left + factor * right, or factor * right where `left` is None. `left` and `right` are indices of values."""

    left: int | None
    factor: Fraction
    right: int


@dataclass(frozen=True)
class Program:
    """A matvec program. Values 0 to inputs - 1 are given, and every step appends one value. `outputs` are the indices of the results."""

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @property
    def operations(self) -> int:
        """Number of multiply-adds, additions and multiplications, each counted once."""
        return len(self.steps)

    def run(self, values: Sequence[T], step: Callable[[T | None, Fraction, T], T]) -> list[T]:
        """Runs the program. Returns the outputs.

        Args:
            values: the inputs: numbers, arrays, names or expressions.
            step: ``step(left, factor, right)`` computes one step on such values.

        Raises:
            ValueError: the number of values differs from the program's inputs.
        """
        if len(values) != self.inputs:
            raise ValueError(f"Program.run: `values` (={len(values)} of them) must be {self.inputs}.")
        known = list(values)
        for one in self.steps:
            known.append(step(None if one.left is None else known[one.left], one.factor, known[one.right]))
        return [known[place] for place in self.outputs]

    def matrix(self) -> list[list[Fraction]]:
        """The matrix that the program multiplies by, computed by running it on unit vectors."""
        units = [[Fraction(i == k) for i in range(self.inputs)] for k in range(self.inputs)]

        def step(left: list[Fraction] | None, factor: Fraction, right: list[Fraction]) -> list[Fraction]:
            return [a + factor * b for a, b in zip(left or [Fraction(0)] * self.inputs, right, strict=True)]

        return self.run(units, step)


def _cost(row: _Row) -> int:
    """Steps of a plain sum: one less than its terms if one of them has factor 1."""
    return len(row) - (1 in row.values())


def dyadic(value: Fraction) -> bool:
    """Whether a denominator is a power of two, so that binary floats hold the number exactly."""
    return value.denominator & (value.denominator - 1) == 0


def _normalised(row: _Row) -> tuple[Fraction, _Row]:
    """(factor, row / factor) such that the row has a factor 1, and its denominators stay powers of two if they were."""
    for factor in sorted(row.values(), key=lambda value: (abs(value) != 1, value < 0)):
        scaled = {place: value / factor for place, value in row.items()}
        if all(map(dyadic, scaled.values())) or not all(map(dyadic, row.values())):
            return factor, scaled
    return Fraction(1), row


@dataclass
class _Writer:
    """Appends steps, and reuses an equal value instead of computing it again."""

    inputs: int
    steps: list[Step] = field(default_factory=list)

    def put(self, left: int | None, factor: Fraction, right: int) -> int:
        """The index of the value left + factor * right."""
        step = Step(left, factor, right)
        if step not in self.steps:
            self.steps.append(step)
        return self.inputs + self.steps.index(step)

    def total(self, row: _Row) -> int:
        """The index of a plain sum."""
        terms = sorted(row.items(), key=lambda term: (term[1] != 1, -term[0]))
        place, factor = terms[0]
        value = place if factor == 1 else self.put(None, factor, place)
        for place, factor in terms[1:]:
            value = self.put(value, factor, place)
        return value


def _half(a: _Row, b: _Row, sign: int) -> _Row:
    """(a + sign * b) / 2."""
    row = {place: (a.get(place, Fraction(0)) + sign * b.get(place, Fraction(0))) / 2 for place in sorted(a.keys() | b.keys())}
    return {place: factor for place, factor in row.items() if factor}


def _pair_columns(rows: list[_Row], writer: _Writer) -> list[_Row]:
    """Rewrites rows over a + b and a - b instead of columns a and b, if these have equal absolute values and that saves steps."""
    columns = sorted({place for row in rows for place in row})
    taken: set[int] = set()
    for a, b in itertools.combinations(columns, 2):
        users = [row for row in rows if a in row or b in row]
        if {a, b} & taken or any(abs(row.get(a, Fraction(0))) != abs(row.get(b, Fraction(0))) for row in users):
            continue
        signs = {row[a] == row[b] for row in users}
        if len(users) <= len(signs):
            continue
        taken |= {a, b}
        made = {same: writer.put(a, Fraction(1 if same else -1), b) for same in sorted(signs, reverse=True)}
        for row in users:
            factor, other = row.pop(a), row.pop(b)
            row[made[factor == other]] = factor
    return rows


def _pair_rows(rows: list[_Row]) -> list[tuple[int, int]]:
    """Pairs of rows that are cheaper as e + f*o and e - f*o, largest gain first."""
    gains = []
    for i, j in itertools.combinations(range(len(rows)), 2):
        even, odd = _half(rows[i], rows[j], 1), _half(rows[i], rows[j], -1)
        if even and odd:
            together = _cost(even) + _cost(_normalised(odd)[1]) + 2
            gains.append((_cost(rows[i]) + _cost(rows[j]) - together, -i, -j))
    pairs: list[tuple[int, int]] = []
    for gain, i, j in sorted(gains, reverse=True):
        if gain > 0 and not {-i, -j} & {place for pair in pairs for place in pair}:
            pairs.append((-i, -j))
    return pairs


def program(matrix: Matrix) -> Program:
    """The matvec program of a matrix, [outputs][inputs].

    Raises:
        ValueError: no rows or columns, rows of different lengths, or a row of zeros, which no step computes.
    """
    width = len(matrix[0]) if matrix else 0
    if not width or any(len(row) != width for row in matrix):
        raise ValueError("program: `matrix` must have rows, all of one length of at least 1.")
    rows = [{place: Fraction(value) for place, value in enumerate(row) if value} for row in matrix]
    if not all(rows):
        raise ValueError("program: no row of `matrix` may be all zeros.")
    writer = _Writer(width)
    rows = _pair_columns(rows, writer)
    outputs: dict[int, int] = {}
    for i, j in sorted(_pair_rows(rows)):
        even = writer.total(_half(rows[i], rows[j], 1))
        factor, odd = _normalised(_half(rows[i], rows[j], -1))
        shared = writer.total(odd)
        outputs[i], outputs[j] = writer.put(even, factor, shared), writer.put(even, -factor, shared)
    for place, row in enumerate(rows):
        if place not in outputs:
            outputs[place] = writer.total(row)
    return Program(width, tuple(writer.steps), tuple(outputs[place] for place in range(len(rows))))
