"""What the transform kernels of Winograd share: the transform of a tile in registers, with its loads and stores.

A thread transforms tiles of as many neighbouring channels as fill four bytes.

Transforms are computed in float32 also where tiles are float16: float16 arithmetic would round every step, and the transforms would amplify
these errors. The extra instructions hide behind the traffic of V and M. V and M are each rounded once. Storing M as float16 adds a fifth to
a quarter to the error of F(4x4, 3x3), which `numerics.winograd_error.measure` includes; as float32 it would add half to the bytes that pass
through level-2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.numerics.matvec_program import Program, program
from im2win.numerics.winograd_matrices import transform
from im2win.numerics.winograd_tiling import Tiles
from im2win.schedules.cuda.epilogue.store import activated
from im2win.schedules.cuda.primitives import WORD, Expr, local
from im2win.spec.conv2d import Conv2d

THREADS = 256
WARP = 32


def channels_together(channels: int, itemsize: int) -> int:
    """Channels of a thread."""
    return math.gcd(channels, max(WORD // itemsize, 1))


def move(count: int, target: Any, place: Callable[[Expr], list[Expr]], value: Callable[[Expr], Expr]) -> None:
    """Stores `count` neighbours in one access."""
    if count == 1:
        T.buffer_store(target, value(0), place(0))
    else:
        with T.vectorized(count) as e:
            T.buffer_store(target, value(e), place(e))


def load_inside(count: int, inside: list[Expr], target: Any, place: Callable[[Expr], list[Expr]], value: Callable[[Expr], Expr]) -> None:
    """The same if the conditions `inside` hold, zeros otherwise."""
    with T.If(tirx.all(*inside)):
        with T.Then():
            move(count, target, place, value)
        with T.Else():
            move(count, target, place, lambda e: tirx.const(0, target.dtype))


def _run(steps: Program, read: Callable[[int], Expr], write: Callable[[int, Expr], None]) -> None:
    """Emits the product of a matrix and a vector as the steps of a program."""
    values = local("steps", (max(len(steps.steps), 1),), "float32")

    def value(place: int) -> Expr:
        return read(place) if place < steps.inputs else values[place - steps.inputs]

    for place, step in enumerate(steps.steps):
        factor, right = float(step.factor), value(step.right)
        term = right if factor == 1 else tirx.const(factor, "float32") * right
        if step.left is not None:
            term = value(step.left) - right if factor == -1 else value(step.left) + term
        T.buffer_store(values, term, [place])
    for place, output in enumerate(steps.outputs):
        write(place, value(output))


def _both_ways(steps: Program, given: Any) -> Any:
    """Registers with matrix * given * matrix^T."""
    rows = len(steps.outputs)
    half = local("half", (rows, steps.inputs), "float32")
    whole = local("whole", (rows, rows), "float32")
    with T.unroll(steps.inputs) as j:
        _run(steps, lambda i: given[i, j], lambda i, value: T.buffer_store(half, value, [i, j]))
    with T.unroll(rows) as i:
        _run(steps, lambda j: half[i, j], lambda j, value: T.buffer_store(whole, value, [i, j]))
    return whole


def _transformed(steps: Program, lanes: int, fill: Callable[[Any, Expr], None], dtype: str, end: Callable[[Expr, Expr], Expr]) -> Any:
    """Registers [rows, columns, lanes] of `dtype`: the transforms of all lanes, one after the other.

    Args:
        fill: emits the float32 tile of a lane. end: (value, lane) -> the value to keep.
    """
    rows = len(steps.outputs)
    found = local("found", (rows, rows, lanes), dtype)
    with T.unroll(lanes) as lane:
        given = local("given", (steps.inputs, steps.inputs), "float32")
        fill(given, lane)
        whole = _both_ways(steps, given)
        with T.unroll(rows) as i, T.unroll(rows) as j:
            T.buffer_store(found, end(whole[i, j], lane).astype(dtype), [i, j, lane])
    return found


def _steps(tiles: Tiles, side: str) -> Program:
    form = transform(tiles.outputs, tiles.conv.kernel[0])
    return program(form.bt if side == "input" else form.at)


def store_tile(tiles: Tiles, lanes: int, pixel: Callable[[Expr, Expr, Expr], Expr], out: Any, tile: Expr, channel: Expr) -> None:
    """Emits the transform of an input tile and its stores."""
    conv, t = tiles.conv, tiles.size

    def fill(given: Any, lane: Expr) -> None:
        with T.unroll(t) as i, T.unroll(t) as j:
            T.buffer_store(given, pixel(i, j, lane).astype("float32"), [i, j])

    found = _transformed(_steps(tiles, "input"), lanes, fill, conv.dtype, lambda value, lane: value)
    with T.unroll(t) as i, T.unroll(t) as j:
        at = (tile * tiles.positions + i * t + j) * conv.in_channels + channel
        move(lanes, out, lambda e: [at + e], lambda e: found[i, j, e])


def load_products(tiles: Tiles, lanes: int, products: Any, tile: Expr, channel: Expr, dtype: str, end: Callable[[Expr, Expr], Expr]) -> Any:
    """Emits the loads of a tile's products and their transform; registers [m, m, lanes] of `dtype`."""
    conv, t = tiles.conv, tiles.size
    loaded = local("loaded", (t, t, lanes), conv.dtype)
    with T.unroll(t) as i, T.unroll(t) as j:
        at = (tile * tiles.positions + i * t + j) * conv.out_channels + channel
        move(lanes, loaded, lambda e: [i, j, e], lambda e: products[at + e])

    def fill(given: Any, lane: Expr) -> None:
        with T.unroll(t) as i, T.unroll(t) as j:
            T.buffer_store(given, loaded[i, j, lane].astype("float32"), [i, j])

    return _transformed(_steps(tiles, "output"), lanes, fill, dtype, end)


def finished(conv: Conv2d, tensors: dict[str, Any], channel: Expr) -> Callable[[Expr, Expr], Expr]:
    """A function (accumulator, lane) -> the value with bias and, if no residual follows, activation."""

    def end(value: Expr, lane: Expr) -> Expr:
        if conv.bias:
            value = value + tensors["bias"][channel + lane].astype("float32")
        return value if conv.residual else activated(conv.activation, value, "float32")

    return end


def write_outputs(conv: Conv2d, tensors: dict[str, Any], count: int, at: Expr, value: Callable[[Expr], Expr]) -> None:
    """Emits the stores of neighbouring outputs, with residual and activation where `finished` has left them."""
    if not conv.residual:
        move(count, tensors["output"], lambda e: [at + e], value)
        return
    added, outputs = local("added", (count,), conv.out_dtype), local("values", (count,), conv.out_dtype)
    move(count, added, lambda e: [e], lambda e: tensors["residual"][at + e])
    with T.unroll(count) as e:
        total = activated(conv.activation, value(e) + added[e].astype("float32"), "float32")
        T.buffer_store(outputs, total.astype(conv.out_dtype), [e])
    move(count, tensors["output"], lambda e: [at + e], lambda e: outputs[e])
