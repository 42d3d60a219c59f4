"""Depthwise convolution: the direct form of `compute.direct` where every group has one input channel, so that no sum over channels is left.

    O[n, j, m, x] = sum over u, v of I[n, j // q, m*s + u*d, x*s + v*d] * F[j, u, v]        q = out_channels / in_channels

Channel blocks run over the output channels of all groups (`packing.cpu_channels`). The padded input is read in one of two orders, so that
what a vector holds lies side by side:

    channels    pad[n, jo, s, y, x, ji]  channel block, row block, row in it, column, channel in the block
    windows     pad[n, c, y, p, x]       channel, row, column modulo the stride, column divided by the stride

Rows and columns of the product are rounded up to whole row blocks and whole vectors. Windows beyond the output read zeros and are dropped.
No schedule stores `pad` as a whole: a parallel step stages what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx

from im2win.compute import nest
from im2win.packing.cpu_blocked import FilterPack
from im2win.packing.cpu_channels import ChannelPack
from im2win.spec.conv2d import Conv2d

PAD = "pad"
TURNED = "turned"  # input rows with channels innermost, where vectors hold channels and the layout has them outermost

Expr = Any


def channels(conv: Conv2d, pack: ChannelPack, row_block: int) -> list[te.Tensor]:
    """The kernel's arguments, for vectors of channels. Shapes: see `nest.placeholders`; the output has `conv.output_shape`."""
    inputs, (out_h, out_w) = nest.placeholders(conv, pack), conv.output_size  # type: ignore[arg-type]
    data, row_blocks, last = inputs["data"], -(-out_h // row_block), conv.out_channels // conv.groups
    step, reach = row_block * conv.stride[0], (_reach(conv, 0, row_blocks * row_block), _reach(conv, 1, out_w))
    shape = conv.batch, pack.blocks(conv), row_blocks, _reach(conv, 0, row_block)

    def channel(jo: Expr, ji: Expr) -> tuple[Expr, list[Expr]]:
        j = jo * pack.block + ji
        return j // last if last > 1 else j, [j < conv.out_channels] if conv.out_channels % pack.block else []

    def turned_row(n: Expr, jo: Expr, s: Expr, y: Expr, x: Expr, ji: Expr) -> Expr:
        (c, exists), row = channel(jo, ji), s * step + y - conv.padding[0]
        return _zero_unless(conv, exists, data[n, c, te.max(te.min(row, conv.height - 1), 0), x])  # rows outside are zeros in PAD

    def nchw(n: Expr, jo: Expr, s: Expr, y: Expr, x: Expr, ji: Expr) -> Expr:
        _, col, inside = _place(conv, s * step + y, x, reach)
        return _zero_unless(conv, inside, turned[n, jo, s, y, col, ji])

    def nhwc(n: Expr, jo: Expr, s: Expr, y: Expr, x: Expr, ji: Expr) -> Expr:
        (c, exists), (row, col, inside) = channel(jo, ji), _place(conv, s * step + y, x, reach)
        return _zero_unless(conv, [*inside, *exists], data[n, row, col, c])

    if conv.layout == "NCHW":
        turned = te.compute((*shape, conv.width, pack.block), turned_row, name=TURNED)
    padded = te.compute((*shape, reach[1], pack.block), nchw if conv.layout == "NCHW" else nhwc, name=PAD)

    def operand(n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr, u: Expr, v: Expr) -> Expr:
        y, x = m % row_block * conv.stride[0] + u * conv.dilation[0], x * conv.stride[1] + v * conv.dilation[1]
        return padded[n, jo, m // row_block, y, x, ji]

    return _convolve(conv, pack, inputs, (row_blocks * row_block, out_w), operand)


def unstaged(conv: Conv2d, pack: ChannelPack) -> list[te.Tensor]:
    """The kernel's arguments, for vectors of channels that are read from the input, in NHWC, one filter a channel. No `pad`."""
    inputs, (out_h, out_w) = nest.placeholders(conv, pack), conv.output_size  # type: ignore[arg-type]
    reach = _reach(conv, 0, out_h), _reach(conv, 1, out_w)

    def operand(n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr, u: Expr, v: Expr) -> Expr:
        y, x = m * conv.stride[0] + u * conv.dilation[0], x * conv.stride[1] + v * conv.dilation[1]
        row, col, inside = _place(conv, y, x, reach)
        return _zero_unless(conv, inside, inputs["data"][n, row, col, jo * pack.block + ji])

    return _convolve(conv, pack, inputs, (out_h, out_w), operand)


def windows(conv: Conv2d, pack: ChannelPack, row_block: int, lanes: int) -> list[te.Tensor]:
    """The kernel's arguments, for vectors of `lanes` neighbouring windows of one channel, in NCHW. Shapes: as for `channels`."""
    inputs = nest.placeholders(conv, pack)  # type: ignore[arg-type]
    rows, cols = (_whole(size, part) for size, part in zip(conv.output_size, (row_block, lanes), strict=True))
    stride, last = conv.stride[1], conv.out_channels // conv.groups
    height, width = _reach(conv, 0, rows), _whole(_reach(conv, 1, cols), stride)

    def phases(n: Expr, c: Expr, y: Expr, p: Expr, x: Expr) -> Expr:
        row, col, inside = _place(conv, y, x * stride + p, (height, width))
        return _zero_unless(conv, inside, inputs["data"][n, c, row, col])

    padded = te.compute((conv.batch, conv.in_channels, height, stride, width // stride), phases, name=PAD)

    def operand(n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr, u: Expr, v: Expr) -> Expr:
        y, x, j = m * conv.stride[0] + u * conv.dilation[0], x * stride + v * conv.dilation[1], jo * pack.block + ji
        return padded[n, j // last if last > 1 else j, y, x % stride, x // stride]

    return _convolve(conv, pack, inputs, (rows, cols), operand)


def _whole(size: int, part: int) -> int:
    return -(-size // part) * part


def _reach(conv: Conv2d, axis: int, outputs: int) -> int:
    """Rows (axis 0) or columns of the padded input that so many outputs read."""
    return (outputs - 1) * conv.stride[axis] + conv.window[axis]


def _place(conv: Conv2d, y: Expr, x: Expr, reach: tuple[int, int]) -> tuple[Expr, Expr, list[Expr]]:
    """(row, column, conditions under which they are in the input) of padded coordinates, each below its number in `reach`."""
    (top, left, _, _), (height, width) = conv.padding, reach
    row, col = y - top, x - left
    asked = (
        (row >= 0, top > 0), (row < conv.height, height - top > conv.height), (col >= 0, left > 0),
        (col < conv.width, width - left > conv.width),
    )  # fmt: skip
    return row, col, [condition for condition, needed in asked if needed]


def _zero_unless(conv: Conv2d, conditions: list[Expr], value: Expr) -> Expr:
    if not conditions:
        return value
    return te.if_then_else(te.all(*conditions) if len(conditions) > 1 else conditions[0], value, tirx.const(0, conv.dtype))


def _convolve(
    conv: Conv2d, pack: ChannelPack, inputs: dict[str, te.Tensor], size: tuple[int, int], operand: Callable[..., Expr]
) -> list[te.Tensor]:
    """The product of `size` (rows, columns) as a sum over taps, the epilogue and the write-back; returns the kernel's arguments.

    operand: (n, channel block, output row, output column, channel in the block, u, v) -> element.
    """
    u, v = te.reduce_axis((0, conv.kernel[0]), "u"), te.reduce_axis((0, conv.kernel[1]), "v")
    product = te.compute(
        (conv.batch, pack.blocks(conv), *size, pack.block),
        lambda n, jo, m, x, ji: te.sum(
            operand(n, jo, m, x, ji, u, v) * inputs["filter"][jo, u * conv.kernel[1] + v, ji], axis=[u, v]
        ),
        name=nest.CONV,
    )
    # The epilogue only asks for the output's channels and blocks, which are those of a layer of one group.
    return nest._finish(pack.single_group(conv), FilterPack(pack.block), inputs, product, lambda m, x: (m, x))
