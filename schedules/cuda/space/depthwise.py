"""The search space of depthwise tiles on GPUs: legal tiles worth a trial."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import CORE_PRODUCTS
from im2win.schedules.cuda.legality.depthwise import STAGED, registers, tasks, unsupported_reason, violations
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.depthwise import DepthwiseTile
from im2win.spec.conv2d import Conv2d

THREADS = (64, 128, 256)  # about so many of a block
SIDES = (1, 2, 3, 4, 5, 6, 7, 8)  # rows and columns of outputs of a thread
MOST_OUTPUTS = 32  # of a thread, for each channel
MOST_REGISTERS = 208  # by the rule; with more, nvcc loads late, or keeps some of them in memory
MOST_WASTE = 1.2  # outputs of all threads over those that exist
_TAKEN_APART = ((4, 2), (1, 2))  # (elements, bytes of one) of vectors that nvcc takes apart, or of which two lie in a register


def _vectors(conv: Conv2d) -> list[int]:
    """Channels of a thread: as many as fit 16 bytes and divide the channels, and fewer."""
    fitting = [one for one in (16, 8, 4, 2, 1) if one * conv.itemsize <= CHUNK and conv.out_channels % one == 0]
    return [one for one in fitting if (one, conv.itemsize) not in _TAKEN_APART or one == fitting[0]][:3]


def _sides(size: int) -> list[int]:
    return [side for side in SIDES if side <= size]


def _wasted(conv: Conv2d, rows: int, cols: int) -> float:
    """Outputs that tiles of a size compute, over those that exist."""
    out_h, out_w = conv.output_size
    return -(-out_h // rows) * rows * -(-out_w // cols) * cols / (out_h * out_w)


def _windows(conv: Conv2d) -> Iterator[DepthwiseTile]:
    """Tiles of threads that load the elements of one channel."""
    out_h, out_w = conv.output_size
    columns = [side for side in _sides(out_w) if out_w % side == 0 and side in (1, 2, 4, 8, out_w)]  # stored as vectors, or whole rows
    for rows, cols, staged in itertools.product(_sides(out_h), columns, STAGED):
        if rows * cols > MOST_OUTPUTS or _wasted(conv, rows, cols) > MOST_WASTE:
            continue
        counts = tasks(conv, rows, cols)
        for threads in THREADS:
            yield DepthwiseTile(CORE_PRODUCTS[conv.dtype], 1, rows, cols, 1, max(one for one in counts if one <= threads), staged)


def _vectors_of_channels(conv: Conv2d) -> Iterator[DepthwiseTile]:
    out_h, out_w = conv.output_size
    for vector, rows, cols, staged in itertools.product(_vectors(conv), _sides(out_h), _sides(out_w), STAGED):
        if rows * cols > MOST_OUTPUTS or _wasted(conv, rows, cols) > MOST_WASTE:
            continue
        vectors, counts = conv.out_channels // vector, tasks(conv, rows, cols)
        for channels, threads in itertools.product((one for one in range(1, vectors + 1) if vectors % one == 0), THREADS):
            if channels > threads or (channels * vector * conv.itemsize < 2 * CHUNK and channels < vectors):
                continue  # less than a sector of memory
            count = max(one for one in counts if one <= max(threads // channels, 1))
            yield DepthwiseTile(CORE_PRODUCTS[conv.dtype], vector, rows, cols, channels, count, staged)


@functools.lru_cache(maxsize=8)
def space(conv: Conv2d, gpu: Gpu) -> tuple[DepthwiseTile, ...]:
    """Every legal tile worth a trial, in a fixed order."""
    if unsupported_reason(conv) is not None:
        return ()
    tiles = (_windows if conv.layout == "NCHW" else _vectors_of_channels)(conv)
    return tuple(tile for tile in dict.fromkeys(tiles) if not violations(conv, tile, gpu) and registers(conv, tile) <= MOST_REGISTERS)
