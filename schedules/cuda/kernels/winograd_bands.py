"""Winograd convolution in bands: an input transform, one matrix product for every position of a tile, and an output transform.

    for band of tiles:  V = B^T d B        M[position] = U[position] V[position]        Y = A^T M A

V is [tiles, positions, channels], and M the same with output channels. The products of all positions are one grouped 1x1 convolution over a
row of tiles, channels last, which the multistage kernel computes. The workspace holds V and M of one band, sized to stay in level-2 cache.
Filters are transformed ahead of time. The form is that of Lavin and Gray 2015, arXiv 1509.09308.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.numerics.winograd_tiling import Tiles, tiles_of
from im2win.schedules.cuda.kernels.multistage import arguments, launch_product, pack_of, product_of
from im2win.schedules.cuda.kernels.output_parts import keep
from im2win.schedules.cuda.loaders.stored_windows import First
from im2win.schedules.cuda.primitives import named
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.schedules.cuda.winograd.transforms import launch_input_transform, launch_output_transform
from im2win.spec.conv2d import Conv2d


@contextlib.contextmanager
def _each_band(tiles: Tiles) -> Iterator[First]:
    """Emits the host's loop over bands. The value emits, inside a kernel, the first image and output row of a band."""
    images, rows = tiles.bands
    with T.serial(images) as group, T.serial(rows) as band:
        yield functools.partial(keep, n=group * tiles.images, m=band * (tiles.rows * tiles.outputs))


def winograd_kernel(conv: Conv2d, tile: MultistageTile, name: str) -> Any:
    """The function of the whole convolution, over "input" and the tensors of `conv.arguments`.

    "data" is the workspace for a band's transformed tiles and products, a flat buffer.
    """
    tiles = tiles_of(conv, tile.outputs, tile.band)
    problem, inner = product_of(conv, tile)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        source = T.arg("input", T.buffer(conv.input_shape, conv.dtype))
        tensors = arguments(conv, pack_of(conv, tile), (tiles.made,))
        made = tensors["data"].data
        given = named("tiles", T.decl_buffer((tiles.transformed,), conv.dtype, data=made))
        products = named("products", T.decl_buffer((tiles.multiplied,), conv.dtype, data=made, elem_offset=tiles.before_products))
        with _each_band(tiles) as first:
            launch_input_transform(tiles, source, given, first)
            launch_product(problem, inner, WindowSource(), {"data": given, "filter": tensors["filter"], "output": products})
            launch_output_transform(tiles, products, tensors, first)
    return builder.get()


def winograd_transform(conv: Conv2d, tile: MultistageTile, name: str) -> Any:
    """The function (data, lowered) that runs the input transforms of all bands into one band's workspace, to measure their time."""
    tiles = tiles_of(conv, tile.outputs, tile.band)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        data = T.arg("data", T.buffer(conv.input_shape, conv.dtype))
        out = T.arg("lowered", T.buffer((tiles.made,), conv.dtype))
        with _each_band(tiles) as first:
            launch_input_transform(tiles, data, out, first)
    return builder.get()
