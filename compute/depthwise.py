"""Depthwise convolution: the direct form of `compute.direct` where every group has one input channel, so that no sum over channels is left.

    O[n, j, m, x] = sum over u, v of I[n, j // q, m*s + u*d, x*s + v*d] * F[j, u, v]        q = out_channels / in_channels

Channel blocks run over the output channels of all groups. Where blocks do not divide the channels, the last block is the last channels,
some of which belong to the block before as well. Outputs of a block are taken from the first block that has them.

A vector holds channels or neighbouring windows. `channels` reads the input in place, which has channels side by side in NHWC. The others
stage the padded input, in an order in which what a vector holds lies side by side:

    channels_staged    pad[n, jo, s, y, x, ji]    channel block, block of output rows, row, column, channel in the block
    windows            pad[n, c, y, p, x]         channel, row, column modulo the stride, column divided by the stride

Their rows and columns are rounded up to whole row blocks and whole vectors. Windows beyond the output read zeros and are dropped. No
schedule stores `pad` as a whole: a parallel step stages what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx

from im2win.compute import nest
from im2win.compute.arithmetic import TensorExpressions
from im2win.packing.cpu_channels import ChannelPack
from im2win.spec import activations
from im2win.spec.arithmetic import Arithmetic
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

PAD = "pad"
TURNED = "turned"  # input rows with channels innermost, where vectors hold channels and the layout has them outermost

Expr = Any


@dataclass(frozen=True)
class Target:
    """What a definition depends on beside the layer.

    expressions: the operations of activations in a type. packed_bias: whether the bias comes in channel blocks, as CPU kernels take it.
    out: name of the output and of the block that writes it.
    """

    expressions: Callable[[str], Arithmetic] = TensorExpressions
    packed_bias: bool = True
    out: str = nest.OUT


CPU = Target()


def channels(conv: Conv2d, pack: ChannelPack) -> list[te.Tensor]:
    """The kernel's arguments, for vectors of channels that are read in place. Shapes: see `nest.placeholders`; NHWC, q = 1."""
    inputs, (out_h, out_w) = _placeholders(conv, pack), conv.output_size
    reach = _reach(conv, 0, out_h), _reach(conv, 1, out_w)

    def operand(n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr, u: Expr, v: Expr) -> Expr:
        y, x = m * conv.stride[0] + u * conv.dilation[0], x * conv.stride[1] + v * conv.dilation[1]
        row, col, inside = _place(conv, y, x, reach)
        return _zero_unless(conv, inside, inputs["data"][n, row, col, _channel(conv, pack, jo, ji)])

    return _convolve(conv, pack, inputs, (out_h, out_w), operand)


def channels_staged(conv: Conv2d, pack: ChannelPack, row_block: int, target: Target = CPU, cols: int = 1) -> list[te.Tensor]:
    """The kernel's arguments, for vectors of channels of a padded copy. Shapes: see `nest.placeholders`.

    Args:
        cols: windows whose number in a row is rounded up to a multiple of this one.
    """
    inputs, out_h, out_w = _placeholders(conv, pack, target), conv.output_size[0], -(-conv.output_size[1] // cols) * cols
    data, row_blocks, last = inputs["data"], -(-out_h // row_block), conv.out_channels // conv.groups
    step, reach = row_block * conv.stride[0], (_reach(conv, 0, row_blocks * row_block), _reach(conv, 1, out_w))
    shape = conv.batch, count(conv, pack), row_blocks, _reach(conv, 0, row_block)

    def turned_row(n: Expr, jo: Expr, s: Expr, y: Expr, x: Expr, ji: Expr) -> Expr:
        row = te.max(te.min(s * step + y - conv.padding[0], conv.height - 1), 0)  # a row outside is any row here, and zeros in PAD
        return data[n, _over(_channel(conv, pack, jo, ji), last), row, x]

    def padded_row(n: Expr, jo: Expr, s: Expr, y: Expr, x: Expr, ji: Expr) -> Expr:
        row, col, inside = _place(conv, s * step + y, x, reach)
        if conv.layout == "NCHW":
            return _zero_unless(conv, inside, turned[n, jo, s, y, col, ji])
        return _zero_unless(conv, inside, data[n, row, col, _over(_channel(conv, pack, jo, ji), last)])

    if conv.layout == "NCHW":
        turned = te.compute((*shape, columns_read(conv), pack.block), turned_row, name=TURNED)
    padded = te.compute((*shape, reach[1], pack.block), padded_row, name=PAD)

    def operand(n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr, u: Expr, v: Expr) -> Expr:
        y, x = m % row_block * conv.stride[0] + u * conv.dilation[0], x * conv.stride[1] + v * conv.dilation[1]
        return padded[n, jo, m // row_block, y, x, ji]

    return _convolve(conv, pack, inputs, (row_blocks * row_block, out_w), operand, target)


def windows(conv: Conv2d, pack: ChannelPack, row_block: int, lanes: int, target: Target = CPU) -> list[te.Tensor]:
    """The kernel's arguments, for vectors of `lanes` neighbouring windows of one channel. Shapes: see `nest.placeholders`; NCHW."""
    inputs = _placeholders(conv, pack, target)
    rows, cols = (-(-size // part) * part for size, part in zip(conv.output_size, (row_block, lanes), strict=True))
    stride, last = conv.stride[1], conv.out_channels // conv.groups
    height, width = _reach(conv, 0, rows), -(-_reach(conv, 1, cols) // stride)

    def phases(n: Expr, c: Expr, y: Expr, p: Expr, x: Expr) -> Expr:
        row, col, inside = _place(conv, y, x * stride + p, (height, width * stride))
        return _zero_unless(conv, inside, inputs["data"][n, c, row, col])

    padded = te.compute((conv.batch, conv.in_channels, height, stride, width), phases, name=PAD)

    def operand(n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr, u: Expr, v: Expr) -> Expr:
        y, x = m * conv.stride[0] + u * conv.dilation[0], x * stride + v * conv.dilation[1]
        return padded[n, _over(_channel(conv, pack, jo, ji), last), y, x % stride, x // stride]

    return _convolve(conv, pack, inputs, (rows, cols), operand, target)


def count(conv: Conv2d, pack: ChannelPack) -> int:
    """Channel blocks that a kernel computes."""
    return -(-conv.out_channels // pack.block)


def columns_read(conv: Conv2d) -> int:
    """Columns of the input up to the last one that a window reads: with a stride, those behind it may belong to no window."""
    return min(conv.width, max(_reach(conv, 1, conv.output_size[1]) - conv.padding[1], 1))


def _placeholders(conv: Conv2d, pack: ChannelPack, target: Target = CPU) -> dict[str, te.Tensor]:
    """The kernel's inputs as in `nest.placeholders`, filters in the layout of the pack, and the bias, too, where the target packs it."""
    inputs = nest.placeholders(pack.single_group(conv), pack.filters(conv))
    if conv.bias and not target.packed_bias:
        inputs["bias"] = te.placeholder((conv.out_channels,), conv.dtypes["bias"], name="bias")
    return {**inputs, "data": te.placeholder(conv.input_shape, conv.dtype, name="data")}


def _channel(conv: Conv2d, pack: ChannelPack, jo: Expr, ji: Expr) -> Expr:
    """The output channel of an element of a block: the last block is the last channels."""
    first = jo * pack.block
    return (te.min(first, conv.out_channels - pack.block) if conv.out_channels % pack.block else first) + ji


def _over(j: Expr, multiplier: int) -> Expr:
    return j // multiplier if multiplier > 1 else j


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
    conv: Conv2d,
    pack: ChannelPack,
    inputs: dict[str, te.Tensor],
    size: tuple[int, int],
    operand: Callable[..., Expr],
    target: Target = CPU,
) -> list[te.Tensor]:
    """The product of `size` (rows, columns) as a sum over taps, with epilogue and write-back; returns the kernel's arguments.

    operand: (n, channel block, output row, output column, channel in the block, u, v) -> element.
    """
    u, v = te.reduce_axis((0, conv.kernel[0]), "u"), te.reduce_axis((0, conv.kernel[1]), "v")
    partial, blocks = conv.out_channels % pack.block, count(conv, pack)
    sums = ELEMENT_TYPES[conv.dtype].sums
    arithmetic, last = target.expressions(sums), "none" if conv.residual else conv.activation

    def packed(jo: Expr, ji: Expr) -> tuple[Expr, Expr]:
        return (0, _channel(conv, pack, jo, ji)) if partial else (jo, ji)

    def summand(n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr) -> Expr:
        run, place = packed(jo, ji)
        one, tap = operand(n, jo, m, x, ji, u, v), inputs["filter"][run, u * conv.kernel[1] + v, place]
        return te.sum(one.astype(sums) * tap.astype(sums), axis=[u, v])

    def bias(jo: Expr, ji: Expr) -> Expr:
        return inputs["bias"](*packed(jo, ji)) if target.packed_bias else inputs["bias"](_channel(conv, pack, jo, ji))

    def row(*i: Expr) -> Expr:
        value = product(*i)
        return activations.apply(last, arithmetic, value + bias(i[1], i[4]).astype(sums) if conv.bias else value)

    def taken(*i: Expr) -> Expr:
        n, j, m, x = i if conv.layout == "NCHW" else (i[0], i[3], i[1], i[2])
        place = j % pack.block
        if partial:
            place += j // ((blocks - 1) * pack.block) * (pack.block - partial)  # 0 in all blocks but the last
        return rows[n, j // pack.block, m, x, place]

    def written(*i: Expr) -> Expr:
        if not conv.residual:
            return taken(*i).astype(conv.out_dtype)
        return activations.apply(conv.activation, arithmetic, turned(*i) + inputs["residual"](*i).astype(sums)).astype(conv.out_dtype)

    product = te.compute((conv.batch, blocks, *size, pack.block), summand, name=nest.CONV)
    rows = te.compute(product.shape, row, name=nest.ROWS)
    if conv.residual:
        turned = te.compute(conv.output_shape, taken, name=nest.TRANSPOSED)
    return [*inputs.values(), te.compute(conv.output_shape, written, name=target.out)]
