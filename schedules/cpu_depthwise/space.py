"""The search space of depthwise tiles on CPUs: legal tiles that obviously waste nothing, for tuner and cost model."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from im2win.device.cpu import Machine
from im2win.schedules.cpu.space import divisors, even_tiles
from im2win.schedules.cpu.tile import VECTORS
from im2win.schedules.cpu_depthwise.legality import violations
from im2win.schedules.cpu_depthwise.tile import DepthwiseTile
from im2win.spec.conv2d import Conv2d

MAX_ROW_BLOCK = 112  # output rows
MAX_PASSES = 16  # parallel steps that share the channels of some rows
MAX_COLS = 14  # windows of a register tile: as many inputs are held beside their sums
MAX_ROWS = 8  # rows of a register tile of windows


def _lanes(conv: Conv2d, machine: Machine, least: int) -> list[int]:
    """Lanes of vectors of channels: the most that the channels fill, and fewer where the channels fill only those."""
    widths = [w for w in VECTORS if least <= w <= min(machine.lanes, conv.out_channels)]
    return [w for w in widths if w == widths[-1] or (conv.out_channels % (2 * w) and conv.out_channels % w == 0)]


def _passes(conv: Conv2d, blocks: int, row_blocks: int, machine: Machine) -> list[int]:
    """Channel blocks of a pass: all of them, and fewer where rows alone are few parallel steps."""
    steps = conv.batch * row_blocks
    return [blocks // parts for parts in divisors(blocks, MAX_PASSES) if parts == 1 or steps * parts <= 8 * machine.threads]


def _channel_tiles(conv: Conv2d, machine: Machine) -> Iterator[DepthwiseTile]:
    out_h, out_w = conv.output_size
    copied = conv.layout == "NCHW" or conv.out_channels != conv.groups
    for lanes in _lanes(conv, machine, 4 if conv.layout == "NCHW" else 1):
        for vectors in (1,) if conv.layout == "NCHW" else (1, 2):
            for cols in even_tiles(out_w, MAX_COLS // vectors):
                for row_block in divisors(out_h, MAX_ROW_BLOCK):
                    blocks = -(-conv.out_channels // (lanes * vectors))
                    passes = divisors(blocks, MAX_PASSES) if copied else _passes(conv, blocks, out_h // row_block, machine)
                    for pass_blocks in passes:
                        yield DepthwiseTile("channels", lanes, vectors, 1, cols, row_block, pass_blocks)


def _window_tiles(conv: Conv2d, machine: Machine) -> Iterator[DepthwiseTile]:
    out_h, out_w = conv.output_size
    most = next((w for w in VECTORS if w >= max(min(out_w, machine.lanes), 4)), machine.lanes)
    for lanes in {most, max(most // 2, 4)}:
        for vectors in range(1, min(-(-out_w // lanes), 4) + 1):
            if -(-out_w // lanes) % vectors:
                continue
            for row_block in even_tiles(out_h, MAX_ROW_BLOCK):
                for rows in divisors(row_block, MAX_ROWS):
                    for pass_blocks in divisors(conv.out_channels, 64):
                        steps = conv.batch * -(-out_h // row_block) * conv.out_channels // pass_blocks
                        few = steps <= 32 * machine.threads or pass_blocks == 64
                        if few and (4 <= rows * vectors <= 14 or rows == row_block):
                            yield DepthwiseTile("windows", lanes, vectors, rows, 1, row_block, pass_blocks)


@functools.lru_cache(maxsize=4)
def space(conv: Conv2d, machine: Machine) -> tuple[DepthwiseTile, ...]:
    """Every legal tile worth a trial, in a fixed order."""
    tiles = list(_channel_tiles(conv, machine))
    if conv.layout == "NCHW":
        tiles += sorted(_window_tiles(conv, machine), key=lambda tile: tuple(tile.as_dict().values()))
    return tuple(tile for tile in tiles if not violations(conv, tile, machine))
