"""The kernel that copies the pixels that windows of a 1x1 layer read, with channels first; see `CopiedLines` for the copy."""

from __future__ import annotations

from typing import Any

from tvm.tirx.script import builder as T

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.primitives import Expr, local
from im2win.schedules.cuda.tiles.copied_lines import PAIR, CopiedLines, copied_run
from im2win.spec.conv2d import Conv2d

THREADS = 256  # of a block
AT_ONCE = 4  # most runs of pixels that a thread reads before it writes the first


def launch_copy(conv: Conv2d, field: CopiedLines, gpu: Gpu, source: Any, copy: Any) -> None:
    """Emits the launch of the copy.

    Neighbouring threads write neighbouring pixels of a channel: `copied_run` of them, which a thread reads at once with those between, or
    else a pair. A thread copies several such runs, the next one for each block of threads, if every multiprocessor has threads even so: all
    are read before the first is written, so that memory has more to do at a time.

    Args:
        source: flat view of the input. copy: flat view of the copy.
    """
    run, pixels = copied_run(conv), field.conv.width
    each = run or PAIR
    items = -(-pixels // each)  # of a channel
    count = conv.batch * conv.in_channels * items
    at_once = min(max(count // (THREADS * gpu.multiprocessors), 1), AT_ONCE)
    with T.launch_thread("blockIdx.x", -(-count // (THREADS * at_once))) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        places = [(bx * at_once + number) * THREADS + tid for number in range(at_once)]
        values = [local("values", (each,), conv.dtype) for _ in places]
        for at, one in zip(places, values, strict=True):
            with T.If(at < count), T.Then():
                (_read_run if run else _read_pair)(conv, source, at // items, at % items, one)
        for at, one in zip(places, values, strict=True):
            channel, n = at // items % conv.in_channels, at // (items * conv.in_channels)
            plane = (n // field.images * conv.in_channels + channel) * field.images + n % field.images
            to = plane * (field.copied_pitch // each) + at % items
            with T.If(at < count), T.Then(), T.vectorized(each) as k:
                T.buffer_store(copy, one[k], [to * each + k])


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
