"""Tensors that store the windows of a convolution, each named by the order of its axes.

    n image    c input channel    y input row, padding included    k input column, padding included
    m output row    u kernel row    x output column    v kernel column            y = m*s + u*d,  k = x*s + v*d

An axis y may be split into its pair (m, u), an axis k into (x, v). Rows or columns that windows share are then stored once a window. Every
lowering of the literature is such an order:

    ncyk      the input itself (NCHW)
    ncmku     im2win (arXiv 2306.14320): one row of windows is one row, its columns one after the other
    ncuvmx    im2col (Chellapilla et al. 2006): the matrix of all windows
    ncxyv     MEC (arXiv 1706.06873): lowered along the width only

With c as the last axis they suit NHWC: the elements of a window that share a tap are contiguous.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import te

from im2win.compute.padded import Expr, image
from im2win.spec.conv2d import Conv2d

LOWERED = "lowered"


@dataclass(frozen=True)
class Strides:
    """Element (n, c, m, x, u, v) of the windows lies at n*N + c*C + m*M + x*X + u*U + v*V + origin; strides in elements.

    padded: whether taps of border windows lie outside the tensor and count as zero; otherwise the tensor holds all taps.
    """

    n: int
    c: int
    m: int
    x: int
    u: int
    v: int
    origin: int = 0
    padded: bool = False


@functools.lru_cache(maxsize=64)
def oriented(axes: str, layout: str) -> str:
    """The order of axes for a layout: channels last for NHWC."""
    return axes if layout == "NCHW" else axes.replace("c", "") + "c"


def shape(conv: Conv2d, axes: str) -> tuple[int, ...]:
    """Extents of the axes."""
    (height, width), (out_h, out_w), (rows, cols) = conv.padded_size, conv.output_size, conv.kernel
    extents = {"n": conv.batch, "c": conv.in_channels, "y": height, "k": width, "m": out_h, "x": out_w, "u": rows, "v": cols}
    return tuple(extents[axis] for axis in axes)


@functools.lru_cache(maxsize=1024)
def transform_bytes(conv: Conv2d, axes: str) -> int:
    """Bytes of the tensor."""
    return math.prod(shape(conv, axes)) * conv.itemsize


def _windows(conv: Conv2d, of: dict[str, int]) -> tuple[int, int, int, int]:
    """Strides of m, x, u and v, from those of the axes."""
    split = {"m": ("y", conv.stride[0]), "x": ("k", conv.stride[1]), "u": ("y", conv.dilation[0]), "v": ("k", conv.dilation[1])}
    m, x, u, v = (of[axis] if axis in of else step * of[whole] for axis, (whole, step) in split.items())
    return m, x, u, v


def _axis_strides(axes: str, extents: tuple[int, ...]) -> dict[str, int]:
    return {axis: math.prod(extents[place + 1 :]) for place, axis in enumerate(axes)}


@functools.lru_cache(maxsize=1024)
def strides(conv: Conv2d, axes: str) -> Strides:
    """Strides of windows in the tensor with these axes."""
    of = _axis_strides(axes, shape(conv, axes))
    m, x, u, v = _windows(conv, of)
    return Strides(of["n"], of["c"], m, x, u, v)


@functools.lru_cache(maxsize=1024)
def input_strides(conv: Conv2d) -> Strides:
    """Strides of windows in the input, which is stored without padding."""
    of = _axis_strides("ncyk" if conv.layout == "NCHW" else "nykc", conv.input_shape)
    top, left, _, _ = conv.padding
    m, x, u, v = _windows(conv, of)
    return Strides(of["n"], of["c"], m, x, u, v, origin=-(top * of["y"] + left * of["k"]), padded=any(conv.padding))


def element(conv: Conv2d, axes: str, data: Expr) -> Callable[..., Expr]:
    """A function of indices: the element of the tensor with these axes, from an input of `conv.input_shape`."""
    at = image(conv, data)

    def of(*indices: Expr) -> Expr:
        i = dict(zip(axes, indices, strict=True))
        y = i["y"] if "y" in i else i["m"] * conv.stride[0] + i["u"] * conv.dilation[0]
        k = i["k"] if "k" in i else i["x"] * conv.stride[1] + i["v"] * conv.dilation[1]
        return at(i["n"], i["c"], y, k)

    return of


def transform(conv: Conv2d, axes: str, data: te.Tensor) -> te.Tensor:
    """The tensor with these axes, from an input of `conv.input_shape`."""
    return te.compute(shape(conv, axes), element(conv, axes, data), name=LOWERED)
