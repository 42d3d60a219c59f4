"""The search space of CPU tiles: legal tiles that obviously waste nothing, for the tuner to sample and the cost model to rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from im2win.device.cpu import Machine
from im2win.schedules.cpu.legality import unrolls_columns, violations
from im2win.schedules.cpu.model import MANY
from im2win.schedules.cpu.tile import VECTORS, Tile
from im2win.spec import padding
from im2win.spec.conv2d import Conv2d

MAX_ROW_BLOCK = 16  # output rows; more were never faster and stage more
MAX_PASS = 16  # channel blocks
WORTH_SKIPPING = 0.95  # most of the multiplications that are not by zero, for tiles that skip the others


def divisors(number: int, most: int) -> list[int]:
    """Divisors of a number up to `most`, in ascending order."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def row_blocks(conv: Conv2d) -> list[int]:
    """Heights of blocks of output rows: divisors of the output's rows."""
    return divisors(conv.output_size[0], MAX_ROW_BLOCK)


def even_tiles(line: int, most: int) -> list[int]:
    """Tile sizes that cut a line into tiles as equal as possible: one size for every number of tiles."""
    return sorted({-(-line // tiles) for tiles in range(-(-line // most), line + 1)}, reverse=True)


def _lanes(conv: Conv2d, machine: Machine) -> list[int]:
    """Lanes of vectors: the machine's, and fewer where that leaves less padding in a group's channels."""
    channels = conv.out_channels // conv.groups
    widths = [w for w in VECTORS if 4 <= w <= machine.lanes]
    if conv.layout == "NHWC" and conv.groups > 1 and channels % widths[0]:
        return [2 if channels % 2 == 0 else 1]  # a group is not padded, and vectors of windows need NCHW
    waste = {w: -(-channels // w) * w for w in widths}
    return [w for w in widths if w == widths[-1] or all(waste[w] < waste[wider] for wider in widths if wider > w)]


def _sums(conv: Conv2d, matrix: bool) -> list[tuple[str, int]]:
    """(order, unroll).

    The order only matters where the kernel has rows and columns. Where taps are left out, all channels of one may follow one another, so
    that a register tile asks once whether the tap lies inside.
    """
    orders = ["cuv", "cvu"] if min(conv.kernel) > 1 else ["cuv"]
    if not matrix and padding.skips(conv):
        orders.append("uvc")
    return [(order, unroll) for order in orders for unroll in (1, 4)]


def _chunks(conv: Conv2d, machine: Machine, block: int) -> list[int]:
    """Numbers of chunks: one, and so many that a chunk's filters take half of the level-1 cache, or an eighth of the level-2 cache.

    The first where a block's filters exceed the level-1 cache, the second where they take half of the level-2 cache.
    """
    filter_bytes = conv.itemsize * math.prod(conv.filter_shape[1:]) * block
    rooms = [machine.l1_bytes // 2] if filter_bytes > machine.l1_bytes else []
    if filter_bytes >= machine.l2_bytes // 2 or padding.skips(conv):
        rooms.append(machine.l2_bytes // 8)
    channels = conv.in_channels // conv.groups
    counts = divisors(channels, channels)
    return sorted({1, *(next((chunks for chunks in counts if filter_bytes // chunks <= room), 1) for room in rooms)})


def _line_chunks(conv: Conv2d, machine: Machine, shape: tuple[int, int], line: int) -> list[int]:
    """The same for a matrix that is the input itself: a chunk's filters and its inputs of a line fill 3/4 of the level-1 cache.

    Offered where a block's filters fill that cache, on machines with few registers: where there are many, a register tile holds a whole row
    of a small map. Each chunk begins every register tile anew, so that tiles need more sums than the latency of FMAs takes, and at least as
    many windows as vectors.

    Args:
        shape: vectors and windows of a register tile.
    """
    vectors, cols = shape
    block, channels = machine.lanes * vectors, conv.in_channels // conv.groups
    short = vectors * cols * machine.lanes <= machine.outputs_in_flight[0]
    if not conv.pointwise or machine.registers >= MANY or conv.itemsize * channels * block < machine.l1_bytes or short or cols < vectors:
        return [1]
    most = machine.l1_bytes * 3 // 4 // (conv.itemsize * (block + line))
    return [1, next((chunks for chunks in divisors(channels, channels) if channels // chunks <= most), channels)]


def _much_padding(conv: Conv2d) -> bool:
    """Whether tiles that skip taps in the padding are worth a trial; layers with even more skip them with every tile."""
    return padding.needed(conv) <= WORTH_SKIPPING and not padding.skips(conv)


def _channel_tiles(conv: Conv2d, machine: Machine, matrix: bool) -> Iterator[tuple[int, int, int, int, int]]:
    """(lanes, vectors, rows, cols, row block) with axis "channels"."""
    out_w = conv.output_size[1]
    channels = conv.out_channels // conv.groups
    least = max(machine.outputs_in_flight[0] // machine.lanes, 1)
    for lanes in _lanes(conv, machine):
        for vectors in range(1, min(-(-channels // lanes), 6) + 1):
            room = machine.registers // vectors - 1  # most windows whose accumulators fit the registers beside one K step of filters
            for row_block in row_blocks(conv):
                line = out_w * (row_block if matrix else 1)
                for rows in [1] if matrix else divisors(row_block, 4):
                    for cols in even_tiles(line, max(room // rows, 1)):
                        # enough outputs in flight (thesis eq. 3-1), unless the line itself is shorter
                        if rows * cols * vectors >= min(least, rows * line * vectors):
                            yield lanes, vectors, rows, cols, row_block


def _window_tiles(conv: Conv2d, machine: Machine, matrix: bool) -> Iterator[tuple[int, int, int, int, int]]:
    """(lanes, vectors, rows, cols, row block) with axis "windows", where cols counts channels."""
    out_w = conv.output_size[1]
    lanes = next((w for w in VECTORS if w >= max(min(out_w, machine.lanes), 4)), machine.lanes)
    for cols in divisors(conv.out_channels // conv.groups, 16):
        for vectors in range(1, min(-(-out_w // lanes), 4) + 1):
            for row_block in [1] if matrix else row_blocks(conv):
                for rows in [1] if matrix else divisors(row_block, 8):
                    if rows * cols * vectors + vectors <= machine.registers:
                        yield lanes, vectors, rows, cols, row_block


@functools.lru_cache(maxsize=4)  # algorithms that multiply the same windows are ranked one after the other
def space(conv: Conv2d, machine: Machine, *, matrix: bool) -> tuple[Tile, ...]:
    """Every legal tile worth a trial, in a fixed order."""
    tiles: list[Tile] = []
    shapes = [("channels", shape) for shape in _channel_tiles(conv, machine, matrix)]
    if conv.layout == "NCHW":
        shapes += [("windows", shape) for shape in _window_tiles(conv, machine, matrix)]
    for axis, (lanes, vectors, rows, cols, row_block) in shapes:
        block = lanes * vectors if axis == "channels" else cols
        blocks = conv.groups * -(-(conv.out_channels // conv.groups) // block)
        passes = sorted({*divisors(blocks, MAX_PASS), blocks})
        if (conv.out_channels // conv.groups) % block and conv.batch * conv.output_size[0] > 1:
            passes = [blocks]  # in several passes, the smaller last block would be peeled off the parallel loop and run on one thread
        counts = [1]
        if axis == "channels":
            line = row_block * conv.output_size[1]
            if matrix:
                counts = _line_chunks(conv, machine, (vectors, cols), line)
            elif rows * cols < line:  # several register tiles read a chunk's filters
                counts = _chunks(conv, machine, block)
        for pass_blocks in passes:
            made = [
                Tile(axis, lanes, vectors, rows, cols, row_block, pass_blocks, order, unroll, chunks)
                for order, unroll in _sums(conv, matrix)
                for chunks in counts
            ]
            if axis == "channels" and not matrix and cols == conv.output_size[1] and _much_padding(conv):
                made += [replace(tile, padding="skipped") for tile in made if unrolls_columns(conv, tile)]
            if axis == "channels" and not matrix:
                made += [replace(tile, inputs="reloaded") for tile in made if unrolls_columns(conv, tile)]
            tiles += made
    return tuple(tile for tile in tiles if not violations(conv, tile, machine, matrix=matrix))
