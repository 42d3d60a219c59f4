"""The kernel that copies an input with channels first to channels last; see `CopiedPixels` for the copy."""

from __future__ import annotations

import math
from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import CHUNK, Expr, local
from im2win.schedules.cuda.tiles.copied_pixels import copies_all, of_pixels, pixel_run
from im2win.spec.conv2d import Conv2d

THREADS = 256  # of a block
LANES = {8: 8, 4: 8, 2: 4, 1: 2}  # by pixels of a run, neighbouring threads along channels, so that reads and writes are whole sectors


def launch_channels_last_copy(conv: Conv2d, source: Any, copy: Any) -> None:
    """Emits the launch of the copy.

    A thread reads `pixel_run` neighbouring pixels of each of the channels that fill 16 bytes, each channel's at once, transposes them in
    registers, and writes 16 bytes for each pixel. A few neighbouring threads have neighbouring channels of the same pixels, the next ones
    the next pixels.

    Args:
        source: flat view of the input. copy: flat view of the copy.
    """
    run, together, pixels = pixel_run(conv), CHUNK // conv.itemsize, math.prod(of_pixels(conv).input_shape[2:])
    units, runs = conv.in_channels // together, pixels // run
    lanes = math.gcd(units, LANES[run])
    count = conv.batch * units * runs
    with T.launch_thread("blockIdx.x", -(-count // THREADS)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        at = bx * THREADS + tid
        item = at // lanes % runs
        unit, n = at // (lanes * runs) % (units // lanes) * lanes + at % lanes, at // (units * runs)
        read = _read(conv)
        given = local("given", (together * read,), conv.dtype)
        values = local("values", (together,), conv.dtype)
        with T.If(at < count), T.Then():
            for channel in range(together):
                begin = _begin(conv, n * conv.in_channels + unit * together + channel, item)
                if read == 1:
                    T.buffer_store(given, source[begin], [channel])
                else:
                    with T.vectorized(read) as k:
                        T.buffer_store(given, source[begin * read + k], [channel * read + k])
            for pixel in range(run):
                for channel in range(together):
                    T.buffer_store(values, given[channel * read + pixel * (read // run)], [channel])
                place = (n * pixels + item * run + pixel) * units + unit
                with T.vectorized(together) as k:
                    T.buffer_store(copy, values[k], [place * together + k])


def _read(conv: Conv2d) -> int:
    """Elements of a channel that a thread reads at once: a run, with the pixels between if windows have a stride."""
    run = pixel_run(conv)
    return run if copies_all(conv) or run == 1 else run * conv.stride[1]


def _begin(conv: Conv2d, plane: Expr, item: Expr) -> Expr:
    """Position of the `item`-th run of a channel in the input, in units of `_read` elements. plane: index of the channel's plane."""
    read = _read(conv)
    if copies_all(conv):
        return plane * (conv.height * conv.width // read) + item
    runs = conv.output_size[1] // pixel_run(conv)  # of a row
    row = plane * conv.height + item // runs * conv.stride[0]
    if read == 1:
        return row * conv.width + item % runs * conv.stride[1]
    return row * (conv.width // read) + item % runs
