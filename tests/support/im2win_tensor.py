"""The im2win transform by itself, and inputs for it."""

from __future__ import annotations

import numpy as np
import tvm
from ops import host
from oracle import Array
from tvm import te

from im2win.codegen.llvm import llvm_target
from im2win.compute import im2win
from im2win.spec.conv2d import Conv2d


def transformed(conv: Conv2d, x: Array) -> Array:
    """The im2win tensor that TVM computes for an input."""
    data = te.placeholder(conv.input_shape, "float32", name="data")
    function = te.create_prim_func([data, im2win.transform(conv, data)])
    run = tvm.compile(function, llvm_target(host()))
    y = tvm.runtime.tensor(np.full(im2win.transform_shape(conv), np.nan, np.float32))
    run(tvm.runtime.tensor(x), y)
    return np.asarray(y.numpy())


def padded(conv: Conv2d, x: Array) -> Array:
    """The input as [N, C, H, W] with its zeros around it."""
    planes = x if conv.layout == "NCHW" else np.moveaxis(x, 3, 1)
    top, left, bottom, right = conv.padding
    return np.pad(planes, ((0, 0), (0, 0), (top, bottom), (left, right)))


def numbered(conv: Conv2d) -> Array:
    """An input in which every element is another number."""
    return np.arange(1, 1 + np.prod(conv.input_shape), dtype=np.float32).reshape(conv.input_shape)
