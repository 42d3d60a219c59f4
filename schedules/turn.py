"""The way out in NCHW: turning [window][channel] blocks into [channel][window] rows with vector shuffles.

A register tile holds vectors of output channels; NCHW wants rows of windows. Scalar code would spend more on this than on a short product,
so the copy is a tensor intrinsic: L vectors are loaded, log2(L) stages of two-input shuffles turn them (the butterfly: stage w swaps the
off-diagonal w x w blocks), and L rows are stored. The rest of a row, fewer than L windows, goes through the same shuffles and leaves in
pieces of 8, 4, 2 and 1. Only portable vector operations are used; LLVM picks the instructions.

before                                         after
    for j in L, m in rows, x in cols:              for p in (rows*cols) / L:
        B[j, m, x] = A[m*cols + x, j]                  v0..vL = A[p*L + i, 0:L];  butterfly;  B[j, p*L : p*L+L] = vj
"""

from __future__ import annotations

import functools

from tvm.s_tir import TensorIntrin
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
            with T.sblock("turn"):
                vj = T.axis.spatial({lanes}, j)
                {axes}
                B[vj, {vm}, {vx}] = A[{vm} * {cols} + {vx}, vj]
"""


def _description(rows: int, cols: int, lanes: int) -> str:
    # A single row or column leaves no such axis in the scheduled block, so the pattern must not have one either.
    axes = [f"{name} = T.axis.spatial({extent}, {name[1]})" for name, extent in (("vm", rows), ("vx", cols)) if extent > 1]
    vm, vx = ("vm" if rows > 1 else "0"), ("vx" if cols > 1 else "0")
    return _COPY.format(lanes=lanes, rows=rows, cols=cols, vm=vm, vx=vx, axes=("\n" + " " * 16).join(axes))


def _butterfly(lanes: int, vectors: list[str], indent: str, lines: list[str]) -> list[str]:
    width = 1
    while width < lanes:
        low = [q if (q // width) % 2 == 0 else lanes + q - width for q in range(lanes)]
        high = [q + width if (q // width) % 2 == 0 else lanes + q for q in range(lanes)]
        turned = list(vectors)
        for first in (i for i in range(lanes) if (i // width) % 2 == 0):
            for place, picks in ((first, low), (first + width, high)):
                turned[place] = f"w{width}_{place}"
                lines.append(f"{indent}{turned[place]}: T.let = T.Shuffle([{vectors[first]}, {vectors[first + width]}], {picks})")
        vectors, width = turned, 2 * width
    return vectors


def _block(first: str, count: int, lanes: int, indent: str, lines: list[str]) -> None:
    """Turns `count` <= lanes windows that start at window `first`."""
    for i in range(lanes):
        source = f'A.vload([{first} + {i}, 0], "float32x{lanes}")' if i < count else f"T.broadcast(T.float32(0), {lanes})"
        lines.append(f"{indent}v{i}: T.let = {source}")
    turned = _butterfly(lanes, [f"v{i}" for i in range(lanes)], indent, lines)
    for j, vector in enumerate(turned):
        done = 0
        for piece in (lanes, 8, 4, 2, 1):
            while piece <= lanes and count - done >= piece:
                part = vector if piece == lanes else f"T.Shuffle([{vector}], {list(range(done, done + piece))})"
                place = f"T.ramp({first} + {done}, 1, {piece})" if piece > 1 else f"{first} + {done}"
                lines.append(f"{indent}B[{j}, 0, {place}] = {part}")
                done += piece


def _implementation(windows: int, lanes: int) -> str:
    lines: list[str] = []
    indent = " " * 8
    if windows // lanes:
        lines.append(f"{indent}for q in T.serial({windows // lanes}):")
        _block(f"q * {lanes}", lanes, lanes, indent + "    ", lines)
    if windows % lanes:
        _block(str(windows // lanes * lanes), windows % lanes, lanes, indent, lines)
    return "\n".join(lines)


@functools.cache
def turn_intrin(rows: int, cols: int, lanes: int) -> str:
    """Registers the intrinsic that turns [rows * cols windows][lanes channels] into [lanes][rows][cols]; returns its name."""
    name = f"im2win.turn.{rows}x{cols}x{lanes}"
    header = _HEADER.format(name="turn", windows=rows * cols, rows=rows, cols=cols, lanes=lanes)
    description = from_source(header + _description(rows, cols, lanes))
    implementation = from_source(header + _implementation(rows * cols, lanes))
    TensorIntrin.register(name, description, implementation, override=True)
    return name
