"""Kernels that neither im2win's registry nor TVM's importer has: local response normalisation, and copies into a part of a tensor."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.script import from_source

from im2win.models.parts import Response
from im2win.models.program import Shape

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
    """ONNX's LRN on [N, C, ...]. (TVM's importer divides by fewer channels at the border, which ONNX does not.)

    Powers that ONNX models use become square roots, which vectorise: t**0.75 = sqrt(t) * sqrt(sqrt(t)).
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
        return data(*at) / _power(total, one.beta)

    return te.create_prim_func([data, te.compute(shape, normalised, name="response")]).with_attr("tirx.noalias", True)


def _power(value: Any, exponent: float) -> Any:
    root = te.sqrt(value)
    known = {0.5: root, 0.75: root * te.sqrt(root), 1.0: value}
    return known.get(exponent, te.power(value, tirx.const(exponent, "float32")))


def copy(shape: Shape, whole: Shape, axis: int, begin: int, dtype: str) -> tirx.PrimFunc:
    """A tensor of `shape` written into one of shape `whole`, from element `begin` of `axis` on."""
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
