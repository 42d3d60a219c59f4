"""The transform kernels of Winograd with channels first: a block's pixels pass through shared memory, as channel planes.

Rows are copied in accesses of up to 16 bytes, and no thread divides after its first instructions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.numerics.winograd_tiling import Tiles
from im2win.schedules.cuda.loaders.stored_windows import First
from im2win.schedules.cuda.primitives import CHUNK, WORD, Arena, Expr, barrier, local, named
from im2win.schedules.cuda.winograd.tile_transform import (
    THREADS,
    WARP,
    channels_together,
    finished,
    load_inside,
    load_products,
    move,
    store_tile,
    write_outputs,
)


@dataclass(frozen=True)
class _BlockTiles:
    """The tiles that a thread block transforms: `down` x `across` neighbouring tiles of an image, of `channels` channels.

    A warp's 32 threads have different channels.
    """

    tiles: Tiles
    all_channels: int

    @property
    def lanes(self) -> int:
        """Channels of a thread; 1 where there are too few channels for all threads of a warp."""
        return channels_together(self.all_channels, self.tiles.conv.itemsize) if self.all_channels > WARP else 1

    @property
    def across(self) -> int:
        return min(self.tiles.counts[1], THREADS // WARP)

    @property
    def down(self) -> int:
        return min(self.tiles.rows, max(THREADS // WARP // self.across, 1))

    @property
    def channels(self) -> int:
        groups, of_warp = max(THREADS // WARP // (self.down * self.across), 1), WARP * self.lanes
        return of_warp * min(groups, -(-self.all_channels // of_warp))

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """(thread blocks along images, along rows of tiles, along columns of tiles, along channels)."""
        tiles = self.tiles
        return tiles.images, -(-tiles.rows // self.down), -(-tiles.counts[1] // self.across), -(-self.all_channels // self.channels)

    def corner(self, block: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """(image, row of tiles, column of tiles, channel) of a thread block's first tile, in the band."""
        _, rows, cols, channels = self.grid
        rest, c = block // channels, block % channels
        return rest // cols // rows, rest // cols % rows * self.down, rest % cols * self.across, c * self.channels

    def each_warp(self, tid: Expr, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """Calls body(row, column, thread along channels) for every tile and channel of a thread."""
        items, warps, warp = self.down * self.across * (self.channels // self.lanes // WARP), THREADS // WARP, tid // WARP
        with T.serial(-(-items // warps)) as round_:
            item = round_ * warps + warp
            tile = item % (self.down * self.across)
            each = (tile // self.across, tile % self.across, item // (self.down * self.across) * WARP + tid % WARP)
            if items % warps:
                with T.If(item < items), T.Then():
                    body(*each)
            else:
                body(*each)

    def unit(self, width: int, itemsize: int) -> int:
        """Neighbours of a row that one access takes: all or none of them lie in the row, at whichever column a block begins."""
        step = self.across * self.tiles.outputs if self.grid[2] > 1 else CHUNK
        return math.gcd(width, step, CHUNK // itemsize)


@dataclass(frozen=True)
class _Rows:
    """Pixels of a thread block in shared memory: for every channel `height` rows of `units` units.

    before: unused pixels at the beginning of a row, so that units are aligned in global memory.
    Neighbouring threads' channels are an odd number of words apart, so that they lie in different banks. The channels of one thread are far
    apart.
    """

    block_tiles: _BlockTiles
    height: int
    width: int
    unit: int
    before: int
    dtype: str

    @property
    def word(self) -> int:
        """Pixels in four bytes."""
        return WORD // int(np.dtype(self.dtype).itemsize)

    @property
    def units(self) -> int:
        return -(-(self.before + self.width) // self.unit)

    @property
    def row(self) -> int:
        """Pixels from a row to the next."""
        return self.units * self.unit

    @property
    def pitch(self) -> int:
        """Pixels from a channel to the next."""
        return (-(-self.height * self.row // self.word) | 1) * self.word

    def buffer(self) -> Any:
        """The block's shared memory. Its name contains the type, since a source may have buffers of several types."""
        shape = (self.block_tiles.channels * self.pitch,)
        return named(f"planes_{self.dtype}", T.alloc_buffer(shape, self.dtype, scope="shared.dyn", align=Arena.ALIGNMENT))

    def place(self, thread: Expr, lane: Expr) -> Expr:
        """Position of the channel of a thread's lane."""
        return (lane * (self.block_tiles.channels // self.block_tiles.lanes) + thread) * self.pitch

    def each(self, tid: Expr, body: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """Calls body(channel, its position, row, unit) for every unit. A thread keeps its unit and iterates over channels."""
        lanes, channels = self.block_tiles.lanes, self.block_tiles.channels
        rows = min(self.height, THREADS // self.units)
        at_once = THREADS // (self.units * rows) if rows == self.height else 1  # channels at a time
        unit, y, c = tid % self.units, tid // self.units % rows, tid // (self.units * rows)
        with T.serial(-(-self.height // rows)) as down, T.serial(-(-channels // at_once)) as round_:
            here, channel = down * rows + y, round_ * at_once + c
            limits = [(c < at_once, self.units * rows * at_once < THREADS), (here < self.height, self.height % rows > 0)]
            limits += [(channel < channels, channels % at_once > 0)]
            with T.If(tirx.all(True, *(limit for limit, needed in limits if needed))), T.Then():
                body(channel, self.place(channel // lanes, channel % lanes), here, unit)


def input_transform(tiles: Tiles, data: Any, out: Any, first: First) -> None:
    conv, m, t = tiles.conv, tiles.outputs, tiles.size
    block_tiles = _BlockTiles(tiles, conv.in_channels)
    unit = block_tiles.unit(conv.width, conv.itemsize)
    rows = _Rows(block_tiles, block_tiles.down * m + t - m, block_tiles.across * m + t - m, unit, -conv.padding[1] % unit, conv.dtype)
    skip = rows.before % rows.word if m % rows.word == 0 else 0  # pixels between a word's beginning and a thread's row
    words = -(-(skip + t) // rows.word)
    with T.launch_thread("blockIdx.x", math.prod(block_tiles.grid)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        start = first()
        image, row, col, channel = block_tiles.corner(bx)
        planes = rows.buffer()
        n, top, left = start["n"] + image, start["m"] + row * m - conv.padding[0], col * m - conv.padding[1] - rows.before
        loaded = local("loaded", (unit,), conv.dtype)
        word = math.gcd(rows.word, unit)

        def load(c: Expr, place: Expr, y: Expr, u: Expr) -> None:
            h, w = top + y, left + u * unit
            inside = [n < conv.batch, channel + c < conv.in_channels, h >= 0, h < conv.height, w >= 0, w < conv.width]
            load_inside(unit, inside, loaded, lambda e: [e], lambda e: data[n, channel + c, h, w + e])
            with T.unroll(unit // word) as k:
                at = place + y * rows.row + u * unit + k * word
                move(word, planes, lambda e: [at + e], lambda e: loaded[k * word + e])

        rows.each(tid, load)
        barrier()

        def one(down: Expr, across: Expr, thread: Expr) -> None:
            line = local("line", (block_tiles.lanes, t, words * rows.word), conv.dtype)
            with T.unroll(block_tiles.lanes) as lane, T.unroll(t) as i, T.unroll(words) as k:
                at = rows.place(thread, lane) + (down * m + i) * rows.row + across * m + rows.before - skip + k * rows.word
                move(rows.word, line, lambda e: [lane, i, k * rows.word + e], lambda e: planes[at + e])
            tile, c = (image * tiles.rows + row + down) * tiles.counts[1] + col + across, channel + thread * block_tiles.lanes
            with T.If(tirx.all(row + down < tiles.rows, col + across < tiles.counts[1], c < conv.in_channels)), T.Then():
                store_tile(tiles, block_tiles.lanes, lambda i, j, lane: line[lane, i, skip + j], out, tile, c)

        block_tiles.each_warp(tid, one)


def output_transform(tiles: Tiles, products: Any, tensors: dict[str, Any], first: First) -> None:
    conv, m, (out_h, out_w) = tiles.conv, tiles.outputs, tiles.conv.output_size
    block_tiles, value_dtype = _BlockTiles(tiles, conv.out_channels), "float32" if conv.residual else conv.out_dtype
    unit = block_tiles.unit(out_w, conv.itemsize)
    rows = _Rows(block_tiles, block_tiles.down * m, block_tiles.across * m, unit, 0, value_dtype)
    with T.launch_thread("blockIdx.x", math.prod(block_tiles.grid)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        start = first()
        image, row, col, channel = block_tiles.corner(bx)
        planes = rows.buffer()

        def one(down: Expr, across: Expr, thread: Expr) -> None:
            tile, c = (image * tiles.rows + row + down) * tiles.counts[1] + col + across, channel + thread * block_tiles.lanes
            with T.If(tirx.all(row + down < tiles.rows, col + across < tiles.counts[1], c < conv.out_channels)), T.Then():
                found = load_products(tiles, block_tiles.lanes, products, tile, c, value_dtype, finished(conv, tensors, c))
                with T.unroll(block_tiles.lanes) as lane, T.unroll(m) as i, T.unroll(m // rows.word) as k:
                    at = rows.place(thread, lane) + (down * m + i) * rows.row + across * m + k * rows.word
                    move(rows.word, planes, lambda e: [at + e], lambda e: found[i, k * rows.word + e, lane])

        word = math.gcd(rows.word, unit)
        line = local("line", (unit,), value_dtype)

        def store(c: Expr, place: Expr, y: Expr, u: Expr) -> None:
            n, h, w = start["n"] + image, start["m"] + row * m + y, col * m + u * unit
            # rows of tiles behind the band's last belong to the next
            inside = [n < conv.batch, row + y // m < tiles.rows, h < out_h, w < out_w, channel + c < conv.out_channels]
            with T.If(tirx.all(*inside)), T.Then():
                with T.unroll(unit // word) as k:
                    at = place + y * rows.row + u * unit + k * word
                    move(word, line, lambda e: [k * word + e], lambda e: planes[at + e])
                write_outputs(conv, tensors, unit, ((n * conv.out_channels + channel + c) * out_h + h) * out_w + w, lambda e: line[e])

        block_tiles.each_warp(tid, one)
        barrier()
        rows.each(tid, store)
