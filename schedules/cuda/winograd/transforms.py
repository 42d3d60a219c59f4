"""The transform kernels of Winograd in bands: the input transform and the output transform.

A thread transforms tiles of as many neighbouring channels as fill four bytes. The 32 threads of a warp then store 128 bytes of V, or load
128 bytes of M, at a time. With channels last a warp accesses pixels in the same way and needs no shared memory. With channels first, pixels
pass through shared memory: rows are copied in accesses of up to 16 bytes, and no thread divides after its first instructions.

Transforms are computed in float32 also where tiles are float16: float16 arithmetic would round every step, and the transforms would amplify
these errors. The extra instructions hide behind the traffic of V and M. V and M are each rounded once. Storing M as float16 adds a fifth to
a quarter to the error of F(4x4, 3x3), which `numerics.winograd_error.measure` includes; as float32 it would add half to the bytes that pass
through level-2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.numerics.matvec_program import Program, program
from im2win.numerics.winograd_matrices import transform
from im2win.numerics.winograd_tiling import Tiles
from im2win.schedules.cuda.epilogue.store import activated
from im2win.schedules.cuda.loaders.stored_windows import First
from im2win.schedules.cuda.primitives import CHUNK, WORD, Arena, Expr, barrier, local, named
from im2win.spec.conv2d import Conv2d

THREADS = 256
WARP = 32


def _itemsize(dtype: str) -> int:
    return int(np.dtype(dtype).itemsize)


def _together(channels: int, itemsize: int) -> int:
    """Channels of a thread."""
    return math.gcd(channels, max(WORD // itemsize, 1))


def _move(count: int, target: Any, place: Callable[[Expr], list[Expr]], value: Callable[[Expr], Expr]) -> None:
    """Stores `count` neighbours in one access."""
    if count == 1:
        T.buffer_store(target, value(0), place(0))
    else:
        with T.vectorized(count) as e:
            T.buffer_store(target, value(e), place(e))


def _load_inside(count: int, inside: list[Expr], target: Any, place: Callable[[Expr], list[Expr]], value: Callable[[Expr], Expr]) -> None:
    """The same if the conditions `inside` hold, zeros otherwise."""
    with T.If(tirx.all(*inside)):
        with T.Then():
            _move(count, target, place, value)
        with T.Else():
            _move(count, target, place, lambda e: tirx.const(0, target.dtype))


def _run(steps: Program, read: Callable[[int], Expr], write: Callable[[int, Expr], None]) -> None:
    """Emits the product of a matrix and a vector as the steps of a program."""
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


def _both_ways(steps: Program, given: Any) -> Any:
    """Registers with matrix * given * matrix^T."""
    rows = len(steps.outputs)
    half = local("half", (rows, steps.inputs), "float32")
    whole = local("whole", (rows, rows), "float32")
    with T.unroll(steps.inputs) as j:
        _run(steps, lambda i: given[i, j], lambda i, value: T.buffer_store(half, value, [i, j]))
    with T.unroll(rows) as i:
        _run(steps, lambda j: half[i, j], lambda j, value: T.buffer_store(whole, value, [i, j]))
    return whole


def _transformed(steps: Program, lanes: int, fill: Callable[[Any, Expr], None], dtype: str, end: Callable[[Expr, Expr], Expr]) -> Any:
    """Registers [rows, columns, lanes] of `dtype`: the transforms of all lanes, one after the other.

    Args:
        fill: emits the float32 tile of a lane. end: (value, lane) -> the value to keep.
    """
    rows = len(steps.outputs)
    found = local("found", (rows, rows, lanes), dtype)
    with T.unroll(lanes) as lane:
        given = local("given", (steps.inputs, steps.inputs), "float32")
        fill(given, lane)
        whole = _both_ways(steps, given)
        with T.unroll(rows) as i, T.unroll(rows) as j:
            T.buffer_store(found, end(whole[i, j], lane).astype(dtype), [i, j, lane])
    return found


def _steps(tiles: Tiles, side: str) -> Program:
    form = transform(tiles.outputs, tiles.conv.kernel[0])
    return program(form.bt if side == "input" else form.at)


# --- channels last: a warp's threads have neighbouring channels


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


def _input_of_pixels(tiles: Tiles, data: Any, out: Any, first: First) -> None:
    conv, m, t = tiles.conv, tiles.outputs, tiles.size
    lanes = _together(conv.in_channels, conv.itemsize)

    def one(tile: Expr, image: Expr, row: Expr, col: Expr, channel: Expr) -> None:
        start = first()
        n, top, left = start["n"] + image, start["m"] + row * m - conv.padding[0], col * m - conv.padding[1]
        pixels = local("pixels", (t, t, lanes), conv.dtype)
        with T.unroll(t) as i, T.unroll(t) as j:
            h, w = top + i, left + j
            inside = [n < conv.batch, h >= 0, h < conv.height, w >= 0, w < conv.width]
            _load_inside(lanes, inside, pixels, lambda e: [i, j, e], lambda e: data[n, h, w, channel + e])
        _store_tile(tiles, lanes, lambda i, j, lane: pixels[i, j, lane], out, tile, channel)

    _each_thread(tiles, conv.in_channels, lanes, one)


def _store_tile(tiles: Tiles, lanes: int, pixel: Callable[[Expr, Expr, Expr], Expr], out: Any, tile: Expr, channel: Expr) -> None:
    """Emits the transform of an input tile and its stores."""
    conv, t = tiles.conv, tiles.size

    def fill(given: Any, lane: Expr) -> None:
        with T.unroll(t) as i, T.unroll(t) as j:
            T.buffer_store(given, pixel(i, j, lane).astype("float32"), [i, j])

    found = _transformed(_steps(tiles, "input"), lanes, fill, conv.dtype, lambda value, lane: value)
    with T.unroll(t) as i, T.unroll(t) as j:
        at = (tile * tiles.positions + i * t + j) * conv.in_channels + channel
        _move(lanes, out, lambda e: [at + e], lambda e: found[i, j, e])


def _load_products(
    tiles: Tiles, lanes: int, products: Any, tile: Expr, channel: Expr, dtype: str, end: Callable[[Expr, Expr], Expr]
) -> Any:
    """Emits the loads of a tile's products and their transform; registers [m, m, lanes] of `dtype`."""
    conv, t = tiles.conv, tiles.size
    loaded = local("loaded", (t, t, lanes), conv.dtype)
    with T.unroll(t) as i, T.unroll(t) as j:
        at = (tile * tiles.positions + i * t + j) * conv.out_channels + channel
        _move(lanes, loaded, lambda e: [i, j, e], lambda e: products[at + e])

    def fill(given: Any, lane: Expr) -> None:
        with T.unroll(t) as i, T.unroll(t) as j:
            T.buffer_store(given, loaded[i, j, lane].astype("float32"), [i, j])

    return _transformed(_steps(tiles, "output"), lanes, fill, dtype, end)


def _end(conv: Conv2d, tensors: dict[str, Any], channel: Expr) -> Callable[[Expr, Expr], Expr]:
    """A function (accumulator, lane) -> the value with bias and, if no residual follows, activation."""

    def end(value: Expr, lane: Expr) -> Expr:
        if conv.bias:
            value = value + tensors["bias"][channel + lane].astype("float32")
        return value if conv.residual else activated(conv.activation, value, "float32")

    return end


def _output_of_pixels(tiles: Tiles, products: Any, tensors: dict[str, Any], first: First) -> None:
    conv, m, (out_h, out_w) = tiles.conv, tiles.outputs, tiles.conv.output_size
    lanes = _together(conv.out_channels, conv.itemsize)
    value_dtype = "float32" if conv.residual else conv.out_dtype

    def one(tile: Expr, image: Expr, row: Expr, col: Expr, channel: Expr) -> None:
        start = first()
        n, top, left = start["n"] + image, start["m"] + row * m, col * m
        found = _load_products(tiles, lanes, products, tile, channel, value_dtype, _end(conv, tensors, channel))
        with T.unroll(m) as i, T.unroll(m) as j, T.If(tirx.all(n < conv.batch, top + i < out_h, left + j < out_w)), T.Then():
            at = ((n * out_h + top + i) * out_w + left + j) * conv.out_channels + channel
            _write(conv, tensors, lanes, at, lambda e: found[i, j, e])

    _each_thread(tiles, conv.out_channels, lanes, one)


def _write(conv: Conv2d, tensors: dict[str, Any], count: int, at: Expr, value: Callable[[Expr], Expr]) -> None:
    """Emits the stores of neighbouring outputs, with residual and activation where `_end` has left them."""
    if not conv.residual:
        _move(count, tensors["output"], lambda e: [at + e], value)
        return
    added, outputs = local("added", (count,), conv.out_dtype), local("values", (count,), conv.out_dtype)
    _move(count, added, lambda e: [e], lambda e: tensors["residual"][at + e])
    with T.unroll(count) as e:
        total = activated(conv.activation, value(e) + added[e].astype("float32"), "float32")
        T.buffer_store(outputs, total.astype(conv.out_dtype), [e])
    _move(count, tensors["output"], lambda e: [at + e], lambda e: outputs[e])


# --- channels first: a block's tiles pass through shared memory, as channel planes


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
        return _together(self.all_channels, self.tiles.conv.itemsize) if self.all_channels > WARP else 1

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
        return WORD // _itemsize(self.dtype)

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


def _input_of_planes(tiles: Tiles, data: Any, out: Any, first: First) -> None:
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
            _load_inside(unit, inside, loaded, lambda e: [e], lambda e: data[n, channel + c, h, w + e])
            with T.unroll(unit // word) as k:
                at = place + y * rows.row + u * unit + k * word
                _move(word, planes, lambda e: [at + e], lambda e: loaded[k * word + e])

        rows.each(tid, load)
        barrier()

        def one(down: Expr, across: Expr, thread: Expr) -> None:
            line = local("line", (block_tiles.lanes, t, words * rows.word), conv.dtype)
            with T.unroll(block_tiles.lanes) as lane, T.unroll(t) as i, T.unroll(words) as k:
                at = rows.place(thread, lane) + (down * m + i) * rows.row + across * m + rows.before - skip + k * rows.word
                _move(rows.word, line, lambda e: [lane, i, k * rows.word + e], lambda e: planes[at + e])
            tile, c = (image * tiles.rows + row + down) * tiles.counts[1] + col + across, channel + thread * block_tiles.lanes
            with T.If(tirx.all(row + down < tiles.rows, col + across < tiles.counts[1], c < conv.in_channels)), T.Then():
                _store_tile(tiles, block_tiles.lanes, lambda i, j, lane: line[lane, i, skip + j], out, tile, c)

        block_tiles.each_warp(tid, one)


def _output_of_planes(tiles: Tiles, products: Any, tensors: dict[str, Any], first: First) -> None:
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
                found = _load_products(tiles, block_tiles.lanes, products, tile, c, value_dtype, _end(conv, tensors, c))
                with T.unroll(block_tiles.lanes) as lane, T.unroll(m) as i, T.unroll(m // rows.word) as k:
                    at = rows.place(thread, lane) + (down * m + i) * rows.row + across * m + k * rows.word
                    _move(rows.word, planes, lambda e: [at + e], lambda e: found[i, k * rows.word + e, lane])

        word = math.gcd(rows.word, unit)
        line = local("line", (unit,), value_dtype)

        def store(c: Expr, place: Expr, y: Expr, u: Expr) -> None:
            n, h, w = start["n"] + image, start["m"] + row * m + y, col * m + u * unit
            # rows of tiles behind the band's last belong to the next
            inside = [n < conv.batch, row + y // m < tiles.rows, h < out_h, w < out_w, channel + c < conv.out_channels]
            with T.If(tirx.all(*inside)), T.Then():
                with T.unroll(unit // word) as k:
                    at = place + y * rows.row + u * unit + k * word
                    _move(word, line, lambda e: [k * word + e], lambda e: planes[at + e])
                _write(conv, tensors, unit, ((n * conv.out_channels + channel + c) * out_h + h) * out_w + w, lambda e: line[e])

        block_tiles.each_warp(tid, one)
        barrier()
        rows.each(tid, store)


# --- launches


def launch_input_transform(tiles: Tiles, data: Any, out: Any, first: First) -> None:
    """Emits the launch of the input transform, which stores V of a band.

    Args:
        data: the input. out: V [tiles of a band, positions, channels], flat.
        first: emits the first image and output row of the band.
    """
    launch = _input_of_planes if tiles.conv.layout == "NCHW" else _input_of_pixels
    launch(tiles, data, out, first)


def launch_output_transform(tiles: Tiles, products: Any, tensors: dict[str, Any], first: First) -> None:
    """Emits the launch of the output transform, which stores the outputs of a band with bias, residual and activation.

    Args:
        products: M [tiles of a band, positions, output channels], flat.
        tensors: flat views: "output", and where the problem has them "bias" [out_channels] and "residual".
        first: emits the first image and output row of the band.
    """
    launch = _output_of_planes if tiles.conv.layout == "NCHW" else _output_of_pixels
    launch(tiles, products, tensors, first)
