"""Legality of tiles of dot products on CPUs, stated once: sampler, user input, records and tests all use this function."""

from __future__ import annotations

from im2win.device.arm import input_registers
from im2win.device.cpu import Machine
from im2win.packing.cpu_dot import ALONG
from im2win.schedules.cpu_dot.geometry import Geometry
from im2win.schedules.cpu_dot.instructions import INSTRUCTIONS, NAMES, TILE_ROWS, TILES, Instruction, instruction
from im2win.schedules.cpu_dot.tile import WORDS, DotTile, axis_of
from im2win.spec.conv2d import Conv2d

DTYPES = tuple(dict.fromkeys(dtype for one in INSTRUCTIONS for dtype in one.dtypes))
COUNTS = ("vectors", "cols", "rows", "row_block", "pass_blocks")


def unsupported_reason(conv: Conv2d) -> str | None:
    """Why no tile computes a problem of these types: one always does."""
    return None


def violations(conv: Conv2d, tile: DotTile, machine: Machine) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    one = instruction(tile.instruction, conv.dtype)
    if one is None:
        able = [name for name in NAMES if instruction(name, conv.dtype)]
        return [f"`instruction` (={tile.instruction}) must be one of {', '.join(able)} for {conv.dtype}"]
    broken = [f"`{name}` (={getattr(tile, name)}) must be at least 1" for name in COUNTS if getattr(tile, name) < 1]
    if tile.axis != axis_of(conv):
        broken.append(f"`axis` (={tile.axis}) must be {axis_of(conv)}, which the layout {conv.layout} has side by side")
    expands = tile.axis == "windows" and tile.group > 1 and conv.dilation[1] == 1
    repeats = tile.axis == "windows" and conv.kernel != (1, 1)
    if tile.along not in ALONG or (tile.along == "columns" and not expands) or (tile.along == "taps" and not repeats):
        broken.append(
            f"`along` (={tile.along}) must be channels, or columns for words of several elements, axis windows and columns of dilation 1, "
            "or taps for axis windows and several taps"
        )
    shuffles = tile.along == "columns" and one.sums == "int32" and not one.tiles and conv.stride[1] <= one.group
    if tile.words not in WORDS or (tile.words == "shuffled" and not shuffles):
        broken.append(
            f"`words` (={tile.words}) must be stored, or shuffled for words of columns of integers in vectors, "
            "at least as many as the stride"
        )
    if tile.lanes not in one.lanes:
        broken.append(f"`lanes` (={tile.lanes}) must be one of {', '.join(map(str, one.lanes))} for {one.name}")
    return broken or [text for holds, text in (*_machine(tile, one, machine), *_fits(conv, tile, machine)) if not holds]


def operand_registers(tile: DotTile, one: Instruction, machine: Machine) -> int:
    """Registers that a micro-kernel needs beside those of its sums."""
    if one.tiles:
        return tile.cols + 1
    if tile.axis == "channels" and one.by_element(tile.lanes):
        return tile.vectors + tile.cols + 1  # inputs of several steps
    return tile.vectors + input_registers(machine) + 1


def _machine(tile: DotTile, one: Instruction, machine: Machine) -> list[tuple[bool, str]]:
    missing = one.missing(machine, tile.lanes)
    used = tile.accumulators + operand_registers(tile, one, machine)
    have = TILES if one.tiles else machine.registers
    return [
        (tile.group == one.group, f"`group` (={tile.group}) must be {one.group}, the elements of a word of {one.name}"),
        (not missing, f"`instruction` (={one.name}) needs {missing}, which the machine lacks"),
        (tile.lanes <= machine.lanes, f"`lanes` (={tile.lanes}) must be at most the machine's {machine.lanes}"),
        (
            tile.rows <= TILE_ROWS if one.tiles else tile.rows == 1,
            f"`rows` (={tile.rows}) must be {f'at most {TILE_ROWS}' if one.tiles else '1'} for {one.name}",
        ),
        (not one.tiles or tile.axis != "depthwise", "depthwise layers leave AMX tiles empty"),
        (used <= have, f"sums and operands (={used}) must fit the {have} registers"),
    ]


def _fits(conv: Conv2d, tile: DotTile, machine: Machine) -> list[tuple[bool, str]]:
    out_h, pack, geometry = conv.output_size[0], tile.pack, Geometry(conv, tile)
    single = pack.single_group(conv)
    channels = single.out_channels // single.groups
    fitting = tile.block <= channels
    rules = [
        (tile.row_block <= out_h, f"`row_block` (={tile.row_block}) must be at most the output's rows (={out_h})"),
        (fitting, f"the block (={tile.block}) must be at most a group's channels (={channels})"),
    ]
    if not fitting or tile.row_block > out_h:
        return rules
    per_group, blocks, line = pack.blocks_per_group(conv), pack.blocks(conv), geometry.line
    whole = tile.pass_blocks % per_group == 0 and blocks % tile.pass_blocks == 0
    least = tile.lanes * (tile.vectors - 1) + 1 if tile.axis == "windows" else tile.windows
    held = held_bytes_of_step(conv, tile)
    return [
        *rules,
        (least <= line, f"the tile's windows (={tile.windows}) must fit the line (={line})"),
        (
            whole or per_group % tile.pass_blocks == 0,
            f"`pass_blocks` (={tile.pass_blocks}) must divide a group's channel blocks (={per_group}), or be those of an equal part of all",
        ),
        (
            tile.row_block == 1 or held <= machine.l2_bytes // 2,
            f"the rows of a parallel step (={held} bytes) must fit half of the level-2 cache",
        ),
    ]


def held_bytes_of_step(conv: Conv2d, tile: DotTile) -> int:
    """Bytes that a parallel step copies its input to and keeps sums in."""
    geometry = Geometry(conv, tile)
    once = geometry.once.copied if geometry.repeated else 0
    return 4 * (geometry.copied + once + geometry.held)
