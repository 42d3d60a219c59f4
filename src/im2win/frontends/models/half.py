"""Kernels of float16 and bfloat16 models on channels-last tensors that are no convolutions: conversion, pooling, response normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx

from im2win.frontends.models.kernels import power
from im2win.frontends.models.parts import Pool, Response
from im2win.frontends.models.program import Shape

_SUM = "float32"  # element type of accumulators


@dataclass(frozen=True)
class Arithmetic:
    """How a device computes with float16 and bfloat16.

    Attributes:
        cast: ``cast(value, dtype)`` converts a number.
        compares: whether it takes maxima in these types, else in float32.
    """

    cast: Callable[[Any, str], Any]
    compares: bool


GPU = Arithmetic(lambda value, dtype: value.astype(dtype), compares=True)


def last_shape(shape: Shape) -> Shape:
    """[N, H, W, C] of [N, C, H, W]."""
    batch, channels, height, width = shape
    return batch, height, width, channels


def convert(shape: Shape, dtype: str, last: bool, to_dtype: str, to_last: bool, arithmetic: Arithmetic = GPU) -> tirx.PrimFunc:
    """A kernel that converts a tensor, given by its ONNX shape, to another type and order; `last` and `to_last` mean channels last."""
    data = te.placeholder(last_shape(shape) if last else shape, dtype, name="data")

    def place(*at: Any) -> Any:
        if to_last and not last:
            at = at[0], at[3], at[1], at[2]
        elif last and not to_last:
            at = at[0], at[2], at[3], at[1]
        value = data(*at)
        return value if dtype == to_dtype else arithmetic.cast(value, to_dtype)

    return te.create_prim_func([data, te.compute(last_shape(shape) if to_last else shape, place, name="converted")]).with_attr(
        "tirx.noalias", True
    )


def pool(shape: Shape, output: Shape, one: Pool, dtype: str, arithmetic: Arithmetic = GPU) -> tirx.PrimFunc:
    """Pooling of `dtype` on [N, H, W, C], for ONNX shapes [N, C, H, W]. Averages are accumulated in float32."""
    data = te.placeholder(last_shape(shape), dtype, name="data")
    (kernel_h, kernel_w), (stride_h, stride_w), (top, left) = one.kernel, one.stride, one.begin
    height, width = shape[2:]
    below = (output[2] - 1) * stride_h + kernel_h - top > height
    right = (output[3] - 1) * stride_w + kernel_w - left > width
    u, v = te.reduce_axis((0, kernel_h), "u"), te.reduce_axis((0, kernel_w), "v")
    largest = one.kind == "max"
    found_dtype = dtype if largest and arithmetic.compares else _SUM

    def window(n: Any, m: Any, k: Any, c: Any) -> Any:
        y, x = m * stride_h + u - top, k * stride_w + v - left
        inside = [y >= 0] * bool(top) + [y < height] * below + [x >= 0] * bool(left) + [x < width] * right
        value = data[n, y, x, c] if found_dtype == dtype else arithmetic.cast(data(n, y, x, c), _SUM)
        if inside:
            nothing = te.min_value(found_dtype) if largest else tirx.const(0, found_dtype)
            value = te.if_then_else(te.all(*inside) if len(inside) > 1 else inside[0], value, nothing)
        return (te.max if largest else te.sum)(value, axis=[u, v])

    found = te.compute(last_shape(output), window, name="pool")
    if found_dtype == dtype:
        return te.create_prim_func([data, found]).with_attr("tirx.noalias", True)
    if largest:
        kept = te.compute(last_shape(output), lambda *at: arithmetic.cast(found(*at), dtype), name="kept")
        return te.create_prim_func([data, kept]).with_attr("tirx.noalias", True)

    def mean(n: Any, m: Any, k: Any, c: Any) -> Any:
        counts = [tirx.const(kernel_h * kernel_w, _SUM)]
        if not one.whole and (top or left or below or right):
            counts = [
                (te.min(place * step - begin + kernel, size) - te.max(place * step - begin, 0)).astype(_SUM)
                for place, step, begin, kernel, size in ((m, stride_h, top, kernel_h, height), (k, stride_w, left, kernel_w, width))
            ]
        return arithmetic.cast(found(n, m, k, c) / math.prod(counts[1:], start=counts[0]), dtype)

    return te.create_prim_func([data, te.compute(last_shape(output), mean, name="mean")]).with_attr("tirx.noalias", True)


def response(shape: Shape, one: Response, last: bool, dtype: str, arithmetic: Arithmetic = GPU) -> tirx.PrimFunc:
    """ONNX's LRN of `dtype` for [N, C, ...], or on [N, H, W, C] if `last`, computed in float32; see `kernels.response`."""
    stored, axis = (last_shape(shape), 3) if last else (shape, 1)
    data = te.placeholder(stored, dtype, name="data")
    near = te.reduce_axis((0, one.size), "near")
    first = (one.size - 1) // 2

    def square(*at: Any) -> Any:
        channel = at[axis] + near - first
        value = arithmetic.cast(data(*at[:axis], channel, *at[axis + 1 :]), _SUM)
        inside = te.all(channel >= 0, channel < stored[axis])
        return te.sum(te.if_then_else(inside, value * value, tirx.const(0, _SUM)), axis=near)

    squares = te.compute(stored, square, name="squares")

    def normalised(*at: Any) -> Any:
        total = tirx.const(one.bias, _SUM) + tirx.const(one.alpha / one.size, _SUM) * squares(*at)
        return arithmetic.cast(arithmetic.cast(data(*at), _SUM) / power(total, one.beta), dtype)

    return te.create_prim_func([data, te.compute(stored, normalised, name="response")]).with_attr("tirx.noalias", True)
