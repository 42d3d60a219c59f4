"""Direct convolution (thesis Alg. 1): windows are read from the input.

    O[n, j, m, x] = sum over c, u, v of I[n, c, m*s + u*d, x*s + v*d] * F[j, c, u, v]

There is no transformed tensor: the workspace is 0 bytes. With padding a schedule may stage the few input rows that a block of output rows
needs (block `pad`), zeros included. No padded copy of the whole input exists.
"""

from __future__ import annotations

from tvm import te

from im2win.compute import nest
from im2win.compute.padded import image
from im2win.spec.conv2d import Conv2d

PAD = "pad"


def define(conv: Conv2d, pack: nest.Pack, row_block: int = 1, chunks: int = 1) -> list[te.Tensor]:
    """The kernel's arguments. Shapes: see `nest.placeholders`; the output has `conv.output_shape`. chunks: see `nest.convolve`."""
    inputs = nest.placeholders(conv, pack)
    at = image(conv, inputs["data"])
    if any(conv.padding):
        padded = te.compute((conv.batch, conv.in_channels, *conv.padded_size), at, name=PAD)
        at = padded.__call__
    (stride_h, stride_w), (dilation_h, dilation_w) = conv.stride, conv.dilation
    channels = conv.in_channels // conv.groups
    return nest.convolve(
        conv,
        pack,
        inputs,
        lambda n, g, c, m, x, u, v: at(n, g * channels + c, m * stride_h + u * dilation_h, x * stride_w + v * dilation_w),
        chunks,
    )


def transform_bytes(conv: Conv2d) -> int:
    """0: nothing is stored before the product."""
    return 0
