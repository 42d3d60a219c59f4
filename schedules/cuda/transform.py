"""The kernel that makes a tensor of windows from the input, for algorithms that store one."""

from __future__ import annotations

import math
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.compute import lowered
from im2win.problem import Conv2d
from im2win.schedules.cuda.shared import CHUNK

THREADS = 256


def _vector(conv: Conv2d, axes: str) -> int:
    """Elements that a thread moves at once: neighbouring channels, where they are innermost."""
    most = 4 if conv.dtype == "int8" else CHUNK // conv.itemsize  # TVM writes no wider zero of int8
    return math.gcd(conv.in_channels, most) if axes.endswith("c") else 1


def transform_kernel(conv: Conv2d, axes: str, name: str) -> Any:
    """The kernel: (data, lowered), the tensor's elements in order, neighbours by neighbouring threads."""
    shape, vector = lowered.shape(conv, axes), _vector(conv, axes)
    count = math.prod(shape) // vector
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        data = T.arg("data", T.buffer(conv.input_shape, conv.dtype))
        out = T.arg("lowered", T.buffer((math.prod(shape),), conv.dtype))
        element = lowered.element(conv, axes, data)
        with T.launch_thread("blockIdx.x", -(-count // THREADS)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
            at = bx * THREADS + tid
            with T.If(at < count), T.Then(), T.vectorized(vector) as part:
                indices, rest = [], at * vector
                for extent in reversed(shape[1:]):
                    indices.append(rest % extent)
                    rest = rest // extent
                last, *outer = indices
                T.buffer_store(out, element(rest, *reversed(outer), last + part), [at * vector + part])
    return builder.get()
