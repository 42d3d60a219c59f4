"""The search space of tiles of dot products on CPUs: legal tiles that obviously waste nothing, for tuner and cost model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from im2win.device.cpu import Machine
from im2win.packing.cpu_dot import ALONG
from im2win.schedules.cpu.space import divisors, even_tiles
from im2win.schedules.cpu_dot.geometry import Geometry
from im2win.schedules.cpu_dot.instructions import AVX512_LANES, INSTRUCTIONS, TILE_ROWS, Instruction
from im2win.schedules.cpu_dot.legality import operand_registers, violations
from im2win.schedules.cpu_dot.tile import DotTile, axis_of
from im2win.spec.conv2d import Conv2d

MOST_ROWS, MOST_PASSES = 112, 16  # output rows of a step, and steps that share the channels of some rows
MOST_VECTORS, MOST_COLS = 4, 14
MOST_EXPANDED = 16  # channels of a group whose words are worth a trial along kernel columns
MOST_REPEATED = 256  # outputs of a channel whose inputs are worth a copy for each tap
WITHOUT_VPERMB = ("cascadelake", "cooperlake")
LEAST_CHUNK = 3  # words of a row of AMX tiles: products of narrower ones take as long


@functools.lru_cache(maxsize=4)
def space(conv: Conv2d, machine: Machine) -> tuple[DotTile, ...]:
    """Every legal tile worth a trial, in a fixed order."""
    tiles: dict[DotTile, None] = {}
    for one in _instructions(conv, machine):
        for base in _register_tiles(conv, one, machine):
            for row_block in _row_blocks(conv) if base.block <= _channels(conv, base) else ():
                tile = replace(base, row_block=row_block)
                for pass_blocks in _passes(conv, tile, machine):
                    tiles[replace(tile, pass_blocks=pass_blocks)] = None
    return tuple(tile for tile in tiles if not violations(conv, tile, machine))


def _instructions(conv: Conv2d, machine: Machine) -> list[Instruction]:
    """The instructions worth a trial: AMX, and the first of the others that the machine has for vectors of some length."""
    able = [one for one in INSTRUCTIONS if conv.dtype in one.dtypes and any(not one.missing(machine, lanes) for lanes in one.lanes)]
    plain = [one for one in able if not one.tiles]
    tiles = [one for one in able if one.tiles and axis_of(conv) != "depthwise"]
    short = [one for one in plain if 1 in one.lanes][:1]  # for blocks of fewer channels than the others' vectors
    return [*tiles, *dict.fromkeys([plain[0], *short])]


def _channels(conv: Conv2d, tile: DotTile) -> int:
    single = tile.pack.single_group(conv)
    return single.out_channels // single.groups


def _row_blocks(conv: Conv2d) -> list[int]:
    out_h = conv.output_size[0]
    known = {rows for rows in divisors(out_h, MOST_ROWS)} | {min(rows, out_h) for rows in (1, 2, 4, 8, 16)}
    return sorted(known)


def _register_tiles(conv: Conv2d, one: Instruction, machine: Machine) -> Iterator[DotTile]:
    """Register tiles of an instruction, with one row and one channel block in a step."""
    axis = axis_of(conv)
    few = conv.in_channels // conv.groups <= MOST_EXPANDED
    for along in ALONG:
        base = DotTile(one.name, one.group, axis, 16, 1, 1, 1, 1, 1, along)
        if along == "channels" or (along == "taps" and one.tiles and axis == "windows" and _small(conv)):
            yield from _tiles_along(conv, one, machine, base)
        elif along == "columns" and few and axis == "windows" and one.group > 1 and conv.dilation[1] == 1 and conv.kernel[1] > 1:
            yield from _tiles_along(conv, one, machine, base)
            if _permutes(one, machine) and conv.stride[1] <= one.group:
                yield from _tiles_along(conv, one, machine, replace(base, words="shuffled"))


def _small(conv: Conv2d) -> bool:
    """Whether a map is so small, and has so many channels, that copies for each tap cost less than the gaps between rows without them."""
    return conv.kernel != (1, 1) and math.prod(conv.output_size) <= MOST_REPEATED and conv.in_channels // conv.groups > MOST_EXPANDED


def _permutes(one: Instruction, machine: Machine) -> bool:
    """Whether the machine has an instruction that picks bytes from everywhere in a vector: `vpermb`, younger than the first with VNNI."""
    return one.name == "vnni" and machine.lanes == AVX512_LANES and machine.mcpu not in WITHOUT_VPERMB


def _tiles_along(conv: Conv2d, one: Instruction, machine: Machine, base: DotTile) -> Iterator[DotTile]:
    """Register tiles whose words are those of `base`."""
    axis, out_w = base.axis, conv.output_size[1]
    channels = conv.out_channels if axis == "depthwise" else conv.out_channels // conv.groups
    if one.tiles:
        if Geometry(conv, base).chunk < LEAST_CHUNK:
            return
        for cols, vectors in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)):
            for rows in _tile_rows(conv, axis, channels):
                yield replace(base, vectors=vectors, cols=cols, rows=rows)
        return

    def fits(tile: DotTile) -> bool:
        return tile.accumulators + operand_registers(tile, one, machine) <= machine.registers

    for lanes in _lanes(conv, one, machine, base, channels):
        for vectors in range(1, MOST_VECTORS + 1):
            if axis == "windows":
                most = min(MOST_COLS, channels)
                even = sorted(even_tiles(channels, most))
                sizes = even
            else:
                shape = replace(base, lanes=lanes, vectors=vectors)
                most = max(cols for cols in range(1, MOST_COLS + 1) if cols == 1 or fits(replace(shape, cols=cols)))
                even = sorted(even_tiles(out_w, most))
                sizes = sorted({*even, *(size for size in (6, 7, 8, 12, 14) if size <= most)})
            for cols in sizes:
                least = 2 if machine.registers > 16 else 1
                few = cols * vectors < 4 * least and (vectors < MOST_VECTORS and cols < most)
                tile = replace(base, lanes=lanes, vectors=vectors, cols=cols)
                if fits(tile) and not (few and cols != even[-1]):
                    yield tile


def _tile_rows(conv: Conv2d, axis: str, channels: int) -> list[int]:
    """Rows of AMX tiles: of channels, all that fit; of windows, those that cover a line evenly, too."""
    if axis == "windows":
        return [min(TILE_ROWS, channels)]
    line = conv.output_size[1]
    return sorted({min(TILE_ROWS, line), TILE_ROWS, -(-line // -(-line // TILE_ROWS))})


def _lanes(conv: Conv2d, one: Instruction, machine: Machine, base: DotTile, channels: int) -> list[int]:
    """Lanes worth a trial: the most that the machine has, and fewer where windows or channels do not fill those."""
    able = [lanes for lanes in one.lanes if lanes <= machine.lanes and not one.missing(machine, lanes)]
    if base.axis != "windows":
        filled = [lanes for lanes in able if lanes <= channels]
        return [lanes for lanes in filled if lanes == filled[0] or (channels % (2 * lanes) and channels % lanes == 0)]
    probe = replace(base, lanes=1, row_block=min(conv.output_size[0], 8))
    line = Geometry(conv, probe).line
    return [lanes for lanes in able if lanes == able[0] or line <= lanes]


def _passes(conv: Conv2d, tile: DotTile, machine: Machine) -> list[int]:
    """Channel blocks of a pass: all of them, and fewer where rows alone are few parallel steps."""
    per_group, blocks = tile.pack.blocks_per_group(conv), tile.pack.blocks(conv)
    groups = blocks // per_group
    steps = conv.batch * -(-conv.output_size[0] // tile.row_block)
    found = {blocks}
    for parts in divisors(groups, MOST_PASSES):
        found.add(groups // parts * per_group)
    for parts in divisors(per_group, MOST_PASSES):
        found.add(per_group // parts)
    return sorted(size for size in found if size == blocks or steps * (blocks // size) <= 8 * machine.threads)
