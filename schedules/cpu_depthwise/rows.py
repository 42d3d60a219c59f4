"""Staging of padded input rows for vectors of windows, a row at a time in vectors.

A row of the copy is zeros, the input's row, and zeros. With stride s its columns modulo s lie apart, so that windows side by side read
elements side by side. LLVM would copy such short rows by calls of memcpy or element by element. Here vectors do, the last one moved back to
end with the row. With stride 2, two vectors of the input are parted into even and odd columns by shuffles.

before                                             after
    for p in 2, x in 60:                               pad[...] = zeros, if the row or its ends are outside the input
        pad[p, x] = inside ? row[2*x + p - 1] : 0      for q in 3: a, b = row[32*q + 1 ..];  pad[0, 16*q + 1 ..] = even(a, b);  ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import tirx
from tvm.ir import Range
from tvm.s_tir import SBlock, SBlockRealize

from im2win.compute import depthwise
from im2win.schedules.cpu.transpose import bound, pieces, zeros
from im2win.spec.conv2d import Conv2d


def vectorised(conv: Conv2d, lanes: int, stmt: Any) -> Any:
    """A scheduled statement with the loops of `depthwise.PAD` over a row replaced by vectors; a stride above 2 is left as it is."""
    if conv.stride[1] > 2:
        return stmt
    if isinstance(stmt, SBlockRealize):
        old = stmt.block
        inside = (old.init, old.alloc_buffers, old.match_buffers, old.annotations)
        block = SBlock(old.iter_vars, old.reads, old.writes, old.name_hint, vectorised(conv, lanes, old.body), *inside)
        return SBlockRealize(stmt.iter_values, stmt.predicate, block)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([vectorised(conv, lanes, child) for child in stmt.seq])
    if isinstance(stmt, tirx.For):
        realize = _row_of(stmt)
        body = vectorised(conv, lanes, stmt.body) if realize is None else None
        if realize is not None:
            return _row(conv, lanes, realize)
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)
    return stmt


def _row_of(loop: Any) -> Any:
    """The block of PAD, if a loop is that over the column's remainder, which has one loop inside; else None."""
    inner = loop.body
    if isinstance(inner, tirx.For) and isinstance(inner.body, SBlockRealize) and inner.body.block.name_hint == depthwise.PAD:
        return inner.body
    return None


def _row(conv: Conv2d, lanes: int, realize: Any) -> Any:
    """A block that stages one row."""
    old, place = realize.block, [one.var for one in realize.block.iter_vars[:3]]
    pad, data = old.writes[0].source, old.reads[0].source
    row, (stride, width) = place[2] - conv.padding[0], [int(extent) for extent in pad.shape[3:]]
    count, left = min(conv.width, width * stride - conv.padding[1]), conv.padding[1]  # columns of the input that are read
    source, beside, empty = [*place[:2], row], [], []
    for phase in range(stride):
        first, end = max(-((phase - left) // stride), 0), (count - 1 + left - phase) // stride + 1
        beside += [*_zeros(pad, [*place, phase], 0, first, lanes), *_zeros(pad, [*place, phase], end, width, lanes)]
        empty += _zeros(pad, [*place, phase], 0, width, lanes)
    copies = _plain(data, pad, source, place, left, count, lanes) if stride == 1 else _parted(data, pad, source, place, left, count, lanes)
    inside = tirx.And(row >= 0, row < conv.height)
    body = tirx.IfThenElse(inside, _sequence([*beside, *copies]), _sequence(empty))
    ranges = [[Range(axis, axis + 1) for axis in axes] for axes in ([*place[:2], tirx.max(tirx.min(row, conv.height - 1), 0)], place)]
    reads = [tirx.BufferRegion(data, [*ranges[0], Range(0, conv.width)])]
    writes = [tirx.BufferRegion(pad, [*ranges[1], Range(0, stride), Range(0, width)])]
    return SBlockRealize(realize.iter_values[:3], realize.predicate, SBlock(old.iter_vars[:3], reads, writes, old.name_hint, body))


def _sequence(statements: list[Any]) -> Any:
    """Statements one after the other; TVM has no sequence of one."""
    return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]


def _at(axes: list[Any], first: int, count: int) -> list[Any]:
    """Indices of `count` elements of a row from `first` on."""
    return [*axes, tirx.Ramp(first, 1, count) if count > 1 else tirx.const(first, "int32")]


def _zeros(pad: Any, axes: list[Any], first: int, end: int, lanes: int) -> list[Any]:
    return [tirx.BufferStore(pad, zeros(count), _at(axes, start, count)) for start, count in _vectors(first, end, lanes)]


def _vectors(first: int, end: int, lanes: int) -> Iterator[tuple[int, int]]:
    """(start, count) of the vectors that cover a range; the last one overlaps the one before, and a short range takes smaller ones."""
    if end - first < lanes:
        yield from ((first + done, width) for done, width in pieces(max(end - first, 0), lanes))
        return
    yield from ((start, lanes) for start in range(first, end - lanes, lanes))
    yield end - lanes, lanes


def _plain(data: Any, pad: Any, source: list[Any], place: list[Any], left: int, count: int, lanes: int) -> list[Any]:
    """A row copied to where the padding on the left ends."""
    return [
        tirx.BufferStore(pad, tirx.BufferLoad(data, _at(source, start, width)), _at([*place, 0], start + left, width))
        for start, width in _vectors(0, count, lanes)
    ]


def _parted(data: Any, pad: Any, source: list[Any], place: list[Any], left: int, count: int, lanes: int) -> list[Any]:
    """A row copied to two, its even and its odd columns behind the padding on the left."""
    begin = left % 2  # the first column of an even place
    half = max((width for width in (16, 8, 4, 2) if width <= lanes and 2 * width <= count - begin), default=0)
    pairs = (count - begin) // 2 if half else 0
    stmts: list[Any] = []
    for number, (start, _) in enumerate(_vectors(0, pairs, half) if half else ()):
        column = begin + 2 * start
        parts = [
            bound(f"part{number}_{place_of}", tirx.BufferLoad(data, _at(source, column + place_of * half, half)), half, stmts)
            for place_of in (0, 1)
        ]
        for phase in (0, 1):
            picked = tirx.Shuffle(parts, list(range(phase, 2 * half, 2)))
            stmts.append(tirx.BufferStore(pad, picked, _at([*place, phase], (column + left) // 2, half)))
    for column in (*range(begin), *range(begin + 2 * pairs, count)):
        value = tirx.BufferLoad(data, _at(source, column, 1))
        stmts.append(tirx.BufferStore(pad, value, _at([*place, (column + left) % 2], (column + left) // 2, 1)))
    return stmts
