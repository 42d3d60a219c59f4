"""Winograd convolution F(m x m, kernel) (Winograd 1980; Lavin and Gray 2015, arXiv 1509.09308), stride 1, dilation 1.

The output is cut into tiles of m x m. A tile depends on t_h x t_w inputs, t = m + kernel - 1; neighbouring input tiles overlap by kernel -
1:

    V = B^T d B        U = G g G^T (ahead of time, `packing.winograd`)        M = sum over c of U * V        Y = A^T M A

Tensors are named by the order of their axes:

    n image    c input channel of all groups    y tile row    x tile column    i row in a tile    j column in a tile
    b block of output channels    k output channel in its block

The product is the same sum in two forms:

    EWMM     V ncyxij, M nbyxijk: element by element, tile by tile
    BGEMM    V ijcnyx, M ijbnyxk: t_h * t_w matrix products of channels and all tiles

`define`, for CPUs, is BGEMM on row blocks: V and M of a few rows of tiles, or of a few small images, with channels in vectors. Tiles at the
border read zeros beyond the input and its padding, and their outputs beyond the output are dropped. Transforms are matvec programs
(`numerics.matvec_program`), written as one expression for each row: a compiler that unrolls the rows finds the common subexpressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tvm import te, tirx

from im2win.compute import nest
from im2win.compute.padded import Image
from im2win.numerics.matvec_program import program
from im2win.numerics.winograd_matrices import Matrix, Transform, transform
from im2win.packing.winograd import WinogradPack
from im2win.spec.conv2d import Conv2d

TRANSPOSED_IN = "winograd_transposed"  # input rows of a row block with channels innermost, where the layout has them outermost
PADDED = "winograd_padded"  # the row block with its zeros
DOWN = "winograd_down"  # B^T d
INPUT = "winograd_input"  # V
BACK = "winograd_back"  # A^T M
OUTPUT = "winograd_output"  # Y
EWMM, BGEMM = "ncyxij", "ijcnyx"

Expr = Any


def forms(conv: Conv2d, outputs: int) -> tuple[Transform, Transform]:
    """(transform of columns, along the height; transform of rows, along the width)."""
    return transform(outputs, conv.kernel[0]), transform(outputs, conv.kernel[1])


def tiles(conv: Conv2d, outputs: int) -> tuple[int, int]:
    """(rows, columns) of tiles of an image."""
    height, width = conv.output_size
    return -(-height // outputs), -(-width // outputs)


def shape(conv: Conv2d, outputs: int, axes: str) -> tuple[int, ...]:
    """Extents of the axes n, c, y, x, i and j."""
    (down, across), (rows, cols) = forms(conv, outputs), tiles(conv, outputs)
    extents = {"n": conv.batch, "c": conv.in_channels, "y": rows, "x": cols, "i": down.size, "j": across.size}
    return tuple(extents[axis] for axis in axes)


def transform_bytes(conv: Conv2d, outputs: int) -> int:
    """Bytes of V of the whole input: t_h * t_w * Ci * tiles elements."""
    return math.prod(shape(conv, outputs, EWMM)) * conv.itemsize


def applied(matrix: Matrix, row: Expr, at: Callable[[int], Expr], dtype: str) -> Expr:
    """Element `row` of matrix * vector, where `at(k)` is element k of the vector, of type `dtype`."""

    def step(left: Expr | None, factor: Fraction, right: Expr) -> Expr:
        size = abs(factor) if left is not None else factor
        term = right if size == 1 else right * tirx.const(float(size), dtype)
        if left is None:
            return term
        return left + term if factor > 0 else left - term

    *others, value = program(matrix).run([at(k) for k in range(len(matrix[0]))], step)
    for place, other in reversed(list(enumerate(others))):
        value = tirx.Select(row == place, other, value)
    return value


def image(conv: Conv2d, data: te.Tensor) -> Image:
    """A function that reads the input at padded coordinates. It gives zero at any distance outside, which `padded.image` need not do."""
    top, left, _, _ = conv.padding
    nchw = conv.layout == "NCHW"

    def at(n: Expr, c: Expr, y: Expr, x: Expr) -> Expr:
        row, col = y - top, x - left
        value = data[n, c, row, col] if nchw else data[n, row, col, c]
        return te.if_then_else(te.all(row >= 0, row < conv.height, col >= 0, col < conv.width), value, tirx.const(0, conv.dtype))

    return at


def input_transform(conv: Conv2d, outputs: int, axes: str, data: te.Tensor) -> te.Tensor:
    """V with these axes (a permutation of n, c, y, x, i, j), from an input of `conv.input_shape`."""
    at, (down, across) = image(conv, data), forms(conv, outputs)
    order = [axis for axis in axes if axis != "j"] + ["w"]  # w: column inside the tile, not yet transformed

    def columns(*indices: Expr) -> Expr:
        e = dict(zip(order, indices, strict=True))
        return applied(down.bt, e["i"], lambda u: at(e["n"], e["c"], e["y"] * outputs + u, e["x"] * outputs + e["w"]), conv.dtype)

    half = te.compute((*shape(conv, outputs, axes.replace("j", "")), across.size), columns, name=DOWN)

    def rows(*indices: Expr) -> Expr:
        e = dict(zip(axes, indices, strict=True))
        return applied(across.bt, e["j"], lambda v: half(*(e[axis] for axis in order[:-1]), v), conv.dtype)

    return te.compute(shape(conv, outputs, axes), rows, name=INPUT)


def _whole(conv: Conv2d, pack: WinogradPack, axes: str) -> list[te.Tensor]:
    """A form that stores the whole of V and M. V's axes are `axes`; M's are the same with channel blocks instead of c, and k last."""
    inputs, (_, cols) = nest.placeholders(conv, pack), tiles(conv, pack.outputs)  # type: ignore[arg-type]
    given = input_transform(conv, pack.outputs, axes, inputs["data"])
    per_group, channels, filters = pack.blocks_per_group(conv), conv.in_channels // conv.groups, inputs["filter"]
    c = te.reduce_axis((0, channels), "c")
    order = axes.replace("c", "b") + "k"
    extents = dict(zip(axes, shape(conv, pack.outputs, axes), strict=True)) | {"b": pack.blocks(conv), "k": pack.block}

    def product(*indices: Expr) -> Expr:
        e = dict(zip(order, indices, strict=True))
        value = given(*({**e, "c": e["b"] // per_group * channels + c}[axis] for axis in axes))
        return te.sum(value * filters(*({**e, "c": c}[axis] for axis in pack.order)), axis=[c])

    sums = te.compute(tuple(extents[axis] for axis in order), product, name=nest.CONV)

    def at(n: Expr, b: Expr, tile: Expr, i: Expr, j: Expr, k: Expr) -> Expr:
        e = {"n": n, "b": b, "y": tile // cols, "x": tile % cols, "i": i, "j": j, "k": k}
        return sums(*(e[axis] for axis in order))

    return _write_back(conv, pack, inputs, tiles(conv, pack.outputs)[0], 1, lambda n, row_block, b, tile, i, j, k: at(n, b, tile, i, j, k))


def ewmm(conv: Conv2d, pack: WinogradPack) -> list[te.Tensor]:
    """The element-wise form; returns the kernel's arguments, filters in the layout of `pack`."""
    return _whole(conv, pack, EWMM)


def bgemm(conv: Conv2d, pack: WinogradPack) -> list[te.Tensor]:
    """The form of t_h * t_w matrix products; returns the kernel's arguments, filters in the layout of `pack`."""
    return _whole(conv, pack, BGEMM)


def _write_back(
    conv: Conv2d, pack: WinogradPack, inputs: dict[str, te.Tensor], row_block: int, images: int, product: Callable[..., Expr]
) -> list[te.Tensor]:
    """The output transform, and the epilogue and write-back of all algorithms.

    Args:
        product: called with (group of images, row block, b, tile in the row block, i, j, k).
    """
    m, (down, across), (rows, cols) = pack.outputs, forms(conv, pack.outputs), tiles(conv, pack.outputs)

    def columns(n: Expr, s: Expr, b: Expr, tile: Expr, i: Expr, j: Expr, k: Expr) -> Expr:
        return applied(down.at, i, lambda u: product(n, s, b, tile, u, j, k), conv.dtype)

    extents = (conv.batch // images, rows // row_block, pack.blocks(conv), images * row_block * cols)
    back = te.compute((*extents, m, across.size, pack.block), columns, name=BACK)

    def rows_(n: Expr, b: Expr, h: Expr, w: Expr, k: Expr) -> Expr:
        s, line = h // (row_block * m), h % (row_block * m)
        tile = (n % images * row_block + line // m) * cols + w // m
        return applied(across.at, w % m, lambda v: back[n // images, s, b, tile, line % m, v, k], conv.dtype)

    output = te.compute((conv.batch, pack.blocks(conv), rows * m, cols * m, pack.block), rows_, name=OUTPUT)
    return nest._finish(conv, pack, inputs, output, lambda m, x: (m, x))  # type: ignore[arg-type]


def _row_blocks(conv: Conv2d, pack: WinogradPack, data: te.Tensor, row_block: int, images: int) -> te.Tensor:
    """The padded input as row blocks, [group of images, row block, channel block, image, row, column, channel in its vector]."""
    m, lanes, (down, across), (rows, cols) = pack.outputs, pack.channels, forms(conv, pack.outputs), tiles(conv, pack.outputs)
    share, blocks = conv.in_channels // conv.groups, pack.depth(conv) // lanes
    step, (top, left, _, _), zero = row_block * m, conv.padding, tirx.const(0, conv.dtype)
    height, width = step - m + down.size, (cols - 1) * m + across.size
    extents = (conv.batch // images, rows // row_block, conv.groups * blocks, images)

    def channel(b: Expr, lane: Expr) -> tuple[Expr, Expr]:
        inside = b % blocks * lanes + lane
        return b // blocks * share + inside, inside < share

    def nhwc(n: Expr, s: Expr, b: Expr, e: Expr, h: Expr, w: Expr, lane: Expr) -> Expr:
        (c, exists), row, col = channel(b, lane), s * step + h - top, w - left
        within = [row >= 0, row < conv.height, col >= 0, col < conv.width] + ([exists] if share % lanes else [])
        return te.if_then_else(te.all(*within), data[n * images + e, row, col, c], zero)

    if conv.layout == "NHWC":
        return te.compute((*extents, height, width, lanes), nhwc, name=PADDED)

    def transpose(n: Expr, s: Expr, b: Expr, e: Expr, h: Expr, x: Expr, lane: Expr) -> Expr:
        c, exists = channel(b, lane)
        row = te.max(te.min(s * step + h - top, conv.height - 1), 0)  # a row outside is any row here, and zeros in PADDED
        value = data[n * images + e, c, row, x]
        return te.if_then_else(exists, value, zero) if share % lanes else value

    transposed = te.compute((*extents, height, conv.width, lanes), transpose, name=TRANSPOSED_IN)

    def nchw(n: Expr, s: Expr, b: Expr, e: Expr, h: Expr, w: Expr, lane: Expr) -> Expr:
        row, col = s * step + h - top, w - left
        within = te.all(row >= 0, row < conv.height, col >= 0, col < conv.width)
        return te.if_then_else(within, transposed[n, s, b, e, h, col, lane], zero)

    return te.compute((*extents, height, width, lanes), nchw, name=PADDED)


def define(conv: Conv2d, pack: WinogradPack, row_block: int = 1, images: int = 1) -> list[te.Tensor]:
    """The kernel's arguments. Shapes: see `nest.placeholders`; the output has `conv.output_shape`.

    Args:
        row_block: rows of tiles that are transformed and multiplied together, a divisor of an image's rows of tiles.
        images: images that are transformed and multiplied together, a divisor of the batch.
    """
    m, lanes, (down, across), (rows, cols) = pack.outputs, pack.channels, forms(conv, pack.outputs), tiles(conv, pack.outputs)
    blocks, per_group, line = pack.depth(conv) // lanes, pack.blocks_per_group(conv), images * row_block * cols
    inputs = nest.placeholders(conv, pack)  # type: ignore[arg-type]
    padded = _row_blocks(conv, pack, inputs["data"], row_block, images)
    extents, (_, _, channel_blocks, _, _, width, _) = (conv.batch // images, rows // row_block), padded.shape
    half = te.compute(
        (*extents, channel_blocks, images * row_block, down.size, width, lanes),
        lambda n, s, b, y, i, w, lane: applied(
            down.bt, i, lambda u: padded[n, s, b, y // row_block, y % row_block * m + u, w, lane], conv.dtype
        ),
        name=DOWN,
    )
    given = te.compute(
        (*extents, channel_blocks, down.size, across.size, line, lanes),
        lambda n, s, b, i, j, p, lane: applied(across.bt, j, lambda v: half[n, s, b, p // cols, i, p % cols * m + v, lane], conv.dtype),
        name=INPUT,
    )
    block, lane = te.reduce_axis((0, blocks), "block"), te.reduce_axis((0, lanes), "lane")
    sums = te.compute(
        (*extents, pack.blocks(conv), down.size, across.size, line, pack.block),
        lambda n, s, b, i, j, p, k: te.sum(
            given[n, s, b // per_group * blocks + block, i, j, p, lane] * inputs["filter"][b, i, j, block * lanes + lane, k],
            axis=[block, lane],
        ),
        name=nest.CONV,
    )
    return _write_back(conv, pack, inputs, row_block, images, lambda n, s, b, p, i, j, k: sums[n, s, b, i, j, p, k])
