"""The input of a convolution, read at coordinates that count its padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx

from im2win.spec.conv2d import Conv2d

Expr = Any
Image = Callable[[Expr, Expr, Expr, Expr], Expr]
"""(n, c, y, x) -> element, y and x counted in the padded input."""


def image(conv: Conv2d, data: te.Tensor) -> Image:
    """A function that reads the input at padded coordinates. Outside the input it gives zero; no padded copy exists."""
    top, left, bottom, right = conv.padding
    nchw = conv.layout == "NCHW"

    def at(n: Expr, c: Expr, y: Expr, x: Expr) -> Expr:
        row, col = y - top, x - left
        value = data[n, c, row, col] if nchw else data[n, row, col, c]
        inside = []
        if top or bottom:
            inside += [row >= 0, row < conv.height]
        if left or right:
            inside += [col >= 0, col < conv.width]
        if not inside:
            return value
        zero = tirx.const(0, conv.dtype)
        return te.if_then_else(te.all(*inside) if len(inside) > 1 else inside[0], value, zero)

    return at
