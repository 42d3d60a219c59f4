"""Memory-efficient convolution, MEC (Cho and Brand 2017, arXiv 1706.06873).

The input is lowered along its width only. Column partition x holds the Wf input columns of output column x, over all rows:

    L[n, c, x, y, v] = I[n, c, y, x*s + v*d]              y over the padded height

The product for output row m multiplies rows m*s ... m*s + Hf of every partition. These slices overlap for neighbouring output rows, so that
rows are stored once. Memory: N*Ci*Wo*Hi*Wf elements, about Hf/s times less than im2col.
"""

from __future__ import annotations

import math

from tvm import te

from im2win.compute import nest
from im2win.compute.padded import image
from im2win.spec.conv2d import Conv2d

LOWERED = "lowered"


def transform_shape(conv: Conv2d) -> tuple[int, int, int, int, int]:
    """Shape of the lowered tensor: [N, Ci, Wo, Hi + padding, Wf]."""
    return conv.batch, conv.in_channels, conv.output_size[1], conv.padded_size[0], conv.kernel[1]


def define(conv: Conv2d, pack: nest.Pack, row_block: int = 1, chunks: int = 1) -> list[te.Tensor]:
    """The kernel's arguments. Shapes: see `nest.placeholders`; the output has `conv.output_shape`. chunks: see `nest.convolve`."""
    inputs = nest.placeholders(conv, pack)
    at, channels = image(conv, inputs["data"]), conv.in_channels // conv.groups
    (stride_h, stride_w), (dilation_h, dilation_w) = conv.stride, conv.dilation
    lowered = te.compute(transform_shape(conv), lambda n, c, x, y, v: at(n, c, y, x * stride_w + v * dilation_w), name=LOWERED)
    return nest.convolve(
        conv, pack, inputs, lambda n, g, c, m, x, u, v: lowered[n, g * channels + c, x, m * stride_h + u * dilation_h, v], chunks
    )


def transform_bytes(conv: Conv2d) -> int:
    """Bytes of the lowered tensor."""
    return math.prod(transform_shape(conv)) * conv.itemsize
