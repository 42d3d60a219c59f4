"""Into and out of vectors of channels: rows of NCHW turned by shuffles, the same butterfly as in `schedules.turn`.

before                                         after, into
    for x in cols, c in L:                         for q in cols / L:
        B[x, c] = A[c, x]                              v0..vL = A[0:L, q*L : q*L+L];  butterfly;  B[q*L + i, 0:L] = vi

What is left of a row are its last L elements, some of them turned a second time; a row shorter than L is read in pieces of 8, 4, 2
and 1.
"""

from __future__ import annotations

import functools

from tvm.s_tir import TensorIntrin
from tvm.script import from_source

from im2win.schedules import turn

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
            with T.sblock("turn"):
                vx = T.axis.spatial({cols}, x)
                vc = T.axis.spatial({lanes}, c)
                B[vx, vc] = A[vc, 0, vx]
"""

# As `turn.turn_intrin` of one row, without a loop over rows: here the row may have a condition, which must stay outside.
_OUT_COPY = """
        for j, x in T.grid({lanes}, {cols}):
            with T.sblock("turn"):
                vj = T.axis.spatial({lanes}, j)
                vx = T.axis.spatial({cols}, x)
                B[vj, 0, vx] = A[vx, vj]
"""


def _row(lane: int, first: str, count: int, lanes: int) -> str:
    """A vector of `lanes` elements of a row from `first` on, of which `count` are there."""
    if count == lanes:
        return f'A.vload([{lane}, 0, {first}], "float32x{lanes}")'
    pieces, done = [], 0
    for width in (8, 4, 2, 1):
        while width <= count - done:
            place = f"[{lane}, 0, {first} + {done}]"
            pieces.append(f'A.vload({place}, "float32x{width}")' if width > 1 else f"A{place}")
            done += width
    zeros = "T.float32(0)" if lanes - done == 1 else f"T.broadcast(T.float32(0), {lanes - done})"
    return f"T.Shuffle([{', '.join([*pieces, zeros])}], {list(range(lanes))})"


def _block(first: str, count: int, lanes: int, indent: str, lines: list[str]) -> None:
    """Turns `count` <= lanes elements of each of `lanes` rows."""
    lines += [f"{indent}v{lane}: T.let = {_row(lane, first, count, lanes)}" for lane in range(lanes)]
    turned = turn._butterfly(lanes, [f"v{lane}" for lane in range(lanes)], indent, lines)
    lines += [f"{indent}B[{first} + {x}, T.ramp(0, 1, {lanes})] = {vector}" for x, vector in enumerate(turned[:count])]


def _into(cols: int, lanes: int) -> str:
    lines: list[str] = []
    indent = " " * 8
    if cols >= lanes:
        lines.append(f"{indent}for q in T.serial({cols // lanes}):")
        _block(f"q * {lanes}", lanes, lanes, indent + "    ", lines)
        if cols % lanes:
            _block(str(cols - lanes), lanes, lanes, indent, lines)
    else:
        _block("0", cols, lanes, indent, lines)
    return "\n".join(lines)


@functools.cache
def into_intrin(cols: int, lanes: int) -> str:
    """Registers the intrinsic that turns a row of [lanes channels][cols] into [cols][lanes]; returns its name. At least 4 lanes."""
    name = f"im2win.winograd.into.{cols}x{lanes}"
    header = _INTO.format(cols=cols, lanes=lanes)
    description = from_source(header + _INTO_COPY.format(cols=cols, lanes=lanes))
    TensorIntrin.register(name, description, from_source(header + _into(cols, lanes)), override=True)
    return name


@functools.cache
def out_intrin(cols: int, lanes: int) -> str:
    """Registers the intrinsic that turns one row of [cols windows][lanes channels] into [lanes][cols]; returns its name."""
    name = f"im2win.winograd.out.{cols}x{lanes}"
    header = turn._HEADER.format(name="out", windows=cols, rows=1, cols=cols, lanes=lanes)
    description = from_source(header + _OUT_COPY.format(cols=cols, lanes=lanes))
    TensorIntrin.register(name, description, from_source(header + turn._implementation(cols, lanes)), override=True)
    return name
