"""im2win convolution (Lu, Chu and Liu 2023, arXiv 2306.14320; Lu's thesis 2023, chapter 2, Alg. 2 and 3).

Transform (Alg. 2, eq. 2-2): one row of windows becomes one row, its columns stored one after the other,

    W[n, c, m, k*Hf + u] = I[n, c, m*s + u*d, k]          k over the padded width, u over kernel rows

so that window (m, x) is the contiguous run of Wf*Hf elements that starts at x*s*Hf (for dilation 1). Convolution (Alg. 3):

    O[n, j, m, x] = sum over c, v, u of W[n, c, m, (x*s + v*d)*Hf + u] * F[j, c, u, v]

(The thesis prints the index as n*s*Wf + v*Hf + u, which holds only for square filters.)
Memory (eq. 2-4 to 2-7): N*Ci*Ho*Hf*Wi elements against im2col's N*Ci*Hf*Wf*Ho*Wo.
"""

from __future__ import annotations

import math

from tvm import te

from im2win.compute import nest
from im2win.compute.padded import image
from im2win.spec.conv2d import Conv2d

IM2WIN = "im2win"


def transform_shape(conv: Conv2d) -> tuple[int, int, int, int]:
    """Shape of the im2win tensor: [N, Ci, Ho, (Wi + padding) * Hf]."""
    return conv.batch, conv.in_channels, conv.output_size[0], conv.padded_size[1] * conv.kernel[0]


def transform(conv: Conv2d, data: te.Tensor) -> te.Tensor:
    """The im2win transform (Alg. 2) of an input of `conv.input_shape`."""
    at, rows = image(conv, data), conv.kernel[0]
    stride, dilation = conv.stride[0], conv.dilation[0]
    return te.compute(
        transform_shape(conv), lambda n, c, m, i: at(n, c, m * stride + (i % rows) * dilation, i // rows), name=IM2WIN
    )


def define(conv: Conv2d, pack: nest.Pack, row_block: int = 1, chunks: int = 1) -> list[te.Tensor]:
    """The kernel's arguments. Shapes: see `nest.placeholders`; the output has `conv.output_shape`. chunks: see `nest.convolve`."""
    inputs = nest.placeholders(conv, pack)
    windows = transform(conv, inputs["data"])
    rows, channels = conv.kernel[0], conv.in_channels // conv.groups
    stride, dilation = conv.stride[1], conv.dilation[1]
    return nest.convolve(
        conv, pack, inputs, lambda n, g, c, m, x, u, v: windows[n, g * channels + c, m, (x * stride + v * dilation) * rows + u], chunks
    )


def transform_bytes(conv: Conv2d) -> int:
    """Bytes of the im2win tensor (eq. 2-4)."""
    return math.prod(transform_shape(conv)) * conv.itemsize
