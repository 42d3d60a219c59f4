"""Integer values of expressions, for many threads, blocks and iterations at once.

C's integer rules hold: division truncates, `%` has the dividend's sign, `>>` keeps the sign. An unknown value is None: data from memory,
floating point, and integers that would wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.reconstruct.parse.expressions import Binary, Call, Cast, Choice, Expr, Index, Member, Name, Number, Unary

Values = npt.NDArray[Any]

_RANGES = {"int": (-(2**31), 2**31), "uint": (0, 2**32), "signed char": (-128, 128), "uchar": (0, 256), "short": (-(2**15), 2**15),
           "ushort": (0, 2**16), "bool": (0, 2)}  # fmt: skip


def _divide(a: Values, b: Values) -> Values:
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": _divide, "%": lambda a, b: a - _divide(a, b) * b, "<<": np.left_shift,
    ">>": np.right_shift, "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor, "<": np.less, ">": np.greater,
    "<=": np.less_equal, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal, "&&": lambda a, b: (a != 0) & (b != 0),
    "||": lambda a, b: (a != 0) | (b != 0),
}  # fmt: skip
_SIGNS: dict[str, Callable[[Any], Any]] = {"-": np.negative, "!": lambda x: x == 0, "~": np.invert}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum, "abs": np.abs}
Scope = Mapping[str, Any]


class Table:
    """Known values of a local integer array, shape [elements, blocks, threads]."""

    def __init__(self, count: int) -> None:
        self.known = np.zeros(count, np.bool_)
        self.values: Values = np.zeros((count, 1, 1), np.int64)
        self.pending = False  # written in a loop whose iterations are evaluated at once: unknown until the loop ends

    def store(self, index: Values, value: Values) -> None:
        """Stores one element for each combination of loop variables; an element that gets several values becomes unknown."""
        index, value = (np.reshape(part, (1,) * (2 - np.ndim(part)) + np.shape(part)) for part in (index, value))
        if index.shape[-2:] != (1, 1):  # the index differs between threads
            self.known[:] = False
            return
        loops = np.broadcast_shapes(index.shape[:-2], value.shape[:-2])
        places = np.broadcast_to(index[..., 0, 0], loops).reshape(-1)
        values = np.broadcast_to(value, loops + value.shape[-2:]).reshape(-1, *value.shape[-2:])
        shape = np.broadcast_shapes(self.values.shape[1:], value.shape[-2:])
        self.values = np.broadcast_to(self.values, (len(self.known), *shape)).copy()
        if np.min(places) < 0 or np.max(places) >= len(self.known):
            self.known[:] = False
            return
        self.values[places] = values
        self.known[places] = True
        self.known[places[(self.values[places] != values).any(axis=(1, 2))]] = False

    def load(self, index: Values) -> Values | None:
        """Values of elements, None if any of them is unknown."""
        if self.pending or np.min(index) < 0 or np.max(index) >= len(self.known) or not np.all(self.known[index]):
            return None
        _, blocks, threads = self.values.shape
        return np.asarray(self.values[index, np.arange(blocks)[:, None] if blocks > 1 else 0, np.arange(threads) if threads > 1 else 0])


def evaluate(expr: Expr, scope: Scope) -> Values | None:
    """Integer values of an expression, for all elements of the scope's arrays at once; None if they are unknown.

    Args:
        scope: values by name, built-ins as "threadIdx.x". They broadcast against each other.
    """
    match expr:
        case Number(number):
            return None if number is None else np.asarray(number, np.int64)
        case Name(name):
            return scope.get(name)
        case Member(Name(base), field):
            return scope.get(f"{base}.{field}")
        case Index(Name(array), index):
            table, place = scope.get(f"{array}[]"), evaluate(index, scope)
            return table.load(place) if isinstance(table, Table) and place is not None else None
        case Cast(type_, operand):
            return _converted(type_, evaluate(operand, scope))
        case Unary(operator, operand) if operator in "-!~":
            value = evaluate(operand, scope)
            return None if value is None else _SIGNS[operator](value)
        case Binary(operator, left, right):
            a, b = evaluate(left, scope), evaluate(right, scope)
            if a is None or b is None or (operator in "/%" and not np.all(b)):
                return None
            value = _OPERATIONS[operator](_number(a), _number(b))
            return None if (_wraps(left) or _wraps(right)) and np.any(value < 0) else value
        case Choice(condition, then, other):
            chosen, a, b = (evaluate(part, scope) for part in (condition, then, other))
            return None if chosen is None or a is None or b is None else np.where(chosen != 0, _number(a), _number(b))
        case Call(function, _, arguments) if function in _FUNCTIONS:
            values = [evaluate(argument, scope) for argument in arguments]
            known = [value for value in values if value is not None]
            return _FUNCTIONS[function](*known) if len(known) == len(values) else None
    return None


def _number(value: Values) -> Values:
    return value.astype(np.int64) if value.dtype == bool else value


def _converted(type_: str, value: Values | None) -> Values | None:
    if value is None or type_ in ("int64_t", "uint64_t", "size_t", "longlong"):
        return value
    low, high = _RANGES.get(type_, (1, 0))
    return value if np.all(_number(value) >= low) and np.all(_number(value) < high) else None


def _wraps(expr: Expr) -> bool:
    """Whether an expression is unsigned, so that differences wrap. `threadIdx` and similar built-ins are unsigned."""
    match expr:
        case Member(Name("threadIdx" | "blockIdx" | "blockDim" | "gridDim"), _):
            return True
        case Cast(type_, _):
            return type_.startswith("u")
        case Binary(_, left, right):
            return _wraps(left) or _wraps(right)
    return False
