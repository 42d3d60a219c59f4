"""The transform kernel that stores a tensor of windows (im2win, im2col, MEC) in global memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.compute import lowered
from im2win.schedules.cuda.primitives import CHUNK, Expr
from im2win.spec.conv2d import Conv2d

THREADS = 256
First = Callable[[], Mapping[str, Expr]]
"""Emits, inside a kernel, the image n and the row m of the output that a part of the windows begins with."""


def _vector(conv: Conv2d, axes: str) -> int:
    """Elements that a thread copies at once: neighbouring channels where they are the innermost axis, else 1."""
    most = 4 if conv.itemsize == 1 else CHUNK // conv.itemsize  # TVM generates no wider zero of int8
    return math.gcd(conv.in_channels, most) if axes.endswith("c") else 1


def transform_kernel(conv: Conv2d, axes: str, name: str) -> Any:
    """The kernel (data, lowered). Neighbouring threads store neighbouring elements of the flat tensor `lowered`."""
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        data = T.arg("data", T.buffer(conv.input_shape, conv.dtype))
        out = T.arg("lowered", T.buffer((math.prod(lowered.shape(conv, axes)),), conv.dtype))
        launch_transform(conv, axes, data, out, lowered.shape(conv, axes))
    return builder.get()


def launch_transform(conv: Conv2d, axes: str, data: Any, out: Any, shape: tuple[int, ...], first: First | None = None) -> None:
    """Emits a launch of the transform.

    Args:
        data, out: the input [conv.input_shape], and the flat tensor.
        shape: extents of the tensor's axes.
        first: emits the first image and output row that the tensor holds; elements behind the last of the whole output are not written.
    """
    vector = _vector(conv, axes)
    count = math.prod(shape) // vector
    element, ends = lowered.element(conv, axes, data), {"n": conv.batch, "m": conv.output_size[0]}
    with T.launch_thread("blockIdx.x", -(-count // THREADS)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        at = bx * THREADS + tid
        indices, rest = [], at * vector
        for extent in reversed(shape[1:]):
            indices.append(rest % extent)
            rest = rest // extent
        indices = [rest, *reversed(indices)]
        inside = [at < count]
        for axis, start in (first() if first else {}).items():
            place = axes.index(axis)
            indices[place] = start + indices[place]
            inside += [indices[place] < ends[axis]] if ends[axis] % shape[place] else []
        with T.If(tirx.all(*inside)), T.Then(), T.vectorized(vector) as part:
            *outer, last = indices
            T.buffer_store(out, element(*outer, last + part), [at * vector + part])
