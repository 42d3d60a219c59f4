"""What all algorithms share: the tensors of a kernel, the product with the filters, the epilogue and the write-back.

Letters are those of the im2win thesis: n image, j output channel (jo its block, ji inside it), m output row, x output column, c input
channel, u kernel row, v kernel column. An algorithm differs only in its *operand*, which gives element (n, c, m, x, u, v) of its windows.

The block names below are the contract between compute/ and schedules/.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from tvm import te

from im2win.compute.arithmetic import TensorExpressions
from im2win.compute.padded import Expr
from im2win.compute.rounding import converted, scaled
from im2win.spec import activations
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

CONV = "conv"  # the product: [N, blocks, Ho, Wo, block], or [N, blocks, Ho/row_block, row_block*Wo, block] for algorithms with a matrix
SUMS = "sums"  # sums of the products of chunks of channels, CONV without its first axis, only where there are several
ROWS = "rows"  # the product with bias and activation, same shape
TRANSPOSED = "transposed"  # ROWS in the output's layout, only where a residual is added to it
OUT = "out"


class Pack(Protocol):
    """How filters are packed: for CPUs and CUDA cores a step of a block is contiguous, for tensor cores a line of a channel.

    block: output channels of a block. order: of the taps, the innermost last.
    place: the index of element `k` of the sum of a block's channel.
    """

    @property
    def block(self) -> int: ...
    @property
    def order(self) -> str: ...
    def blocks_per_group(self, conv: Conv2d) -> int: ...
    def blocks(self, conv: Conv2d) -> int: ...
    def shape(self, conv: Conv2d) -> tuple[int, int, int]: ...
    def place(self, conv: Conv2d, block: Expr, k: Expr, channel: Expr) -> tuple[Expr, Expr, Expr]: ...


Operand = Callable[[Expr, Expr, Expr, Expr, Expr, Expr, Expr], Expr]
"""(n, group, c, m, x, u, v) -> element; c counts inside the group."""


def placeholders(conv: Conv2d, pack: Pack) -> dict[str, te.Tensor]:
    """The kernel's inputs by name, in the order of `conv.arguments`.

    Shapes: data `conv.input_shape`, filter `pack.shape(conv)`, bias and scale [channel blocks, channels of a block], residual
    `conv.output_shape`.
    """
    shapes = {
        "data": conv.input_shape,
        "filter": pack.shape(conv),
        "bias": (pack.blocks(conv), pack.block),
        "scale": (pack.blocks(conv), pack.block),
        "residual": conv.output_shape,
    }
    return {name: te.placeholder(shapes[name], conv.dtypes[name], name=name) for name in conv.arguments[:-1]}


def _tap(conv: Conv2d, pack: Pack, c: Expr, u: Expr, v: Expr) -> Expr:
    kernel_h, kernel_w = conv.kernel
    if pack.order == "uvc":
        return (u * kernel_w + v) * (conv.in_channels // conv.groups) + c
    return (c * kernel_h + u) * kernel_w + v if pack.order == "cuv" else (c * kernel_w + v) * kernel_h + u


def split_tap(conv: Conv2d, pack: Pack, k: Expr) -> tuple[Expr, Expr, Expr]:
    """The inverse of the packing order: index of K -> (c, u, v)."""
    kernel_h, kernel_w = conv.kernel
    if pack.order == "uvc":
        channels = conv.in_channels // conv.groups
        return k % channels, k // channels // kernel_w, k // channels % kernel_w
    c, tap = k // (kernel_h * kernel_w), k % (kernel_h * kernel_w)
    return (c, tap // kernel_w, tap % kernel_w) if pack.order == "cuv" else (c, tap % kernel_h, tap // kernel_h)


def _multiplied(conv: Conv2d, element: Expr, filter_element: Expr) -> Expr:
    """A product in the type of the sums."""
    sums = ELEMENT_TYPES[conv.dtype].sums
    return element.astype(sums) * filter_element.astype(sums)


def convolve(conv: Conv2d, pack: Pack, inputs: dict[str, te.Tensor], operand: Operand, chunks: int = 1) -> list[te.Tensor]:
    """The product as a sum over channels, kernel rows and kernel columns, window by window; returns the kernel's arguments.

    Args:
        chunks: of channels, a divisor of a group's; each has a product of its own, and a second sum adds them.
    """
    out_h, out_w = conv.output_size
    per_group, depth = pack.blocks_per_group(conv), conv.in_channels // conv.groups // chunks
    c = te.reduce_axis((0, depth), "c")
    u, v = te.reduce_axis((0, conv.kernel[0]), "u"), te.reduce_axis((0, conv.kernel[1]), "v")
    taps = [{"c": c, "u": u, "v": v}[axis] for axis in pack.order]
    shape = conv.batch, pack.blocks(conv), out_h, out_w, pack.block

    def summed(first: Expr, n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr) -> Expr:
        place = pack.place(conv, jo, _tap(conv, pack, first + c, u, v), ji)
        taken = _multiplied(conv, operand(n, jo // per_group, first + c, m, x, u, v), inputs["filter"][place])
        return te.sum(taken, axis=taps)

    return _finish(conv, pack, inputs, _in_chunks(shape, chunks, depth, summed), lambda m, x: (m, x))


def multiply(
    conv: Conv2d, pack: Pack, inputs: dict[str, te.Tensor], matrix: te.Tensor, row_block: int, chunks: int = 1
) -> list[te.Tensor]:
    """The product of filters by a matrix [N, groups, K, Ho*Wo] of windows; returns the kernel's arguments.

    Windows are processed in lines of `row_block` output rows (a divisor of Ho), so that a register tile may cross the end of an output row.
    chunks: see `convolve`.
    """
    out_h, out_w = conv.output_size
    per_group, line, depth = pack.blocks_per_group(conv), row_block * out_w, math.prod(conv.filter_shape[1:]) // chunks
    k = te.reduce_axis((0, depth), "k")
    shape = conv.batch, pack.blocks(conv), out_h // row_block, line, pack.block

    def summed(first: Expr, n: Expr, jo: Expr, m: Expr, p: Expr, ji: Expr) -> Expr:
        element, place = matrix[n, jo // per_group, first + k, m * line + p], pack.place(conv, jo, first + k, ji)
        return te.sum(_multiplied(conv, element, inputs["filter"][place]), axis=[k])

    product = _in_chunks(shape, chunks, depth, summed)
    return _finish(conv, pack, inputs, product, lambda m, x: (m // row_block, m % row_block * out_w + x))


def _in_chunks(shape: tuple[int, ...], chunks: int, depth: int, summed: Callable[..., Expr]) -> te.Tensor:
    """The product CONV, or with several chunks the sum SUMS of their products.

    summed: (first step of a chunk, indices of the product) -> the sum of that chunk's `depth` steps.
    """
    if chunks == 1:
        return te.compute(shape, lambda n, jo, m, x, ji: summed(0, n, jo, m, x, ji), name=CONV)
    parts = te.compute((chunks, *shape), lambda q, n, jo, m, x, ji: summed(q * depth, n, jo, m, x, ji), name=CONV)
    q = te.reduce_axis((0, chunks), "q")
    return te.compute(shape, lambda n, jo, m, x, ji: te.sum(parts[q, n, jo, m, x, ji], axis=q), name=SUMS)


def _finish(
    conv: Conv2d, pack: Pack, inputs: dict[str, te.Tensor], product: te.Tensor, window: Callable[[Expr, Expr], tuple[Expr, Expr]]
) -> list[te.Tensor]:
    """Bias, scale and activation on channel blocks, then the output in the problem's layout, with the residual if there is one."""
    per_group, group_channels = pack.blocks_per_group(conv), conv.out_channels // conv.groups
    last = "none" if conv.residual else conv.activation
    kind = "float32" if conv.requantised else ELEMENT_TYPES[conv.dtype].sums
    arithmetic = TensorExpressions(kind)

    def row(n: Expr, jo: Expr, m: Expr, x: Expr, ji: Expr) -> Expr:
        value = product[n, jo, m, x, ji]
        if conv.bias:
            value = value + inputs["bias"][jo, ji].astype(ELEMENT_TYPES[conv.dtype].sums)
        return activations.apply(last, arithmetic, scaled(value, inputs["scale"][jo, ji]) if conv.requantised else value)

    rows = te.compute(product.shape, row, name=ROWS)

    def taken(n: Expr, j: Expr, m: Expr, x: Expr) -> Expr:
        group, channel = (j // group_channels, j % group_channels) if conv.groups > 1 else (0, j)
        line, place = window(m, x)
        return rows[n, group * per_group + channel // pack.block, line, place, channel % pack.block]

    def axes(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return indices if conv.layout == "NCHW" else (indices[0], indices[3], indices[1], indices[2])

    if not conv.residual:
        out = te.compute(conv.output_shape, lambda *i: converted(taken(*axes(i)), kind, conv.out_dtype), name=OUT)
    else:
        transposed = te.compute(conv.output_shape, lambda *i: taken(*axes(i)), name=TRANSPOSED)
        residual = inputs["residual"]

        def final(*i: Expr) -> Expr:
            value = activations.apply(conv.activation, arithmetic, transposed(*i) + residual(*i).astype(kind))
            return converted(value, kind, conv.out_dtype)

        out = te.compute(conv.output_shape, final, name=OUT)
    return [*inputs.values(), out]
