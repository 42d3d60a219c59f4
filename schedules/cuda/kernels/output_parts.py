"""Windows stored a part at a time (MCFA): every part of the output has its tensor made, then multiplied, before the next overwrites it.

    for part:  M = windows of the part        O[part] = F * M

A part is some whole images, or some rows of one. Only one part's tensor exists: as large as fills the machine, however large the whole is.
The loop runs on the host, two launches a part.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.compute import lowered
from im2win.compute.lowered import Strides
from im2win.schedules.cuda.kernels.multistage import arguments, launch_product, pack_of
from im2win.schedules.cuda.loaders.stored_windows import First, launch_transform
from im2win.schedules.cuda.primitives import Expr, local
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class Parts:
    """A convolution cut into parts of `images` x `rows` of its output; the last ones may reach beyond it."""

    conv: Conv2d
    images: int
    rows: int

    @property
    def bands(self) -> int:
        """Parts of an image."""
        return -(-self.conv.output_size[0] // self.rows)

    @property
    def count(self) -> int:
        """Parts in all."""
        return -(-self.conv.batch // self.images) * self.bands

    @property
    def problem(self) -> Conv2d:
        """A part as a convolution of its own: of the input rows that its windows see, none of them padding."""
        conv, (_, left, _, right) = self.conv, self.conv.padding
        height = (self.rows - 1) * conv.stride[0] + conv.window[0]
        return conv.with_(batch=self.images, height=height, padding=(0, left, 0, right))

    @contextlib.contextmanager
    def each(self) -> Iterator[First]:
        """Emits the host's loop over parts; gives what a part begins with."""
        with T.serial(self.count // self.bands) as group, T.serial(self.bands) as band:
            yield functools.partial(keep, n=group * self.images, m=band * self.rows)


@dataclass(frozen=True)
class WindowsInParts(WindowSource):
    """Windows from a tensor with these axes that holds one part of them.

    wanted_bytes: what the tensor should take; least_outputs: what a part should compute even so (the default is 128 blocks of 128 x 128,
    which occupy the multiprocessors of the largest GPUs). A part is the number of whole images nearest to that, or else of rows.
    """

    wanted_bytes: int = 32 << 20
    least_outputs: int = 1 << 21

    def parts(self, conv: Conv2d) -> Parts:
        """How a problem is cut; parts of nearly the same size."""
        height, width = conv.output_size
        window_bytes = conv.in_channels * math.prod(conv.kernel) * conv.itemsize
        windows = max(self.wanted_bytes // window_bytes, self.least_outputs // conv.out_channels, 1)
        images = (2 * windows + height * width) // (2 * height * width)
        if images:
            count = -(-conv.batch // min(images, conv.batch))
            return Parts(conv, -(-conv.batch // count), height)
        bands = -(-height // max(windows // width, 1))
        return Parts(conv, 1, -(-height // bands))

    def part(self, conv: Conv2d) -> tuple[Conv2d, int]:
        """The problem that one launch of the product computes, and how many launches there are."""
        parts = self.parts(conv)
        return parts.problem, parts.count

    def source(self, conv: Conv2d) -> tuple[int, ...]:
        """Shape of a part's tensor."""
        return super().source(self.parts(conv).problem)

    def strides(self, conv: Conv2d) -> Strides:
        """Where windows of a part lie in it."""
        return super().strides(self.parts(conv).problem)

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of a part's tensor."""
        return super().transform_bytes(self.parts(conv).problem)


def keep(**values: Expr) -> dict[str, Expr]:
    """Registers with these values.

    Otherwise TVM would work out on the host what launches have in common, products of these values among them, and a kernel that is given
    a product as a number does not see what it is a multiple of: its wide loads fall apart.
    """
    kept = local("first", (len(values),), "int32")
    for place, value in enumerate(values.values()):
        T.buffer_store(kept, value, [place])
    return {name: kept[place] for place, name in enumerate(values)}


class _Placed:
    """What the epilogue asks of an operand, answered for the whole convolution."""

    def __init__(self, parts: Parts, operand: Any, first: First) -> None:
        self._parts, self._operand, self._first = parts, operand, first()

    def run(self, conv: Conv2d, tile: MultistageTile) -> int:
        """Neighbouring windows that are sure to lie in one image, aligned to their number in the part and in the image."""
        height, width = conv.output_size
        return math.gcd(height * width, self._parts.rows * width, tile.block_n)

    def output(self, window: Expr) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x) of a window of the thread block, and under which conditions it exists."""
        n, m, x, conditions = self._operand.output(window)
        parts, batch, height = self._parts, self._parts.conv.batch, self._parts.conv.output_size[0]
        n, m = self._first["n"] + n, self._first["m"] + m
        last = [*([n < batch] if batch % parts.images else []), *([m < height] if height % parts.rows else [])]
        return n, m, x, [*conditions, *last]


def _launch_transform(parts: Parts, axes: str, data: Any, out: Any, first: First) -> None:
    launch_transform(parts.conv, axes, data, out, lowered.shape(parts.problem, axes), first)


def parts_kernel(conv: Conv2d, tile: MultistageTile, plan: WindowsInParts, name: str) -> Any:
    """The convolution: ("input", then the tensors of `conv.arguments`); "data" is a part's tensor, flat, for it to fill."""
    parts, axes = plan.parts(conv), plan.oriented(conv)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        source = T.arg("input", T.buffer(conv.input_shape, conv.dtype))
        tensors = arguments(conv, pack_of(conv, tile), plan.source(conv))
        with parts.each() as first:
            _launch_transform(parts, axes, source, tensors["data"], first)
            launch_product(parts.problem, tile, WindowSource(plan.axes), tensors, lambda operand: (conv, _Placed(parts, operand, first)))
    return builder.get()


def parts_transform(conv: Conv2d, plan: WindowsInParts, name: str) -> Any:
    """The transforms of all parts by themselves, one over the other: (data, a part's tensor). For measuring what they take."""
    parts, axes = plan.parts(conv), plan.oriented(conv)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        data = T.arg("data", T.buffer(conv.input_shape, conv.dtype))
        out = T.arg("lowered", T.buffer((math.prod(plan.source(conv)),), conv.dtype))
        with parts.each() as first:
            _launch_transform(parts, axes, data, out, first)
    return builder.get()
