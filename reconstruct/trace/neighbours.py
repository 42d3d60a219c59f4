"""Whether an index takes neighbouring values, and begins at a multiple, while a variable runs through a few neighbouring values.

A variable is ``first + lane``, where `first` is a multiple of `count` and lane runs from 0 to ``count - 1``. An expression of it is then
``base + step * lane`` for every thread, block and iteration, or nothing is shown. The argument is about divisibility alone, and holds
for any number of blocks: ``(base + step * lane) / d`` is the same for all lanes if `base` is a multiple of a number that divides d and
is larger than ``step * (count - 1)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from im2win.reconstruct.parse.expressions import Binary, Cast, Expr, Member, Name, Number, Unary

_INTEGERS = {"int", "int64_t", "int32_t", "size_t"}
_INDICES = {"threadIdx", "blockIdx"}


@dataclass(frozen=True)
class Run:
    """Values ``base + step * lane``.

    multiple: divides `base`; 0 if `base` is 0. nonnegative: whether no value is below 0.
    """

    multiple: int
    step: int
    nonnegative: bool


@dataclass(frozen=True)
class Neighbours:
    """The analysis for runs of `count` values.

    variables: what is known of variables by name. Every other variable is the same for all lanes, and of unknown sign.
    """

    count: int
    variables: Mapping[str, Run]

    def run(self, expr: Expr) -> Run | None:
        """The values of an integer expression; None if they are not shown to be of this form."""
        match expr:
            case Number(int(value)):
                return Run(abs(value), 0, value >= 0)
            case Name(name):
                return self.variables.get(name, Run(1, 0, False))
            case Member(Name(base), field) if base in _INDICES:
                return self.variables.get(f"{base}.{field}", Run(1, 0, True))
            case Cast(type_, operand) if type_ in _INTEGERS:
                return self.run(operand)
            case Binary(operator, left, right):
                one, other = self.run(left), self.run(right)
                return None if one is None or other is None else self._combined(operator, one, other, right)
        return None

    def _combined(self, operator: str, one: Run, other: Run, right: Expr) -> Run | None:
        if operator in ("+", "-"):
            sign = 1 if operator == "+" else -1
            nonnegative = sign > 0 and one.nonnegative and other.nonnegative
            return Run(math.gcd(one.multiple, other.multiple), one.step + sign * other.step, nonnegative)
        if operator == "*" and not (one.step and other.step):
            return self._product(one, other, right)
        if not isinstance(right, Number) or right.value is None:
            return None
        divisor = {"/": right.value, "%": right.value, ">>": 1 << right.value, "&": right.value + 1}.get(operator, 0)
        if divisor < 1 or (operator == "&" and right.value & divisor):
            return None
        return self._divided(one, divisor, operator in ("/", ">>"))

    def _product(self, one: Run, other: Run, right: Expr) -> Run | None:
        step = 0
        if one.step:
            if not isinstance(right, Number) or right.value is None:
                return None
            step = one.step * right.value
        elif other.step:
            return None  # TVM writes constants on the right
        return Run(one.multiple * other.multiple, step, one.nonnegative and other.nonnegative)

    def _divided(self, one: Run, divisor: int, quotient: bool) -> Run | None:
        """The quotient, or the remainder. C divides towards 0, so the values of several lanes must not be negative."""
        common = math.gcd(one.multiple, divisor)
        if one.step and not (one.nonnegative and 0 < one.step * (self.count - 1) < common):
            return None
        if quotient:
            return Run(one.multiple // divisor if one.multiple % divisor == 0 else 1, 0, one.nonnegative)
        return Run(common if common < divisor else 0, one.step, one.nonnegative)

    def same(self, condition: Expr) -> bool:
        """Whether a condition holds for all lanes or for none, as far as is shown."""
        match condition:
            case Binary("&&" | "||", left, right):
                return self.same(left) and self.same(right)
            case Unary("!", operand):
                return self.same(operand)
            case Binary("<" | ">=", left, Number(int(bound))) | Binary(">" | "<=", Number(int(bound)), left):
                return self._splits_none(left, bound, condition)
            case Binary("<=" | ">", left, Number(int(bound))) | Binary("<" | ">=", Number(int(bound)), left):
                return self._splits_none(left, bound + 1, condition)
        return self._constant(condition)

    def _splits_none(self, expr: Expr, bound: int, condition: Expr) -> bool:
        """Whether a run lies below a bound as a whole, or not at all."""
        found = self.run(expr)
        if found is None or found.step < 0:
            return False
        if found.step == 0:
            return self._constant(condition)
        rest = bound % found.multiple if found.multiple else bound
        last = found.step * (self.count - 1)
        return last < rest if rest > 0 else found.multiple > last if found.multiple else bound <= 0

    def _constant(self, expr: Expr) -> bool:
        match expr:
            case Binary("<" | ">" | "<=" | ">=" | "==" | "!=", left, right):
                one, other = self.run(left), self.run(right)
                return one is not None and other is not None and one.step == other.step == 0
        found = self.run(expr)
        return found is not None and found.step == 0
