"""Transposes between rows of NCHW and vectors of channels, by the same shuffles as in `schedules.cpu.transpose`.

before                                         after, into
    for x in cols, c in L:                         for q in cols / L:
        B[x, c] = A[c, x]                              v0..vL = A[0:L, q*L : q*L+L];  butterfly;  B[q*L + i, 0:L] = vi

The rest of a row is handled as its last L elements, some of which are transposed twice. A row shorter than L is read in pieces of 8, 4, 2
and 1.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import from_source

from im2win.schedules.cpu import transpose

_INTO = """
@T.prim_func(s_tir=True)
def into(a: T.handle, b: T.handle):
    plane, row, line = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a, ({lanes}, 1, {cols}), "float32", strides=[plane, row, 1], offset_factor=1, align=4)
    B = T.match_buffer(b, ({cols}, {lanes}), "float32", strides=[line, 1], offset_factor=1, align=4)
    with T.sblock("root"):
        T.reads(A[0:{lanes}, 0:1, 0:{cols}])
        T.writes(B[0:{cols}, 0:{lanes}])
"""

_INTO_COPY = """
        for x, c in T.grid({cols}, {lanes}):
            with T.sblock("transpose"):
                vx = T.axis.spatial({cols}, x)
                vc = T.axis.spatial({lanes}, c)
                B[vx, vc] = A[vc, 0, vx]
"""

# Like `transpose.transpose_intrin` for one row, but without a loop over rows: a row may have a predicate, which must stay outside.
_OUT_COPY = """
        for j, x in T.grid({lanes}, {cols}):
            with T.sblock("transpose"):
                vj = T.axis.spatial({lanes}, j)
                vx = T.axis.spatial({cols}, x)
                B[vj, 0, vx] = A[vx, vj]
"""


def _row(row: Any, lane: int, first: Any, count: int, lanes: int) -> Any:
    """A vector of `lanes` elements of a row from `first` on, of which `count` exist."""
    if count == lanes:
        return tirx.BufferLoad(row, [lane, 0, tirx.Ramp(first, 1, lanes)])
    parts = []
    for done, width in transpose.pieces(count, lanes):
        place = transpose.index(first, done)
        parts.append(tirx.BufferLoad(row, [lane, 0, tirx.Ramp(place, 1, width) if width > 1 else place]))
    return tirx.Shuffle([*parts, transpose.zeros(lanes - count)], list(range(lanes)))


def _block(matrices: tuple[Any, Any], first: Any, count: int, lanes: int) -> list[Any]:
    """Statements that transpose `count` <= lanes elements of each of `lanes` rows."""
    source, target = matrices
    stmts: list[Any] = []
    rows = [transpose.bound(f"v{lane}", _row(source, lane, first, count, lanes), lanes, stmts) for lane in range(lanes)]
    columns = transpose.butterfly(lanes, rows, stmts)[:count]
    places = ([transpose.index(first, x), tirx.Ramp(0, 1, lanes)] for x in range(count))
    return stmts + [tirx.BufferStore(target, column, place) for column, place in zip(columns, places, strict=True)]


def _into(header: str, cols: int, lanes: int) -> tirx.PrimFunc:
    rest = (cols - lanes, lanes) if cols >= lanes else (0, cols)

    def body(source: Any, target: Any) -> list[Any]:
        return transpose.in_vectors(cols, lanes, rest, lambda first, count: _block((source, target), first, count, lanes))

    return transpose.implementation(header, body)


@functools.cache
def into_intrin(cols: int, lanes: int) -> str:
    """Registers the intrinsic that transposes a row of [lanes channels][cols] to [cols][lanes]; returns its name. At least 4 lanes."""
    name = f"im2win.winograd.into.{cols}x{lanes}"
    header = _INTO.format(cols=cols, lanes=lanes)
    description = from_source(header + _INTO_COPY.format(cols=cols, lanes=lanes))
    TensorIntrin.register(name, description, _into(header, cols, lanes), override=True)
    return name


@functools.cache
def out_intrin(cols: int, lanes: int) -> str:
    """Registers the intrinsic that transposes one row of [cols windows][lanes channels] to [lanes][cols]; returns its name."""
    name = f"im2win.winograd.out.{cols}x{lanes}"
    header = transpose._HEADER.format(name="out", windows=cols, rows=1, cols=cols, lanes=lanes)
    description = from_source(header + _OUT_COPY.format(cols=cols, lanes=lanes))
    TensorIntrin.register(name, description, transpose.transposed(header, cols, lanes), override=True)
    return name
