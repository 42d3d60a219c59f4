"""The transform kernels of Winograd with channels last: a warp's threads have neighbouring channels, in memory as in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.numerics.winograd_tiling import Tiles
from im2win.schedules.cuda.loaders.stored_windows import First
from im2win.schedules.cuda.primitives import Expr, local
from im2win.schedules.cuda.winograd.tile_transform import (
    THREADS,
    channels_together,
    finished,
    load_inside,
    load_products,
    store_tile,
    write_outputs,
)


def _each_thread(tiles: Tiles, channels: int, lanes: int, body: Callable[[Expr, Expr, Expr, Expr, Expr], None]) -> None:
    """Emits a launch of `body` for every tile and every `lanes` channels.

    Args:
        body: called with (tile of the band, image, row of tiles, column of tiles, first channel).
    """
    groups, columns = channels // lanes, tiles.counts[1]
    count = tiles.count * groups
    with T.launch_thread("blockIdx.x", -(-count // THREADS)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        at = bx * THREADS + tid
        tile, channel = at // groups, at % groups * lanes
        place = (tile // columns // tiles.rows, tile // columns % tiles.rows, tile % columns)
        if count % THREADS:
            with T.If(at < count), T.Then():
                body(tile, *place, channel)
        else:
            body(tile, *place, channel)


def input_transform(tiles: Tiles, data: Any, out: Any, first: First) -> None:
    conv, m, t = tiles.conv, tiles.outputs, tiles.size
    lanes = channels_together(conv.in_channels, conv.itemsize)

    def one(tile: Expr, image: Expr, row: Expr, col: Expr, channel: Expr) -> None:
        start = first()
        n, top, left = start["n"] + image, start["m"] + row * m - conv.padding[0], col * m - conv.padding[1]
        pixels = local("pixels", (t, t, lanes), conv.dtype)
        with T.unroll(t) as i, T.unroll(t) as j:
            h, w = top + i, left + j
            inside = [n < conv.batch, h >= 0, h < conv.height, w >= 0, w < conv.width]
            load_inside(lanes, inside, pixels, lambda e: [i, j, e], lambda e: data[n, h, w, channel + e])
        store_tile(tiles, lanes, lambda i, j, lane: pixels[i, j, lane], out, tile, channel)

    _each_thread(tiles, conv.in_channels, lanes, one)


def output_transform(tiles: Tiles, products: Any, tensors: dict[str, Any], first: First) -> None:
    conv, m, (out_h, out_w) = tiles.conv, tiles.outputs, tiles.conv.output_size
    lanes = channels_together(conv.out_channels, conv.itemsize)
    value_dtype = "float32" if conv.residual else conv.out_dtype

    def one(tile: Expr, image: Expr, row: Expr, col: Expr, channel: Expr) -> None:
        start = first()
        n, top, left = start["n"] + image, start["m"] + row * m, col * m
        found = load_products(tiles, lanes, products, tile, channel, value_dtype, finished(conv, tensors, channel))
        with T.unroll(m) as i, T.unroll(m) as j, T.If(tirx.all(n < conv.batch, top + i < out_h, left + j < out_w)), T.Then():
            at = ((n * out_h + top + i) * out_w + left + j) * conv.out_channels + channel
            write_outputs(conv, tensors, lanes, at, lambda e: found[i, j, e])

    _each_thread(tiles, conv.out_channels, lanes, one)
