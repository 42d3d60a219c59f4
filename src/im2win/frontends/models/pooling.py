"""Pooling on CPUs, one output row at a time.

A row of windows is first reduced over its rows, element by element, into a line in the first-level cache, which holds the padding on the
left and right as well; then over its columns. Both loops run along columns, in vectors.

    for plane, in parallel:
        for m:  line[k] = max over u of I[m*s + u - top, k];  O[m, x] = max over v of line[x*s + v]
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.frontends.models.parts import Pool
from im2win.frontends.models.program import Shape
from im2win.frontends.models.rows import OPAQUE, SCHEDULED


def pool(shape: Shape, output: Shape, one: Pool) -> tirx.PrimFunc:
    """The pooling of [N, C, H, W] tensors of float32, or maxima of integers of 8 bits."""
    (height, width), (out_h, out_w) = shape[2:], output[2:]
    (kernel_h, kernel_w), (stride_h, _), (top, left) = one.kernel, one.stride, one.begin
    planes, line = shape[0] * shape[1], (out_w - 1) * one.stride[1] + kernel_w
    reduced: Callable[[Any, Any], Any] = te.max if one.kind == "max" else operator.add
    nothing = te.min_value(one.dtype) if one.kind == "max" else tirx.const(0, one.dtype)
    read = min(width, line - left)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("pool")
        T.func_attr({"tirx.noalias": True, SCHEDULED: True, "op_pattern": OPAQUE})
        data = T.arg("data", T.buffer((planes, height, width), one.dtype))
        out = T.arg("out", T.buffer((planes, out_h, out_w), one.dtype))
        with T.parallel(planes) as plane:
            held, share = T.alloc_buffer((line,), one.dtype), T.alloc_buffer((out_w,), "float32")
            for begin, end in ((0, left), (left + read, line)):
                if end > begin:
                    with T.serial(end - begin) as k:
                        T.buffer_store(held, nothing, [begin + k])
            for first, last, rows in _bands(out_h, stride_h, kernel_h, top, height):
                if one.kind == "mean":
                    with T.serial(out_w) as x:
                        T.buffer_store(share, 1 / _count(one, x, kernel_h if one.whole else len(rows), width), [x])
                with T.serial(last - first) as step:
                    row = (first + step) * stride_h - top
                    with T.serial(read) as k:
                        values = [data[plane, row + u, k] for u in rows] or [nothing]  # a window may lie below the input
                        T.buffer_store(held, functools.reduce(reduced, values), [left + k])
                    with T.serial(out_w) as x:
                        value = functools.reduce(reduced, [held[x * one.stride[1] + v] for v in range(kernel_w)])
                        if one.kind == "mean":
                            value = value * share[x]
                        T.buffer_store(out, value, [plane, first + step, x])
    return builder.get()


def _bands(out_h: int, stride: int, kernel: int, top: int, height: int) -> Iterator[tuple[int, int, range]]:
    """Output rows (first, behind the last) whose windows have the same rows inside the input, and which these are."""
    inside = [range(max(0, top - m * stride), min(kernel, height + top - m * stride)) for m in range(out_h)]
    first = 0
    for m in range(1, out_h + 1):
        if m == out_h or inside[m] != inside[first]:
            yield first, m, inside[first]
            first = m


def _count(one: Pool, x: Any, rows: int, width: int) -> Any:
    """The number of elements that the mean of window `x` is over."""
    stride, kernel, left = one.stride[1], one.kernel[1], one.begin[1]
    if one.whole:
        return tirx.const(rows * kernel, "float32")
    inside = te.min(x * stride - left + kernel, width) - te.max(x * stride - left, 0)
    return (inside * rows).astype("float32")
