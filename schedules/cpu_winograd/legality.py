"""Legality of Winograd tiles on CPUs, stated once: sampler, user input, records and tests all use this function."""

from __future__ import annotations

import math
from dataclasses import fields

from im2win.compute.winograd import tiles
from im2win.device.cpu import Machine
from im2win.numerics.tolerance import TRUSTED, trusted
from im2win.numerics.winograd_error import expected
from im2win.numerics.winograd_tiling import spread
from im2win.packing.winograd import WinogradPack
from im2win.schedules.cpu.tile import VECTORS
from im2win.schedules.cpu_winograd.tile import WinogradTile
from im2win.spec.conv2d import MAX_ELEMENTS, Conv2d

LARGEST = 8  # most rows and columns of an input tile: beyond, transforms cost more than products save


def unsupported_reason(conv: Conv2d) -> str | None:
    """Why no tile computes a problem; None if one does."""
    if (reason := spread(conv)) is not None:
        return reason
    filters = conv.out_channels // conv.groups
    rules = [
        (min(conv.kernel) > 1 and max(conv.kernel) < LARGEST, f"transforms are for kernels of 2 to {LARGEST - 1} rows and columns"),
        (not conv.depthwise, "depthwise layers have no sums over channels, which transforms could pay for"),
        (conv.groups == 1 or filters % 4 == 0, f"a group's output channels (={filters}) must be a multiple of 4, the least vector"),
    ]
    broken = [reason for holds, reason in rules if not holds]
    if broken:
        return broken[0]
    if not trusted(conv, 2):
        return f"its least error, {expected(conv, 2):.1e}, is above {TRUSTED} of the tolerance"
    elements = math.prod(WinogradPack(2, 4).shape(conv))
    return f"its filters would have {elements} elements, more than {MAX_ELEMENTS}" if elements > MAX_ELEMENTS else None


def violations(conv: Conv2d, tile: WinogradTile, machine: Machine) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    broken = [
        f"`{field.name}` (={getattr(tile, field.name)}) must be at least 1" for field in fields(tile) if getattr(tile, field.name) < 1
    ]
    for name in ("depth", "lanes"):
        if getattr(tile, name) not in VECTORS:
            broken.append(f"`{name}` (={getattr(tile, name)}) must be one of {VECTORS}")
    if broken:
        return broken
    rules = [*_form(conv, tile), *_fits(conv, tile, machine)]
    return [text for holds, text in rules if not holds]


def _form(conv: Conv2d, tile: WinogradTile) -> list[tuple[bool, str]]:
    size = tile.outputs + max(conv.kernel) - 1
    if size > LARGEST:
        return [(False, f"`outputs` (={tile.outputs}) and the kernel make input tiles of {size}; they must be at most {LARGEST}")]
    return [
        (tile.outputs >= 2, f"`outputs` (={tile.outputs}) must be at least 2, or no product is saved"),
        (
            trusted(conv, tile.outputs),
            f"`outputs` (={tile.outputs}) lets errors grow to {expected(conv, tile.outputs):.1e}, above {TRUSTED} of the tolerance",
        ),
    ]


def _fits(conv: Conv2d, tile: WinogradTile, machine: Machine) -> list[tuple[bool, str]]:
    rows, cols = tiles(conv, tile.outputs)
    share, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    blocks, per_group, line = tile.pack.blocks(conv), tile.pack.blocks_per_group(conv), tile.images * tile.row_block * cols
    return [
        (tile.lanes >= 4, f"`lanes` (={tile.lanes}) must be at least 4, what shuffles can transpose to NCHW"),
        (tile.depth <= machine.lanes, f"`depth` (={tile.depth}) must be at most the machine's {machine.lanes} lanes"),
        (tile.depth < 2 * share, f"`depth` (={tile.depth}) must not be half zeros beyond {share} channels"),
        (tile.depth % tile.unroll == 0, f"`unroll` (={tile.unroll}) must divide `depth` (={tile.depth})"),
        (tile.lanes <= machine.lanes, f"`lanes` (={tile.lanes}) must be at most the machine's {machine.lanes}"),
        # accumulators, one step of filters, and one broadcast input
        (tile.accumulators + tile.vectors + 1 <= machine.registers + 1, f"sums and operands must fit the {machine.registers} registers"),
        (rows % tile.row_block == 0, f"`row_block` (={tile.row_block}) must divide the rows of tiles (={rows})"),
        (conv.batch % tile.images == 0, f"`images` (={tile.images}) must divide `batch` (={conv.batch})"),
        (
            tile.images == 1 or tile.row_block == rows,
            f"`images` (={tile.images}) must be 1, or `row_block` (={tile.row_block}) whole images of {rows}",
        ),
        (tile.cols <= line, f"`cols` (={tile.cols}) must fit the row block's tiles (={line})"),
        (blocks % tile.pass_blocks == 0, f"`pass_blocks` (={tile.pass_blocks}) must divide the channel blocks (={blocks})"),
        (
            tile.pass_blocks % per_group == 0 or per_group % tile.pass_blocks == 0,
            f"`pass_blocks` (={tile.pass_blocks}) must be parts of a group or whole groups of {per_group} blocks",
        ),
        (math.prod(tile.pack.shape(conv)) <= MAX_ELEMENTS, f"packed filters must have at most {MAX_ELEMENTS} elements"),
        # a group's last block may only be padded if it is the layer's last block
        (filters % tile.block == 0 or conv.groups == 1, f"the block (={tile.block}) must divide a group's channels (={filters})"),
        (tile.block < filters + tile.lanes, f"the block (={tile.block}) must not hold a whole vector of padding beyond {filters} channels"),
    ]
