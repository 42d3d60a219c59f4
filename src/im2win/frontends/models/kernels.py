"""Kernels that TVM's ONNX importer lacks or that are faster than its own.

These are pooling, local response normalisation, and copies into part of a tensor.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import te, tirx
from tvm.script import from_source

from im2win.frontends.models.parts import Pool, Response
from im2win.frontends.models.program import Shape
from im2win.frontends.onnx.transposed import Phases

INTERLEAVED = "im2win.interleaved"  # attribute of a function that writes so many rows of its input alternately to one row

_COPY = """
@T.prim_func(s_tir=True)
def copy(a: T.handle, b: T.handle):
    T.func_attr({{"tirx.noalias": True}})
    A = T.match_buffer(a, {shape}, "{dtype}")
    B = T.match_buffer(b, {whole}, "{dtype}")
    for {loops} in T.grid({extents}):
        with T.sblock("copy"):
            {names} = T.axis.remap("{kinds}", [{loops}])
            B[{place}] = A[{names}]
"""


def response(shape: Shape, one: Response) -> tirx.PrimFunc:
    """ONNX's LRN on [N, C, ...].

    TVM's importer divides by fewer channels at the border, which ONNX does not. Powers that ONNX models use become square roots, which LLVM
    vectorises: t**0.75 = sqrt(t) * sqrt(sqrt(t)).
    """
    data = te.placeholder(shape, "float32", name="data")
    near = te.reduce_axis((0, one.size), "near")
    first = (one.size - 1) // 2

    def square(n: Any, c: Any, *place: Any) -> Any:
        channel = c + near - first
        inside = te.all(channel >= 0, channel < shape[1])
        value = data(n, channel, *place)
        return te.sum(te.if_then_else(inside, value * value, tirx.const(0, "float32")), axis=near)

    squares = te.compute(shape, square, name="squares")

    def normalised(*at: Any) -> Any:
        total = tirx.const(one.bias, "float32") + tirx.const(one.alpha / one.size, "float32") * squares(*at)
        return data(*at) / power(total, one.beta)

    return te.create_prim_func([data, te.compute(shape, normalised, name="response")]).with_attr("tirx.noalias", True)


def power(value: Any, exponent: float) -> Any:
    root = te.sqrt(value)
    known = {0.5: root, 0.75: root * te.sqrt(root), 1.0: value}
    return known.get(exponent, te.power(value, tirx.const(exponent, "float32")))


def pool(shape: Shape, output: Shape, one: Pool) -> tirx.PrimFunc:
    """Pooling on [N, C, H, W] that reduces the rows of a window first, so that the inner loop runs along whole input rows.

    rows[m, k] = max over u of I[m*s + u - top, k - left]        O[m, x] = max over v of rows[m, x*s + v]
    """
    data = te.placeholder(shape, "float32", name="data")
    (kernel_h, kernel_w), (stride_h, stride_w), (top, left) = one.kernel, one.stride, one.begin
    (height, width), (out_h, out_w) = shape[2:], output[2:]
    below = (out_h - 1) * stride_h + kernel_h - top > height
    right = (out_w - 1) * stride_w + kernel_w - left > width
    u, v = te.reduce_axis((0, kernel_h), "u"), te.reduce_axis((0, kernel_w), "v")
    reduced, nothing = (te.max, te.min_value("float32")) if one.kind == "max" else (te.sum, tirx.const(0, "float32"))

    def row(n: Any, c: Any, m: Any, k: Any) -> Any:
        y, x = m * stride_h + u - top, k - left
        inside = [y >= 0] * bool(top) + [y < height] * below + [x >= 0] * bool(left) + [x < width] * right
        value = data[n, c, y, x]
        if inside:
            value = te.if_then_else(te.all(*inside) if len(inside) > 1 else inside[0], value, nothing)
        return reduced(value, axis=u)

    rows = te.compute((*shape[:2], out_h, (out_w - 1) * stride_w + kernel_w), row, name="rows")
    best = te.compute(output, lambda n, c, m, x: reduced(rows[n, c, m, x * stride_w + v], axis=v), name="pool")
    if one.kind == "max":
        return te.create_prim_func([data, best]).with_attr("tirx.noalias", True)

    def mean(n: Any, c: Any, m: Any, x: Any) -> Any:
        counts = [tirx.const(kernel_h * kernel_w, "float32")]
        if not one.whole and (top or left or below or right):
            counts = [
                (te.min(place * step - begin + kernel, size) - te.max(place * step - begin, 0)).astype("float32")
                for place, step, begin, kernel, size in ((m, stride_h, top, kernel_h, height), (x, stride_w, left, kernel_w, width))
            ]
        return best[n, c, m, x] / math.prod(counts[1:], start=counts[0])

    return te.create_prim_func([data, te.compute(output, mean, name="mean")]).with_attr("tirx.noalias", True)


def interleave(shape: Shape, output: Shape, phases: Phases) -> tirx.PrimFunc:
    """The larger image of phases that lie side by side as channels; see `Phases`. 1-D images have one row."""
    planes = (output[0], output[1], *((1,) if len(output) == 3 else ()), *output[2:])
    data = te.placeholder(shape, "float32", name="data")
    (down, across), (top, left), channels = phases.stride, phases.begin, planes[1]

    def element(n: Any, k: Any, y: Any, x: Any) -> Any:
        row, column = y + top, x + left
        phase = row % down * across + column % across
        return data(n, phase * channels + k if phases.outer else k * (down * across) + phase, row // down, column // across)

    function = te.create_prim_func([data, te.compute(planes, element, name="interleave")])
    return function.with_attrs({"tirx.noalias": True, INTERLEAVED: across})


def copy(shape: Shape, whole: Shape, axis: int, begin: int, dtype: str) -> tirx.PrimFunc:
    """A kernel that writes a tensor of `shape` into one of shape `whole`, from element `begin` of `axis` on."""
    shape, whole = shape or (1,), whole or (1,)
    loops = [f"i{place}" for place in range(len(shape))]
    names = [f"v{place}" for place in range(len(shape))]
    place = [f"{name} + {begin}" if number == axis and begin else name for number, name in enumerate(names)]
    return from_source(
        _COPY.format(
            shape=shape, whole=whole, dtype=dtype, loops=", ".join(loops), extents=", ".join(map(str, shape)), names=", ".join(names),
            kinds="S" * len(shape), place=", ".join(place),
        )
    )  # fmt: skip
