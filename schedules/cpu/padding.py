"""Taps that fall into the padding, which register tiles do not multiply.

A dilated layer as those of atrous spatial pyramids (Chen et al. 2017, arXiv 1706.05587) has as much padding as dilation: of 3x3 taps at
distance 24 on a map of 28x28, four fifths of all multiplications are by zero. A register tile leaves out the kernel rows and columns that
lie outside of the input for all of its windows. Layers with few such taps (`im2win.spec.padding`) keep a micro-kernel without branches.

The direct form stages no padded rows then, since most of them would be zeros: it reads the input itself, under a predicate only where a
tap lies inside for some windows of the tile and outside for others.

before                                    after
    for c, u, v:                              for c, u, v:
        sums += filter * padded                   if the tap lies inside for a window of the tile:
                                                      if it lies inside for all: sums += filter * input
                                                      else: sums += filter * (input if inside else 0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from im2win.compute import nest
from im2win.spec.conv2d import Conv2d
from im2win.spec.padding import read_place, skips

_UPDATE = f"{nest.CONV}_update"
_OUTPUTS, _TAPS = ("m", "x"), ("u", "v")  # axes of the product, of rows and of columns

Expr = Any


def skip_padding(module: tvm.IRModule, conv: Conv2d) -> tvm.IRModule:
    """A scheduled module whose products leave out taps in the padding; the same module where that is not worth it (`skips`)."""
    if not skips(conv):
        return module
    return tvm.IRModule({name: func.with_body(_guarded(func.body, conv)) for name, func in module.functions.items()})


def _guarded(stmt: Any, conv: Conv2d) -> Any:
    """A statement with its products guarded."""
    if isinstance(stmt, SBlockRealize):
        old = stmt.block
        inside = (old.init, old.alloc_buffers, old.match_buffers, old.annotations)
        block = SBlock(old.iter_vars, old.reads, old.writes, old.name_hint, _guarded(old.body, conv), *inside)
        return SBlockRealize(stmt.iter_values, stmt.predicate, block)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_guarded(child, conv) for child in stmt.seq])
    if not isinstance(stmt, tirx.For):
        return stmt
    found = _product(stmt)
    body = _guarded(stmt.body, conv)
    if found is not None:
        values, inner = found
        taps = [axis for axis in range(2) if _is(values[_TAPS[axis]], stmt.loop_var)]
        if taps and not any(_is(values[name], var) for name in _TAPS for var in inner):
            within = [one for axis in range(2) for one in _inside(conv, axis, values, inner)]
            body = _without_predicate(body, tirx.all(*within))
        for axis in taps:
            body = tirx.IfThenElse(tirx.all(*_reached(conv, axis, values, inner)), body, None)
    return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)


def _is(value: Expr, var: Expr) -> bool:
    return bool(value.same_as(var))


def _ends(axis: int, values: Mapping[str, Expr], inner: Mapping[Any, tuple[int, int]]) -> tuple[Expr, Expr]:
    """The first and the last output of a register tile along an axis."""
    least, most = (_at(values[_OUTPUTS[axis]], {var: ends[end] for var, ends in inner.items()}) for end in range(2))
    return least, most


def _reached(conv: Conv2d, axis: int, values: Mapping[str, Expr], inner: Mapping[Any, tuple[int, int]]) -> tuple[Expr, Expr]:
    """Conditions under which the tap may lie inside the input for some output of the tile."""
    least, most = _ends(axis, values, inner)
    size, tap = (conv.height, conv.width)[axis], values[_TAPS[axis]]
    return read_place(conv, axis, least, tap) < size, read_place(conv, axis, most, tap) >= 0


def _inside(conv: Conv2d, axis: int, values: Mapping[str, Expr], inner: Mapping[Any, tuple[int, int]]) -> tuple[Expr, Expr]:
    """Conditions under which the tap lies inside the input for all outputs of the tile."""
    least, most = _ends(axis, values, inner)
    size, tap = (conv.height, conv.width)[axis], values[_TAPS[axis]]
    return read_place(conv, axis, least, tap) >= 0, read_place(conv, axis, most, tap) < size


def _without_predicate(body: Any, inside: Expr) -> Any:
    """A product that reads the input under a predicate, with a copy that does not, for where all is inside."""
    fast = _plain(body)
    return body if fast is None else tirx.IfThenElse(inside, fast, body)


def _plain(stmt: Any) -> Any:
    """A copy of a product, with loops of its own, that reads the input without a predicate; None if there is no predicate."""
    if isinstance(stmt, tirx.For):
        body = _plain(stmt.body)
        return body and tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)
    old = stmt.block
    value, product = old.body.value, old.body.value.b
    read = product.a
    if not isinstance(read, tvm.ir.Call):
        return None
    value = type(value)(value.a, type(product)(read.args[1], product.b))
    body = tirx.BufferStore(old.body.buffer, value, old.body.indices)
    inside = (old.init, old.alloc_buffers, old.match_buffers, old.annotations)
    block = SBlock(old.iter_vars, old.reads, old.writes, old.name_hint, body, *inside)
    return SBlockRealize(stmt.iter_values, stmt.predicate, block)


def _product(loop: tirx.For) -> tuple[Mapping[str, Expr], Mapping[Any, tuple[int, int]]] | None:
    """Of the product whose loops a loop belongs to: its axes' values by name, and the first and last value of the loops inside this one.

    None where it holds no product, or other statements as well.
    """
    inner: dict[Any, tuple[int, int]] = {}
    body = loop.body
    while isinstance(body, tirx.For):
        first = int(body.min)
        inner[body.loop_var] = first, first + int(body.extent) - 1
        body = body.body
    if not isinstance(body, SBlockRealize) or body.block.name_hint != _UPDATE:
        return None
    names = (one.var.name.removeprefix("v_") for one in body.block.iter_vars)
    values = dict(zip(names, body.iter_values, strict=True))
    return (values, inner) if values.keys() >= {*_OUTPUTS, *_TAPS} else None  # a matrix has no rows of taps


def _at(value: Expr, known: Mapping[Any, int]) -> Expr:
    """An index expression with some of its variables replaced by numbers."""
    for var, number in known.items():
        if value.same_as(var):
            return tirx.const(number, str(value.ty))
    if isinstance(value, tirx.Add | tirx.Sub | tirx.Mul | tirx.FloorDiv | tirx.FloorMod):
        return type(value)(_at(value.a, known), _at(value.b, known))
    return value
