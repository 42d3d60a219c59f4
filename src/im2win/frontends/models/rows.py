"""Softmax and layer normalisation along the last axis, in place of the loops that TVM legalises them to.

They run one row at a time, so that what a row's sums and maxima read stays in the first-level cache.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.frontends.models.elementary import ARITHMETIC

ROWS = "im2win.rows"  # attribute of a function: the number of outer axes of its output that are one loop over rows
SCHEDULED = "tirx.is_scheduled"  # attribute of functions whose loops are as they should be
LANES = 16
OPAQUE = 8  # relax's OpPatternKind of functions that are not fused


def _softmax(rows: int, count: int) -> tirx.PrimFunc:
    """The softmax of each row of a matrix.

    Vectors are written out, since a maximum along a vectorised axis stays scalar: LLVM may not reorder what NaN could change. A row's last
    vector overlaps the one before it; its sum counts the lanes that are new.
    """
    blocks, end, old = (count - 1) // LANES, count - LANES, -count % LANES
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("softmax")
        T.func_attr({"tirx.noalias": True, SCHEDULED: True, "op_pattern": OPAQUE})
        data, out = (T.arg(name, T.buffer((rows, count), "float32")) for name in ("data", "out"))
        with T.parallel(rows) as row:
            top, total, last = (T.alloc_buffer((LANES,), "float32") for _ in range(3))
            one = T.alloc_buffer((2,), "float32")
            with T.vectorized(LANES) as lane:
                T.buffer_store(top, data[row, end + lane], [lane])
            with T.serial(blocks) as block, T.vectorized(LANES) as lane:
                T.buffer_store(top, te.max(top[lane], data[row, block * LANES + lane]), [lane])
            T.buffer_store(one, _folded(te.max, top), [0])
            with T.vectorized(LANES) as lane:
                T.buffer_store(last, ARITHMETIC.exp_negative(data[row, end + lane] - one[0]), [lane])
            with T.vectorized(LANES) as lane:
                T.buffer_store(total, tirx.Select(lane >= old, last[lane], tirx.const(0, "float32")), [lane])
            with T.serial(blocks) as block, T.vectorized(LANES) as lane:
                place = [row, block * LANES + lane]
                T.buffer_store(out, ARITHMETIC.exp_negative(data[tuple(place)] - one[0]), place)
                T.buffer_store(total, total[lane] + out[tuple(place)], [lane])
            T.buffer_store(one, _fenced(tirx.const(1, "float32") / _folded(operator.add, total)), [1])
            with T.serial(blocks) as block, T.vectorized(LANES) as lane:
                place = [row, block * LANES + lane]
                T.buffer_store(out, out[tuple(place)] * one[1], place)
            with T.vectorized(LANES) as lane:
                T.buffer_store(out, last[lane] * one[1], [row, end + lane])
    return builder.get()


def softmax(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.softmax` of float32 along the last axis of at least `LANES` elements; other calls as they are."""
    (tensor,) = call.args
    *outer, count = (int(extent) for extent in tensor.ty.shape)
    if str(tensor.ty.dtype) != "float32" or int(call.attrs.axis) not in (-1, len(outer)) or count < LANES:
        return call
    function = _softmax(math.prod(outer), count)
    return relax.call_tir(builder.add_func(function, "softmax"), [tensor], tensor.ty)


def _folded(combine: Any, lanes: Any) -> Any:
    """The elements of a vector in one, by halves as vectors are reduced: a chain of them would take as many latencies."""
    values = [lanes[lane] for lane in range(LANES)]
    while len(values) > 1:
        half = len(values) // 2
        values = [combine(one, other) for one, other in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _fenced(value: Any) -> Any:
    """The value, which LLVM may not reorder with what reads it: it turns a product with a reciprocal into a division of every element."""
    return tirx.call_llvm_pure_intrin("float32", "llvm.arithmetic.fence", value)


def layer_norm(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.layer_norm` of float32 along the last axis; other calls as they are."""
    tensor, stated = call.args[0], call.attrs
    shape = [int(extent) for extent in tensor.ty.shape]
    axes = [int(axis) % len(shape) for axis in stated.axes]
    if str(tensor.ty.dtype) != "float32" or axes != [len(shape) - 1] or len(shape) < 2:
        return call

    def function(data: te.Tensor, gamma: te.Tensor, beta: te.Tensor) -> te.Tensor:
        count = tirx.const(shape[-1], "float32")
        one, two = te.reduce_axis((0, shape[-1]), "one"), te.reduce_axis((0, shape[-1]), "two")
        total = te.compute(shape[:-1], lambda *at: te.sum(data(*at, one), axis=one), name="total")
        middle = te.compute(shape, lambda *at: data(*at) - total(*at[:-1]) / count, name="middle")
        squares = te.compute(shape[:-1], lambda *at: te.sum(middle(*at, two) * middle(*at, two), axis=two), name="squares")
        small = tirx.const(float(stated.epsilon), "float32")
        scale = te.compute(shape[:-1], lambda *at: tirx.const(1, "float32") / te.sqrt(squares(*at) / count + small), name="scale")

        def normalised(*at: Any) -> Any:
            value = middle(*at) * scale(*at[:-1])
            value = value * gamma(at[-1]) if stated.scale else value
            return value + beta(at[-1]) if stated.center else value

        return te.compute(shape, normalised, name="layer_norm")

    return _rows(builder, function, list(call.args), len(shape) - 1, "layer_norm")


def _rows(builder: relax.BlockBuilder, function: Any, arguments: list[relax.Expr], outer: int, name: str) -> relax.Expr:
    return builder.call_te(function, *arguments, primfunc_name_hint=name, primfunc_attrs={ROWS: outer})


LEGALIZATIONS = {"relax.nn.softmax": softmax, "relax.nn.layer_norm": layer_norm}
