"""The loops of a scheduled product, for passes that change what is around its statement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from im2win.compute import nest

_UPDATE = f"{nest.CONV}_update"
_PAIRS = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod)

Expr = Any
Values = Mapping[str, Expr]  # of a product's axes, by name
Ends = Mapping[Any, tuple[int, int]]  # first and last value of the loops inside another
Change = Callable[[Expr, Values, Ends, Any], Any]


def change_loops(module: tvm.IRModule, *changes: Change) -> tvm.IRModule:
    """A scheduled module whose products' loops have other bodies.

    Args:
        changes: each (loop variable, values of the product's axes, first and last value of the loops inside, body) -> body. They are
            called, in this order, for every loop that holds nothing but a product, innermost first.
    """
    return tvm.IRModule({name: func.with_body(_changed(func.body, changes)) for name, func in module.functions.items()})


def with_body(realize: SBlockRealize, body: Any) -> SBlockRealize:
    """A block with another body."""
    old = realize.block
    inside = (old.init, old.alloc_buffers, old.match_buffers, old.annotations)
    block = SBlock(old.iter_vars, old.reads, old.writes, old.name_hint, body, *inside)
    return SBlockRealize(realize.iter_values, realize.predicate, block)


def _changed(stmt: Any, changes: tuple[Change, ...]) -> Any:
    if isinstance(stmt, SBlockRealize):
        return with_body(stmt, _changed(stmt.block.body, changes))
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_changed(child, changes) for child in stmt.seq])
    if not isinstance(stmt, tirx.For):
        return stmt
    found = _product(stmt)
    body = _changed(stmt.body, changes)
    if found is not None:
        for change in changes:
            body = change(stmt.loop_var, *found, body)
    return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)


def _product(loop: tirx.For) -> tuple[Values, Ends] | None:
    """Of the product whose loops a loop belongs to: its axes' values by name, and the first and last value of the loops inside this one.

    None where it holds no product, or other statements as well.
    """
    inside: list[tirx.For] = []
    body = loop.body
    while isinstance(body, tirx.For):
        inside.append(body)
        body = body.body
    if not isinstance(body, SBlockRealize) or body.block.name_hint != _UPDATE:
        return None
    names = (one.var.name.removeprefix("v_") for one in body.block.iter_vars)
    ends = {one.loop_var: (int(one.min), int(one.min) + int(one.extent) - 1) for one in inside}
    return dict(zip(names, body.iter_values, strict=True)), ends


def same(value: Expr, var: Expr) -> bool:
    """Whether an index expression is a variable."""
    return bool(value.same_as(var))


def uses(value: Expr, var: Expr) -> bool:
    """Whether an index expression has a variable."""
    return same(value, var) or (isinstance(value, _PAIRS) and (uses(value.a, var) or uses(value.b, var)))


def at(value: Expr, known: Mapping[Any, int]) -> Expr:
    """An index expression with some of its variables replaced by numbers."""
    for var, number in known.items():
        if same(value, var):
            return tirx.const(number, str(value.ty))
    if isinstance(value, _PAIRS):
        return type(value)(at(value.a, known), at(value.b, known))
    return value
