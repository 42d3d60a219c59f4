"""Implicit GEMM: im2col by index arithmetic, without a matrix in memory (Chetlur et al. 2014, arXiv 1410.0759).

The definition is im2col's; only the place of the matrix differs. The address of element (k, p) follows from a window offset (c, u, v) and a
pixel offset (m, x), while a panel of a few output rows is packed beside the product. With a 1x1 filter the matrix is the input itself and
is read in place. The workspace is the panels, never the matrix.
"""

from __future__ import annotations

from tvm import te

from im2win.compute import im2col, nest
from im2win.spec.conv2d import Conv2d


def define(conv: Conv2d, pack: nest.Pack, row_block: int = 1, chunks: int = 1) -> list[te.Tensor]:
    """The kernel's arguments. Shapes: see `nest.placeholders`; the output has `conv.output_shape`. chunks: see `nest.convolve`."""
    return im2col.define(conv, pack, row_block, chunks)


def transform_bytes(conv: Conv2d) -> int:
    """0: no whole matrix is stored."""
    return 0
