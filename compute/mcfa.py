"""MCFA: blocked im2col, one product a block (Fang and Chen, Computer Engineering 45(7), 2019, doi 10.19678/j.issn.1000-3428.0051507).

The input is divided into blocks by output width and filter size: a block is what some output rows need. The im2col matrix of each block

    M[n, c, u, v, m, x] = I[n, c, m*s + u*d, x*s + v*d]              m over the rows of the block

is multiplied by the filters, and the outputs of the blocks are stored in order. Only the matrices of blocks exist, one for each worker: K *
rows * Wo elements each, where im2col stores K * Ho * Wo for an image.
"""

from __future__ import annotations

from tvm import te

from im2win.compute import nest
from im2win.compute.padded import image
from im2win.spec.conv2d import Conv2d

BLOCK = "im2col_block"


def define(conv: Conv2d, pack: nest.Pack, row_block: int = 1, chunks: int = 1) -> list[te.Tensor]:
    """The kernel's arguments. Shapes: see `nest.placeholders`; the output has `conv.output_shape`. chunks: see `nest.convolve`."""
    inputs = nest.placeholders(conv, pack)
    at, channels = image(conv, inputs["data"]), conv.in_channels // conv.groups
    (stride_h, stride_w), (dilation_h, dilation_w) = conv.stride, conv.dilation
    out_h, out_w = conv.output_size
    matrix = te.compute(
        (conv.batch, conv.in_channels, *conv.kernel, out_h, out_w),
        lambda n, c, u, v, m, x: at(n, c, m * stride_h + u * dilation_h, x * stride_w + v * dilation_w),
        name=BLOCK,
    )
    return nest.convolve(conv, pack, inputs, lambda n, g, c, m, x, u, v: matrix[n, g * channels + c, u, v, m, x], chunks)


def transform_bytes(conv: Conv2d) -> int:
    """0: no whole matrix is stored."""
    return 0
