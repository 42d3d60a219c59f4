"""Windows stored for one part of the output at a time (MCFA, see `compute.mcfa`).

    for part:  M = windows of the part        O[part] = F * M

A part is some whole images, or some output rows of one image. The workspace holds the tensor of one part, which is just large enough to
occupy the GPU, however large the whole is. The loop runs on the host and launches two kernels for a part.
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

from im2win.common.caching import derived, hashed_once
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
    """A convolution cut into parts of `images` x `rows` of its output. The last parts may reach beyond it."""

    conv: Conv2d
    images: int
    rows: int

    @property
    def bands(self) -> int:
        """Parts of an image."""
        return -(-self.conv.output_size[0] // self.rows)

    @property
    def count(self) -> int:
        """Number of parts."""
        return -(-self.conv.batch // self.images) * self.bands

    @derived
    def problem(self) -> Conv2d:
        """A part as a convolution: over the input rows that its windows read, without padding above and below."""
        conv, (_, left, _, right) = self.conv, self.conv.padding
        height = (self.rows - 1) * conv.stride[0] + conv.window[0]
        return conv.with_(batch=self.images, height=height, padding=(0, left, 0, right))

    @contextlib.contextmanager
    def each(self) -> Iterator[First]:
        """Emits the host's loop over parts. The value emits, inside a kernel, the first image and output row of a part."""
        with T.serial(self.count // self.bands) as group, T.serial(self.bands) as band:
            yield functools.partial(keep, n=group * self.images, m=band * self.rows)


@hashed_once
@dataclass(frozen=True)
class WindowsInParts(WindowSource):
    """Windows from a stored tensor with these axes, which holds one part of them.

    A part is the number of whole images, or else of output rows, whose size is nearest to the larger of two sizes.

    wanted_bytes: bytes that the tensor of a part should take.
    least_outputs: outputs that a part should at least have. The default is 128 thread blocks of 128 x 128, which occupy the largest GPUs.
    """

    wanted_bytes: int = 32 << 20
    least_outputs: int = 1 << 21

    def parts(self, conv: Conv2d) -> Parts:
        """The parts of a problem, of nearly equal size."""
        return _parts(conv, self.wanted_bytes, self.least_outputs)

    def part(self, conv: Conv2d) -> tuple[Conv2d, int]:
        """(the problem that one launch of the product computes, number of launches)."""
        parts = self.parts(conv)
        return parts.problem, parts.count

    def source(self, conv: Conv2d) -> tuple[int, ...]:
        """Shape of a part's tensor."""
        return super().source(self.parts(conv).problem)

    def strides(self, conv: Conv2d) -> Strides:
        """Strides of a part's windows and taps in that tensor, in elements."""
        return super().strides(self.parts(conv).problem)

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of a part's tensor."""
        return super().transform_bytes(self.parts(conv).problem)


@functools.lru_cache(maxsize=1024)
def _parts(conv: Conv2d, wanted_bytes: int, least_outputs: int) -> Parts:
    height, width = conv.output_size
    window_bytes = conv.in_channels * math.prod(conv.kernel) * conv.itemsize
    windows = max(wanted_bytes // window_bytes, least_outputs // conv.out_channels, 1)
    images = (2 * windows + height * width) // (2 * height * width)
    if images:
        count = -(-conv.batch // min(images, conv.batch))
        return Parts(conv, -(-conv.batch // count), height)
    bands = -(-height // max(windows // width, 1))
    return Parts(conv, 1, -(-height // bands))


def keep(**values: Expr) -> dict[str, Expr]:
    """Copies these values to registers and returns the registers by name.

    Without the copies, TVM computes common products of the values on the host and passes them as arguments. The device compiler then does
    not know what an argument is a multiple of, and splits vector loads.
    """
    kept = local("first", (len(values),), "int32")
    for place, value in enumerate(values.values()):
        T.buffer_store(kept, value, [place])
    return {name: kept[place] for place, name in enumerate(values)}


class _Placed:
    """An operand that maps the windows of a part to the output of the whole convolution, for the epilogue."""

    def __init__(self, parts: Parts, operand: Any, first: First) -> None:
        self._parts, self._operand, self._first = parts, operand, first()

    def run(self, conv: Conv2d, tile: MultistageTile) -> int:
        """Largest n such that n windows, from a multiple of n on, are neighbours in one image, both in the part and in the whole."""
        height, width = conv.output_size
        return math.gcd(height * width, self._parts.rows * width, tile.block_n)

    def output(self, window: Expr) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x, conditions) of a window of the thread block: its output, and the conditions under which it exists."""
        n, m, x, conditions = self._operand.output(window)
        parts, batch, height = self._parts, self._parts.conv.batch, self._parts.conv.output_size[0]
        n, m = self._first["n"] + n, self._first["m"] + m
        last = [*([n < batch] if batch % parts.images else []), *([m < height] if height % parts.rows else [])]
        return n, m, x, [*conditions, *last]


def _launch_transform(parts: Parts, axes: str, data: Any, out: Any, first: First) -> None:
    launch_transform(parts.conv, axes, data, out, lowered.shape(parts.problem, axes), first)


def parts_kernel(conv: Conv2d, tile: MultistageTile, plan: WindowsInParts, name: str) -> Any:
    """The function of the whole convolution, over "input" and the tensors of `conv.arguments`.

    "data" is the workspace for a part's tensor, a flat buffer that the function fills.
    """
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
    """The function (data, lowered) that runs the transforms of all parts into one part's tensor, to measure their time."""
    parts, axes = plan.parts(conv), plan.oriented(conv)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        data = T.arg("data", T.buffer(conv.input_shape, conv.dtype))
        out = T.arg("lowered", T.buffer((math.prod(plan.source(conv)),), conv.dtype))
        with parts.each() as first:
            _launch_transform(parts, axes, data, out, first)
    return builder.get()
