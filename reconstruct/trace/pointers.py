"""Pointer analysis: the buffer and byte offset that an expression points to, for all threads and iterations at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from im2win.reconstruct.parse.expressions import Binary, Call, Cast, Expr, Index, Member, Name, Unary, names, size_of, terms, text
from im2win.reconstruct.parse.scan import POINTER_CASTS
from im2win.reconstruct.trace.values import Values, evaluate

_BLOCK = {f"blockIdx.{axis}" for axis in "xyz"}


@dataclass(frozen=True)
class Pointer:
    """A location in a buffer.

    offset: in bytes, None if unknown. size: bytes of the pointee.
    block_terms: terms that depend on blockIdx alone, as text. `offset` leaves them out while blockIdx is unknown.
    """

    buffer: str
    offset: Values | None
    size: int
    block_terms: str = ""


class Memory:
    """The buffers of a kernel.

    sizes: bytes of an element, by the name of the parameter or array. blocks: whether blockIdx is known.
    """

    def __init__(self, blocks: bool) -> None:
        self.sizes: dict[str, int] = {}
        self.blocks = blocks

    def place(self, expr: Expr, scope: dict[str, Any]) -> Pointer | None:
        """The location of an lvalue, None if it is not in a buffer."""
        match expr:
            case Index(base, index):
                pointer = self.pointer(base, scope)
                return pointer and self.step(pointer, index, scope)
            case Unary("*", pointed):
                return self.pointer(pointed, scope)
            case Member(base, _):
                return self.place(base, scope)
        return None

    def pointer(self, expr: Expr, scope: dict[str, Any]) -> Pointer | None:
        """The location that an expression points to, None if it is unknown or not in a buffer."""
        match expr:
            case Name(name):
                alias = scope.get(name)
                if isinstance(alias, Pointer):
                    return alias
                return Pointer(name, np.asarray(0), self.sizes[name]) if name in self.sizes else None
            case Cast(type_, operand) if type_.endswith("*"):
                return self._recast(type_, self.pointer(operand, scope))
            case Call(function, template, (operand,)) if function in POINTER_CASTS:
                return self._recast(template.replace("const ", "").replace(" ", ""), self.pointer(operand, scope))
            case Unary("&", place):
                return self.place(place, scope)
            case Binary("+", left, right):
                pointer = self.pointer(left, scope)
                if pointer is not None:
                    return self.step(pointer, right, scope)
                pointer = self.pointer(right, scope)
                return pointer and self.step(pointer, left, scope)
            case Binary("-", left, right):
                pointer = self.pointer(left, scope)
                return pointer and moved(pointer, evaluate(right, scope), -1)
        return None

    def step(self, pointer: Pointer, steps: Expr, scope: dict[str, Any]) -> Pointer:
        """A pointer advanced by some elements.

        While blockIdx is unknown, terms of blockIdx alone go to `block_terms`, because they shift all accesses of a block alike.
        """
        value = evaluate(steps, scope)
        if value is not None or self.blocks:
            return moved(pointer, value, 1)
        parts = terms(steps)
        block_terms = [(factor, rest) for factor, rest in parts if rest is not None and names(rest) and names(rest) <= _BLOCK]
        whole: Values | None = np.asarray(0)
        for factor, rest in (part for part in parts if part not in block_terms):
            value = np.asarray(1) if rest is None else evaluate(rest, scope)
            whole = None if whole is None or value is None else whole + factor * value
        if pointer.block_terms or not block_terms or whole is None:
            return moved(pointer, None, 1)
        words = " + ".join(sorted(f"{text(part)} * {factor * pointer.size}" for factor, part in block_terms if part is not None))
        return replace(moved(pointer, whole, 1), block_terms=words)

    @staticmethod
    def _recast(type_: str, pointer: Pointer | None) -> Pointer | None:
        size = size_of(type_[:-1])
        return None if pointer is None or size is None else replace(pointer, size=size)


def moved(pointer: Pointer, steps: Values | None, sign: int) -> Pointer:
    """A pointer advanced by `sign * steps` elements; its offset is unknown if `steps` is None."""
    offset = None if steps is None or pointer.offset is None else pointer.offset + sign * steps * pointer.size
    return replace(pointer, offset=offset)
