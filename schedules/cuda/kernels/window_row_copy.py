"""The kernel that copies an input of few channels so that rows of windows are contiguous; see `WindowRows` for the copy."""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import CHUNK, local
from im2win.schedules.cuda.tiles.window_rows import row_copy_shape
from im2win.spec.conv2d import Conv2d

THREADS = 256  # of a block


def launch_window_row_copy(conv: Conv2d, source: Any, copy: Any) -> None:
    """Emits the launch of the copy. A thread writes 16 bytes, with zeros for columns beside the image and for channels that do not exist.

    Args:
        source: flat view of the input. copy: flat view of the copy.
    """
    shape, together = row_copy_shape(conv), CHUNK // conv.itemsize
    _, _, columns, pixel = shape
    count, each = math.prod(shape) // together, columns * pixel // together
    channels_last = conv.layout == "NHWC"
    with T.launch_thread("blockIdx.x", -(-count // THREADS)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        at = bx * THREADS + tid
        values = local("values", (together,), conv.dtype)
        with T.If(at < count), T.Then():
            row, first = at // each, at % each * together  # of all images; the first element in the row of the copy
            for k in range(together):
                channel, x = (first + k) % pixel, (first + k) // pixel - conv.padding[1]
                if channels_last:
                    place = (row * conv.width + x) * conv.in_channels + channel
                else:
                    plane = row // conv.height * conv.in_channels + channel
                    place = (plane * conv.height + row % conv.height) * conv.width + x
                inside = [x >= 0, x < conv.width] + ([channel < conv.in_channels] if pixel > conv.in_channels else [])
                T.buffer_store(values, T.if_then_else(tirx.all(*inside), source[place], tirx.const(0, conv.dtype)), [k])
            with T.vectorized(together) as k:
                T.buffer_store(copy, values[k], [at * together + k])
