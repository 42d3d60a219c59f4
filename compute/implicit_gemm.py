"""Implicit GEMM: im2col by index arithmetic, no matrix in memory (Chetlur et al. 2014, arXiv 1410.0759).

The definition is im2col's; what differs is where the matrix lives. Here element (k, p) is found from a window offset (c, u, v) and a pixel
offset (m, x) while a panel of a few output rows is packed beside the product, or read in place where a 1x1 filter makes the matrix the
input itself. Extra memory: the panels, never the matrix.
"""

from __future__ import annotations

from tvm import te

from im2win.compute import im2col
from im2win.packing.cpu_blocked import FilterPack
from im2win.spec.conv2d import Conv2d


def define(conv: Conv2d, pack: FilterPack, strip: int = 1) -> list[te.Tensor]:
    """The kernel's arguments; see `nest` for their shapes."""
    return im2col.define(conv, pack, strip)


def transform_bytes(conv: Conv2d) -> int:
    """No whole matrix is ever stored."""
    return 0
