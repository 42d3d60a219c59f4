"""Loads, stores and conversions of vectors that the kernels' emitters share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

Expr = Any


def typed(dtype: str, lanes: int) -> str:
    """The type of a vector; that of a scalar for one lane."""
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


def load(buffer: Any, at: Expr, lanes: int) -> Expr:
    """A vector of neighbouring elements of a flat buffer."""
    return tirx.BufferLoad(buffer, [tirx.Ramp(at, 1, lanes) if lanes > 1 else at])


def store(buffer: Any, at: Expr, value: Expr, lanes: int) -> None:
    """Stores a vector to neighbouring elements of a flat buffer."""
    T.buffer_store(buffer, value, [tirx.Ramp(at, 1, lanes) if lanes > 1 else at])


def splat(value: Expr, lanes: int) -> Expr:
    """A vector of equal elements."""
    return tirx.Broadcast(value, lanes) if lanes > 1 else value


def constant(value: float, dtype: str, lanes: int = 1) -> Expr:
    """A number, or a vector of it."""
    return splat(tirx.const(value, dtype), lanes)


def flat(buffer: Any, size: int, dtype: str, itemsize: int) -> Any:
    """A kernel's argument as a buffer of one dimension, whose elements may lie at any multiple of their size."""
    return T.decl_buffer((size,), dtype, data=buffer.data, align=itemsize)


def pieces(count: int, lanes: int) -> Iterator[tuple[int, int]]:
    """(first, width) of vectors of at most `lanes` elements, powers of two, that cover fewer than `lanes` elements one after the other."""
    done = 0
    while lanes:
        while count - done >= lanes:
            yield done, lanes
            done += lanes
        lanes //= 2


def sweep(count: int, lanes: int, body: Callable[[Expr, int], None]) -> None:
    """Emits ``body(first, width)`` so that all of `count` elements are covered: in a loop over whole vectors, then the last vector.

    The last one is the last `lanes` elements, some of which the vector before covers as well; fewer than `lanes` elements are taken in
    pieces.
    """
    if count < lanes:
        for first, width in pieces(count, lanes):
            body(tirx.const(first, "int32"), width)
        return
    if count // lanes > 1:
        with T.serial(count // lanes) as q:
            body(q * lanes, lanes)
    else:
        body(tirx.const(0, "int32"), lanes)
    if count % lanes:
        body(tirx.const(count - lanes, "int32"), lanes)


def copy(to: Any, at: Expr, source: Any, first: Expr, count: int) -> None:
    """Copies fewer elements than a vector has, in two parts that overlap."""
    width = 1 << (count.bit_length() - 1)
    for start in dict.fromkeys((0, count - width)):
        store(to, at + start, load(source, first + start, width), width)


def clamped(index: Expr, size: int, count: int, last: int) -> Expr:
    """The first of the `size` elements of a tile, of `count` tiles that cover elements up to `last` from 0 on."""
    if count == 1:
        return tirx.const(0, "int32")
    return tirx.min(index * size, last - size) if last % size else index * size
