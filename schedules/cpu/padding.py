"""Taps that fall into the padding, which register tiles do not multiply.

A dilated layer as those of atrous spatial pyramids (Chen et al. 2017, arXiv 1706.05587) has as much padding as dilation: of 3x3 taps at
distance 24 on a map of 28x28, four fifths of all multiplications are by zero. A register tile leaves out the kernel rows and columns that
lie outside of the input for all of its windows. Layers with few such taps (`im2win.spec.padding`) keep a micro-kernel without branches,
unless their tile says "skipped": where it holds whole output rows and the kernel's columns are unrolled, it is known for every product
whether its column lies inside, and a branch remains for the kernel's rows alone.

The direct form stages no padded rows then, since most of them would be zeros: it reads the input itself, under a predicate only where a
tap lies inside for some windows of the tile and outside for others.

before                                    after
    for c, u, v:                              for c, u, v:
        sums += filter * padded                   if the tap lies inside for a window of the tile:
                                                      if it lies inside for all: sums += filter * input
                                                      else: sums += filter * (input if inside else 0)

"skipped", a map of 7 columns             after
    for c, u:                                 for c, u:
        for v in 3, x in 7:                       if row u lies inside for a window of the tile:
            sums[x] += filter[v] * padded             sums[1..6] += filter[0] * padded
                                                      sums[0..6] += filter[1] * padded
                                                      sums[0..5] += filter[2] * padded
"""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm import tirx

from im2win.schedules.cpu.products import Change, Ends, Expr, Values, at, same, uses, with_body
from im2win.schedules.cpu.tile import Tile
from im2win.spec.conv2d import Conv2d
from im2win.spec.padding import read_place, skips

_OUTPUTS, _TAPS = ("m", "x"), ("u", "v")  # axes of the product, of rows and of columns


def padding_changes(conv: Conv2d, tile: Tile) -> list[Change]:
    """Changes of loops by which products leave out taps in the padding; none where neither layer nor tile asks for it."""
    if skips(conv):
        return [functools.partial(_guard_taps, conv)]
    if tile.padding == "skipped":
        return [functools.partial(_guard_windows, conv)]
    return []


def _guard_taps(conv: Conv2d, loop: Expr, values: Values, inner: Ends, body: Any) -> Any:
    """The body of a loop of a product; that of a loop over taps runs for those that lie inside for some output of the tile."""
    taps = [axis for axis in range(2) if _TAPS[axis] in values and same(values[_TAPS[axis]], loop)]  # a matrix has no rows of taps
    if taps and not any(same(values[name], var) for name in _TAPS for var in inner):
        within = [one for axis in range(2) for one in _inside(conv, axis, values, inner)]
        body = _without_predicate(body, tirx.all(*within))
    for axis in taps:
        body = tirx.IfThenElse(tirx.all(*_reached(conv, axis, values, inner)), body, None)
    return body


def _guard_windows(conv: Conv2d, loop: Expr, values: Values, inner: Ends, body: Any) -> Any:
    """The body of a loop of a product: that over kernel rows as `_guard_taps` has it, that over the tile's columns for those inside."""
    if same(values["u"], loop):
        return tirx.IfThenElse(tirx.all(*_reached(conv, 0, values, inner)), body, None)
    if uses(values["x"], loop):
        place = read_place(conv, 1, values["x"], values["v"])
        return tirx.IfThenElse(tirx.all(place >= 0, place < conv.width), body, None)
    return body


def _ends(axis: int, values: Values, inner: Ends) -> tuple[Expr, Expr]:
    """The first and the last output of a register tile along an axis."""
    least, most = (at(values[_OUTPUTS[axis]], {var: ends[end] for var, ends in inner.items()}) for end in range(2))
    return least, most


def _reached(conv: Conv2d, axis: int, values: Values, inner: Ends) -> tuple[Expr, Expr]:
    """Conditions under which the tap may lie inside the input for some output of the tile."""
    least, most = _ends(axis, values, inner)
    size, tap = (conv.height, conv.width)[axis], values[_TAPS[axis]]
    return read_place(conv, axis, least, tap) < size, read_place(conv, axis, most, tap) >= 0


def _inside(conv: Conv2d, axis: int, values: Values, inner: Ends) -> tuple[Expr, Expr]:
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
    if isinstance(stmt, tirx.SeqStmt):  # a fence, then the product
        *fences, product = stmt.seq
        body = _plain(product)
        return body and tirx.SeqStmt([*fences, body])
    old = stmt.block
    value, times = old.body.value, old.body.value.b
    read = times.a
    if not isinstance(read, tvm.ir.Call):
        return None
    value = type(value)(value.a, type(times)(read.args[1], times.b))
    return with_body(stmt, tirx.BufferStore(old.body.buffer, value, old.body.indices))
