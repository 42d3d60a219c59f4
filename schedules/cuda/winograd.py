"""Winograd's form of a convolution: input tiles transformed, one matrix product a position of the tile, outputs transformed back.

    for band of tiles:  V = B^T d B        M[position] = U[position] V[position]        Y = A^T M A

V is [tiles, positions, channels] and M the same with output channels: the products of all positions are one grouped 1x1 convolution of a
row of tiles, channels last, which the kernels of every other algorithm compute. Only a band's V and M exist: what they take is meant to
stay in level-2 cache. Filters are transformed ahead of time.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.problem import Conv2d
from im2win.schedules.cuda.epilogue import activated, output_dtype
from im2win.schedules.cuda.kernel import arguments, launch_product, pack_of, product_of
from im2win.schedules.cuda.parts import keep
from im2win.schedules.cuda.plan import CudaPlan
from im2win.schedules.cuda.shared import Expr, barrier, local, named
from im2win.schedules.cuda.tile import CudaTile
from im2win.schedules.cuda.transform import First
from im2win.straight_line import Program, program
from im2win.winograd import transform
from im2win.winograd_tiles import Tiles, tiles_of

THREADS = 256
WARP = 32


@dataclass(frozen=True)
class _Patch:
    """What a thread block transforms: `down` x `across` neighbouring tiles of an image, and `channels` channels, 32 of them a warp."""

    tiles: Tiles
    all_channels: int

    @property
    def across(self) -> int:
        return min(self.tiles.counts[1], THREADS // WARP)

    @property
    def down(self) -> int:
        return min(self.tiles.rows, max(THREADS // WARP // self.across, 1))

    @property
    def channels(self) -> int:
        groups = max(THREADS // WARP // (self.down * self.across), 1)
        return WARP * min(groups, -(-self.all_channels // WARP))

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Thread blocks along images, rows of tiles, columns of tiles, channels."""
        tiles = self.tiles
        return tiles.images, -(-tiles.rows // self.down), -(-tiles.counts[1] // self.across), -(-self.all_channels // self.channels)

    def corner(self, block: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """(image, row of tiles, column of tiles, channel) that a thread block begins with, in the band."""
        _, rows, cols, channels = self.grid
        rest, c = block // channels, block % channels
        return rest // cols // rows, rest // cols % rows * self.down, rest % cols * self.across, c * self.channels

    def each_warp(self, warp: Expr, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """body(row, column, channels before) for every tile and 32 channels that a warp has to do."""
        items, warps = self.down * self.across * (self.channels // WARP), THREADS // WARP
        with T.serial(-(-items // warps)) as turn:
            item = turn * warps + warp
            tile = item % (self.down * self.across)
            each = (tile // self.across, tile % self.across, item // (self.down * self.across) * WARP)
            if items % warps:
                with T.If(item < items), T.Then():
                    body(*each)
            else:
                body(*each)

    def each_element(self, tid: Expr, height: int, width: int, channels_last: bool, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """body(channel, row, column) for every pixel of a patch, neighbours in memory by neighbouring threads."""
        count = self.channels * height * width
        with T.serial(-(-count // THREADS)) as turn:
            at = turn * THREADS + tid
            if channels_last:
                c, row, col = at % self.channels, at // self.channels // width, at // self.channels % width
            else:
                c, row, col = at // (height * width), at // width % height, at % width
            with T.If(at < count), T.Then():
                body(c, row, col)


def _run(steps: Program, read: Callable[[int], Expr], write: Callable[[int, Expr], None]) -> None:
    """Emits a matrix times a vector."""
    values = local("steps", (max(len(steps.steps), 1),), "float32")

    def value(place: int) -> Expr:
        return read(place) if place < steps.inputs else values[place - steps.inputs]

    for place, step in enumerate(steps.steps):
        factor, right = float(step.factor), value(step.right)
        term = right if factor == 1 else tirx.const(factor, "float32") * right
        if step.left is not None:
            term = value(step.left) - right if factor == -1 else value(step.left) + term
        T.buffer_store(values, term, [place])
    for place, output in enumerate(steps.outputs):
        write(place, value(output))


def _both_ways(steps: Program, given: Any, name: str) -> Any:
    """Registers with matrix * given * matrix^T."""
    rows = len(steps.outputs)
    half = local(f"{name}_half", (rows, steps.inputs), "float32")
    whole = local(name, (rows, rows), "float32")
    with T.unroll(steps.inputs) as j:
        _run(steps, lambda i: given[i, j], lambda i, value: T.buffer_store(half, value, [i, j]))
    with T.unroll(rows) as i:
        _run(steps, lambda j: half[i, j], lambda j, value: T.buffer_store(whole, value, [i, j]))
    return whole


def _shared(patch: _Patch, height: int, width: int) -> Any:
    """[channels, pixels], channels an odd number of words apart: 32 of them lie in different banks."""
    return named("pixels", T.alloc_buffer((patch.channels, height * width | 1), "float32", scope="shared.dyn"))


def launch_input_transform(tiles: Tiles, data: Any, out: Any, first: First) -> None:
    """Emits a launch: V of a band.

    Args:
        data: the input; out: [tiles of a band, positions, channels], flat.
        first: the image n and the output row m that the band begins with.
    """
    conv, m, t = tiles.conv, tiles.outputs, tiles.size
    patch, steps = _Patch(tiles, conv.in_channels), program(transform(m, conv.kernel[0]).bt)
    height, width = patch.down * m + t - m, patch.across * m + t - m
    with T.launch_thread("blockIdx.x", math.prod(patch.grid)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        start = first()
        image, row, col, channel = patch.corner(bx)
        pixels = _shared(patch, height, width)
        top, left = start["m"] + row * m - conv.padding[0], col * m - conv.padding[1]

        def load(c: Expr, y: Expr, x: Expr) -> None:
            n, h, w = start["n"] + image, top + y, left + x
            at = [n, channel + c, h, w] if conv.layout == "NCHW" else [n, h, w, channel + c]
            inside = tirx.all(n < conv.batch, channel + c < conv.in_channels, h >= 0, h < conv.height, w >= 0, w < conv.width)
            value = T.if_then_else(inside, data[tuple(at)].astype("float32"), tirx.const(0, "float32"))
            T.buffer_store(pixels, value, [c, y * width + x])

        patch.each_element(tid, height, width, conv.layout == "NHWC", load)
        barrier()

        def one(down: Expr, across: Expr, before: Expr) -> None:
            given, c = local("given", (t, t), "float32"), before + tid % WARP
            with T.unroll(t) as i, T.unroll(t) as j:
                T.buffer_store(given, pixels[c, (down * m + i) * width + across * m + j], [i, j])
            found = _both_ways(steps, given, "transformed")
            tile = (image * tiles.rows + row + down) * tiles.counts[1] + col + across
            exists = tirx.all(row + down < tiles.rows, col + across < tiles.counts[1], channel + c < conv.in_channels)
            with T.If(exists), T.Then(), T.unroll(t) as i, T.unroll(t) as j:
                at = (tile * tiles.positions + i * t + j) * conv.in_channels + channel + c
                T.buffer_store(out, found[i, j].astype(conv.dtype), [at])

        patch.each_warp(tid // WARP, one)


def launch_output_transform(tiles: Tiles, products: Any, tensors: dict[str, Any], first: First) -> None:
    """Emits a launch: the outputs of a band, with bias, residual and activation.

    Args:
        products: [tiles of a band, positions, output channels], flat.
        tensors: "output", and "bias" [out_channels] and "residual" where the problem has them; flat.
        first: the image n and the output row m that the band begins with.
    """
    conv, m, t = tiles.conv, tiles.outputs, tiles.size
    patch, steps = _Patch(tiles, conv.out_channels), program(transform(m, conv.kernel[0]).at)
    height, width = patch.down * m, patch.across * m
    with T.launch_thread("blockIdx.x", math.prod(patch.grid)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        start = first()
        image, row, col, channel = patch.corner(bx)
        pixels = _shared(patch, height, width)

        def one(down: Expr, across: Expr, before: Expr) -> None:
            given, c = local("given", (t, t), "float32"), before + tid % WARP
            tile = (image * tiles.rows + row + down) * tiles.counts[1] + col + across
            with T.If(tirx.all(row + down < tiles.rows, col + across < tiles.counts[1], channel + c < conv.out_channels)), T.Then():
                with T.unroll(t) as i, T.unroll(t) as j:
                    at = (tile * tiles.positions + i * t + j) * conv.out_channels + channel + c
                    T.buffer_store(given, products[at].astype("float32"), [i, j])
                found = _both_ways(steps, given, "outputs")
                with T.unroll(m) as i, T.unroll(m) as j:
                    T.buffer_store(pixels, found[i, j], [c, (down * m + i) * width + across * m + j])

        def store(c: Expr, y: Expr, x: Expr) -> None:
            (out_h, out_w), k = conv.output_size, channel + c
            n, h, w = start["n"] + image, start["m"] + row * m + y, col * m + x
            if conv.layout == "NCHW":
                at = ((n * conv.out_channels + k) * out_h + h) * out_w + w
            else:
                at = ((n * out_h + h) * out_w + w) * conv.out_channels + k
            # rows of tiles behind the band's last belong to the next
            inside = [n < conv.batch, row + y // m < tiles.rows, h < out_h, w < out_w, k < conv.out_channels]
            with T.If(tirx.all(*inside)), T.Then():
                value = pixels[c, y * width + x]
                if conv.bias:
                    value = value + tensors["bias"][k].astype("float32")
                if conv.residual:
                    value = value + tensors["residual"][at].astype("float32")
                T.buffer_store(tensors["output"], activated(conv.activation, value, "float32").astype(output_dtype(conv)), [at])

        patch.each_warp(tid // WARP, one)
        barrier()
        patch.each_element(tid, height, width, conv.layout == "NHWC", store)


@contextlib.contextmanager
def _each_band(tiles: Tiles) -> Iterator[First]:
    """Emits the host's loop over bands; gives what a band begins with."""
    images, rows = tiles.bands
    with T.serial(images) as group, T.serial(rows) as band:
        yield functools.partial(keep, n=group * tiles.images, m=band * (tiles.rows * tiles.outputs))


def winograd_kernel(conv: Conv2d, tile: CudaTile, name: str) -> Any:
    """The convolution: ("input", then the tensors of `conv.arguments`); "data" is for a band's transformed tiles and products, flat."""
    tiles = tiles_of(conv, tile.outputs, tile.band)
    problem, inner = product_of(conv, tile)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        source = T.arg("input", T.buffer(conv.input_shape, conv.dtype))
        tensors = arguments(conv, pack_of(conv, tile), (tiles.transformed + tiles.multiplied,))
        made = tensors["data"].data
        given = named("tiles", T.decl_buffer((tiles.transformed,), conv.dtype, data=made))
        products = named("products", T.decl_buffer((tiles.multiplied,), conv.dtype, data=made, elem_offset=tiles.transformed))
        with _each_band(tiles) as first:
            launch_input_transform(tiles, source, given, first)
            launch_product(problem, inner, CudaPlan(), {"data": given, "filter": tensors["filter"], "output": products})
            launch_output_transform(tiles, products, tensors, first)
    return builder.get()


def winograd_transform(conv: Conv2d, tile: CudaTile, name: str) -> Any:
    """The input's transforms by themselves, band over band: (data, a band's tensor). For measuring what they take."""
    tiles = tiles_of(conv, tile.outputs, tile.band)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        data = T.arg("data", T.buffer(conv.input_shape, conv.dtype))
        out = T.arg("lowered", T.buffer((tiles.transformed + tiles.multiplied,), conv.dtype))
        with _each_band(tiles) as first:
            launch_input_transform(tiles, data, out, first)
    return builder.get()
