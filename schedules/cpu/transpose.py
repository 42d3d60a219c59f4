"""Write-back in NCHW: transposes [window][channel] blocks to [channel][window] rows with vector shuffles.

A register tile holds vectors of output channels, but NCHW stores rows of windows. Scalar code would spend more time on the transpose than
on a short product. The copy is therefore a tensor intrinsic: it loads L vectors, transposes them in log2(L) stages of two-input shuffles (a
butterfly: stage w swaps the off-diagonal w x w blocks), and stores L rows. The rest of a row, fewer than L windows, takes the same shuffles
and is stored in pieces of 8, 4, 2 and 1. Only portable vector operations are used; LLVM selects the instructions.

before                                         after
    for j in L, m in rows, x in cols:              for p in (rows*cols) / L:
        B[j, m, x] = A[m*cols + x, j]                  v0..vL = A[p*L + i, 0:L];  butterfly;  B[j, p*L : p*L+L] = vj
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, TensorIntrin
from tvm.script import from_source

_HEADER = """
@T.prim_func(s_tir=True)
def {name}(a: T.handle, b: T.handle):
    row, plane, line = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a, ({windows}, {lanes}), "float32", strides=[row, 1], offset_factor=1, align=4)
    B = T.match_buffer(b, ({lanes}, {rows}, {cols}), "float32", strides=[plane, line, 1], offset_factor=1, align=4)
    with T.sblock("root"):
        T.reads(A[0:{windows}, 0:{lanes}])
        T.writes(B[0:{lanes}, 0:{rows}, 0:{cols}])
"""

_COPY = """
        for j, m, x in T.grid({lanes}, {rows}, {cols}):
            with T.sblock("transpose"):
                vj = T.axis.spatial({lanes}, j)
                {axes}
                B[vj, {vm}, {vx}] = A[{vm} * {cols} + {vx}, vj]
"""


def _description(rows: int, cols: int, lanes: int) -> str:
    # A single row or column leaves no such axis in the scheduled block, so the pattern must not have one either.
    axes = [f"{name} = T.axis.spatial({extent}, {name[1]})" for name, extent in (("vm", rows), ("vx", cols)) if extent > 1]
    vm, vx = ("vm" if rows > 1 else "0"), ("vx" if cols > 1 else "0")
    return _COPY.format(lanes=lanes, rows=rows, cols=cols, vm=vm, vx=vx, axes=("\n" + " " * 16).join(axes))


def pieces(count: int, lanes: int) -> Iterator[tuple[int, int]]:
    """(first, width) of the vectors that copy `count` <= lanes elements: a whole one, or pieces of 8, 4, 2 and 1."""
    done = 0
    for width in (lanes, 8, 4, 2, 1):
        while width <= lanes and count - done >= width:
            yield done, width
            done += width


def bound(name: str, value: Any, lanes: int, stmts: list[Any]) -> tirx.Var:
    """A variable for a vector of `lanes` float32, and the statement that binds its value."""
    variable = tirx.Var(name, f"float32x{lanes}")
    stmts.append(tirx.Bind(variable, value))
    return variable


def zeros(lanes: int) -> Any:
    """A vector of zeros; a scalar for one lane."""
    return tirx.const(0.0, "float32") if lanes == 1 else tirx.Broadcast(tirx.const(0.0, "float32"), lanes)


def index(first: Any, offset: int) -> Any:
    """The index `offset` behind `first`, which is a number or an expression."""
    return first + tirx.const(offset, "int32") if offset else first


def butterfly(lanes: int, vectors: list[tirx.Var], stmts: list[Any]) -> list[tirx.Var]:
    """The vectors of the transpose of an L x L matrix, given the matrix's vectors. Appends the shuffles to `stmts`."""
    width = 1
    while width < lanes:
        low = [q if (q // width) % 2 == 0 else lanes + q - width for q in range(lanes)]
        high = [q + width if (q // width) % 2 == 0 else lanes + q for q in range(lanes)]
        transposed = list(vectors)
        for first in (i for i in range(lanes) if (i // width) % 2 == 0):
            for place, picks in ((first, low), (first + width, high)):
                shuffled = tirx.Shuffle([vectors[first], vectors[first + width]], picks)
                transposed[place] = bound(f"w{width}_{place}", shuffled, lanes, stmts)
        vectors, width = transposed, 2 * width
    return vectors


def _block(matrices: tuple[Any, Any], first: Any, count: int, lanes: int) -> list[Any]:
    """Statements that transpose `count` <= lanes windows from window `first` on."""
    source, target = matrices
    stmts: list[Any] = []
    vectors = []
    for i in range(lanes):
        value = tirx.BufferLoad(source, [index(first, i), tirx.Ramp(0, 1, lanes)]) if i < count else zeros(lanes)
        vectors.append(bound(f"v{i}", value, lanes, stmts))
    for j, vector in enumerate(butterfly(lanes, vectors, stmts)):
        for done, width in pieces(count, lanes):
            part = vector if width == lanes else tirx.Shuffle([vector], list(range(done, done + width)))
            place = index(first, done)
            stmts.append(tirx.BufferStore(target, part, [j, 0, tirx.Ramp(place, 1, width) if width > 1 else place]))
    return stmts


def in_vectors(count: int, lanes: int, rest: tuple[int, int], block: Callable[[Any, int], list[Any]]) -> list[Any]:
    """Statements of ``block(first, count)`` for every whole vector of `count` elements, in a loop, and for the rest, if there is one.

    rest: (its first element, its number of elements).
    """
    stmts: list[Any] = []
    if count // lanes:
        q = tirx.Var("q", "int32")
        stmts.append(tirx.For(q, 0, count // lanes, tirx.ForKind.SERIAL, tirx.SeqStmt(block(q * tirx.const(lanes, "int32"), lanes))))
    if count % lanes:
        stmts += block(tirx.const(rest[0], "int32"), rest[1])
    return stmts


def implementation(header: str, body: Callable[[Any, Any], list[Any]]) -> tirx.PrimFunc:
    """The function with a header whose root block has the statements ``body(A, B)``."""
    function = from_source(header + "        T.evaluate(0)\n")
    root = function.body.block
    stmts = body(*function.params)
    inside = (root.init, root.alloc_buffers, root.match_buffers, root.annotations)
    block = SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, stmts[0] if len(stmts) == 1 else tirx.SeqStmt(stmts), *inside)
    return function.with_body(SBlockRealize([], True, block))


def transposed(header: str, windows: int, lanes: int) -> tirx.PrimFunc:
    """The implementation for a header whose A has `windows` rows of `lanes` channels."""
    rest = windows // lanes * lanes, windows % lanes

    def body(source: Any, target: Any) -> list[Any]:
        return in_vectors(windows, lanes, rest, lambda first, count: _block((source, target), first, count, lanes))

    return implementation(header, body)


@functools.cache
def transpose_intrin(rows: int, cols: int, lanes: int) -> str:
    """Registers the intrinsic that transposes [rows * cols windows][lanes channels] to [lanes][rows][cols]; returns its name."""
    name = f"im2win.transpose.{rows}x{cols}x{lanes}"
    header = _HEADER.format(name="transpose", windows=rows * cols, rows=rows, cols=cols, lanes=lanes)
    description = from_source(header + _description(rows, cols, lanes))
    TensorIntrin.register(name, description, transposed(header, rows * cols, lanes), override=True)
    return name
