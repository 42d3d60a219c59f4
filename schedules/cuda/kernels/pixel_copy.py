"""The kernel that copies the pixels that windows of a 1x1 layer read, with channels first; see `CopiedLines` for the copy."""

from __future__ import annotations

from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import Expr, local
from im2win.schedules.cuda.tiles.copied_lines import PAIR, CopiedLines, copied_run
from im2win.spec.conv2d import Conv2d

THREADS = 256  # of a block


def launch_copy(conv: Conv2d, field: CopiedLines, source: Any, copy: Any) -> None:
    """Emits the launch of the copy.

    Neighbouring threads write neighbouring pixels of a channel: `copied_run` of them, which a thread reads at once with those between, or
    else a pair.

    Args:
        source: flat view of the input. copy: flat view of the copy.
    """
    run, pixels = copied_run(conv), field.conv.width
    each = run or PAIR
    items = -(-pixels // each)  # of a channel
    count = conv.batch * conv.in_channels * items
    with T.launch_thread("blockIdx.x", -(-count // THREADS)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        at = bx * THREADS + tid
        with T.If(at < count), T.Then():
            item, channel, n = at % items, at // items % conv.in_channels, at // (items * conv.in_channels)
            values = local("values", (each,), conv.dtype)
            if run:
                _read_run(conv, source, n * conv.in_channels + channel, item, values)
            else:
                _read_pair(conv, source, n * conv.in_channels + channel, item, values)
            plane = (n // field.images * conv.in_channels + channel) * field.images + n % field.images
            to = plane * (field.copied_pitch // each) + item
            with T.vectorized(each) as k:
                T.buffer_store(copy, values[k], [to * each + k])


def _read_run(conv: Conv2d, source: Any, plane: Expr, item: Expr, values: Any) -> None:
    """Reads a run of pixels of one row, and those between them, at once."""
    run, across = copied_run(conv), conv.stride[1]
    runs, read = conv.output_size[1] // run, run * across
    from_ = (plane * conv.height + item // runs * conv.stride[0]) * (conv.width // read) + item % runs
    given = local("given", (read,), conv.dtype)
    with T.vectorized(read) as k:
        T.buffer_store(given, source[from_ * read + k], [k])
    for k in range(run):
        T.buffer_store(values, given[k * across], [k])


def _read_pair(conv: Conv2d, source: Any, plane: Expr, item: Expr, values: Any) -> None:
    """Reads two neighbouring pixels of the copy; behind the last pixel the last one again."""
    (height, width), (down, across) = conv.output_size, conv.stride
    for e in range(PAIR):
        pixel = item * PAIR + e
        if height * width % PAIR and e:
            pixel = T.min(pixel, height * width - 1)
        place = (plane * conv.height + pixel // width * down) * conv.width + pixel % width * across
        T.buffer_store(values, source[place], [e])
