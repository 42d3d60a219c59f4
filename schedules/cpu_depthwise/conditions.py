"""Conditions of a depthwise kernel, moved to the loops that they are cut out of.

A condition that depends on a serial loop inside a parallel step is marked as likely: LoopPartition cuts that loop where the condition holds
(`schedules.cpu.loop_peeling`). These are the ends of a row: the last register tile, the last channel block, the zeros beside the input. A
parallel loop is never cut, since its parts would run one after the other, and conditions on unrolled loops alone become constants.

before                                             after
    for u, v:                                          for u:
        for x in 8:                                        if 0 <= m + u - 1 < 56:
            sums[x] += filter[u, v] *                          for v, x in 8:
                (0 <= m + u - 1 < 56 and likely(..)                sums[x] += filter[u, v] * (likely(...) ? data[...] : 0)
                    ? data[...] : 0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from im2win.compute import nest
from im2win.spec.conv2d import Conv2d

_ROW, _COLUMN, _TAP_ROW = 2, 3, 5  # axes of the product: n, channel block, row, column, channel, u, v


@dataclass(frozen=True)
class Conditions:
    """Places the conditions of a scheduled kernel.

    inner: register tiles between the first and the last of a row that read nothing beyond the sides; 0 if others do, too.
    """

    conv: Conv2d
    inner: int

    def placed(self, body: Any) -> Any:
        """The body of a scheduled function with its conditions placed."""
        return _closed(self._statement(body, (), ()))

    def _statement(self, stmt: Any, parallel: tuple[Any, ...], serial: tuple[Any, ...]) -> tuple[Any, Any]:
        """(the statement, a condition for the innermost loop around it that the condition depends on; None for no such)."""
        if isinstance(stmt, SBlockRealize):
            return self._block(stmt, parallel, serial)
        if isinstance(stmt, tirx.For):
            parallel = (*parallel, stmt.loop_var) if stmt.kind == tirx.ForKind.PARALLEL else parallel
            serial = (*serial, stmt.loop_var) if stmt.kind == tirx.ForKind.SERIAL else serial
            body, condition = self._statement(stmt.body, parallel, serial)
            if condition is not None and _uses(condition, [stmt.loop_var]):
                body, condition = tirx.IfThenElse(condition, body, None), None
            return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations), condition
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([_closed(self._statement(child, parallel, serial)) for child in stmt.seq]), None
        if isinstance(stmt, tirx.BufferStore):
            return tirx.BufferStore(stmt.buffer, _asking(stmt.value, lambda c: _likely(c, parallel, serial)), stmt.indices), None
        return stmt, None

    def _block(self, stmt: Any, parallel: tuple[Any, ...], serial: tuple[Any, ...]) -> tuple[Any, Any]:
        old, condition, values = stmt.block, None, stmt.iter_values
        axes = [one.var for one in old.iter_vars]
        inner = [(*outer, *(axis for axis, value in zip(axes, values, strict=True) if _uses(value, outer))) for outer in (parallel, serial)]
        body = old.body
        if old.name_hint == f"{nest.CONV}_update":
            tiles = [loop for loop in serial if _uses(values[_COLUMN], [loop])]
            body = self._product(body, [axes[_ROW], axes[_TAP_ROW]], tiles)
            row = values[_ROW] * self.conv.stride[0] + values[_TAP_ROW] * self.conv.dilation[0] - self.conv.padding[0]
            condition = tirx.And(row >= 0, row < self.conv.height) if any(self.conv.padding) else None
        else:
            body = _closed(self._statement(body, *inner))
        inside = (old.init, old.alloc_buffers, old.match_buffers, old.annotations)
        block = SBlock(old.iter_vars, old.reads, old.writes, old.name_hint, body, *inside)
        return SBlockRealize(values, _likely(stmt.predicate, parallel, serial), block), condition

    def _product(self, store: Any, rows: list[Any], tiles: list[Any]) -> Any:
        """The product's update without conditions on rows. Those on columns are for the first and the last tile only.

        They are not marked themselves: LoopPartition would also cut the unrolled loops of a register tile, at bounds that are no constants.
        """

        def change(condition: Any) -> Any:
            condition = _without(condition, rows)
            if not self.inner or _is_true(condition) or not tiles:
                return condition
            [tile] = tiles
            return tirx.Or(tirx.And(tirx.likely(tile >= 1), tirx.likely(tile < 1 + self.inner)), condition)

        return tirx.BufferStore(store.buffer, _asking(store.value, change), store.indices)


def _closed(placed: tuple[Any, Any]) -> Any:
    stmt, condition = placed
    return stmt if condition is None else tirx.IfThenElse(condition, stmt, None)


def _asking(value: Any, change: Callable[[Any], Any]) -> Any:
    """An expression with the conditions of its `if_then_else` changed, which stand alone or are a factor of a summand."""
    if isinstance(value, (tirx.Add, tirx.Mul)):
        return type(value)(_asking(value.a, change), _asking(value.b, change))
    if isinstance(value, tvm.ir.Call) and value.op.name.endswith(".if_then_else"):
        condition, then, other = value.args
        condition = change(condition)
        return then if _is_true(condition) else tirx.if_then_else(condition, then, other)
    return value


def _is_true(condition: Any) -> bool:
    return isinstance(condition, tirx.IntImm) and bool(condition.value)


def _without(condition: Any, variables: Sequence[Any]) -> Any:
    """A condition without its parts that use any of the variables."""
    if isinstance(condition, tirx.And):
        left, right = _without(condition.a, variables), _without(condition.b, variables)
        return right if _is_true(left) else left if _is_true(right) else tirx.And(left, right)
    return tirx.const(True, "bool") if _uses(condition, variables) else condition


def _likely(condition: Any, parallel: Sequence[Any], serial: Sequence[Any]) -> Any:
    if isinstance(condition, tirx.And):
        return tirx.And(_likely(condition.a, parallel, serial), _likely(condition.b, parallel, serial))
    return tirx.likely(condition) if _uses(condition, serial) and not _uses(condition, parallel) else condition


def _uses(expression: Any, variables: Sequence[Any]) -> bool:
    return any(used.same_as(variable) for used in tirx.analysis.undefined_vars(expression) for variable in variables)
