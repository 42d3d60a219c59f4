"""im2col and matrix product (thesis section 2.1.3; Chellapilla et al. 2006).

    M[n, g, (c, u, v), m*Wo + x] = I[n, g*Ci/G + c, m*s + u*d, x*s + v*d]        O = F * M

Every window is stored: N*Ci*Hf*Wf*Ho*Wo elements (eq. 2-5), up to Hf*Wf times the input.
"""

from __future__ import annotations

import math

from tvm import te

from im2win.compute import nest
from im2win.compute.padded import Expr, image
from im2win.spec.conv2d import Conv2d

IM2COL = "im2col"


def transform_shape(conv: Conv2d) -> tuple[int, int, int, int]:
    """Shape of the matrix: [N, groups, Ci/groups * Hf * Wf, Ho * Wo]."""
    return conv.batch, conv.groups, math.prod(conv.filter_shape[1:]), math.prod(conv.output_size)


def transform(conv: Conv2d, pack: nest.Pack, data: te.Tensor) -> te.Tensor:
    """The im2col matrix of an input of `conv.input_shape`, its K rows in the order of the packed filter."""
    at, out_w, channels = image(conv, data), conv.output_size[1], conv.in_channels // conv.groups
    (stride_h, stride_w), (dilation_h, dilation_w) = conv.stride, conv.dilation

    def element(n: Expr, g: Expr, k: Expr, p: Expr) -> Expr:
        c, u, v = nest.split_tap(conv, pack, k)
        return at(n, g * channels + c, p // out_w * stride_h + u * dilation_h, p % out_w * stride_w + v * dilation_w)

    return te.compute(transform_shape(conv), element, name=IM2COL)


def define(conv: Conv2d, pack: nest.Pack, row_block: int = 1, chunks: int = 1) -> list[te.Tensor]:
    """The kernel's arguments. Shapes: see `nest.placeholders`; the output has `conv.output_shape`. chunks: see `nest.convolve`."""
    inputs = nest.placeholders(conv, pack)
    return nest.multiply(conv, pack, inputs, transform(conv, pack, inputs["data"]), row_block, chunks)


def transform_bytes(conv: Conv2d) -> int:
    """Bytes of the matrix (eq. 2-5)."""
    return math.prod(transform_shape(conv)) * conv.itemsize
