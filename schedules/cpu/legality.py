"""Legality of CPU tiles, stated once: sampler, user input, records and tests all use this function."""

from __future__ import annotations

from im2win.device.cpu import Machine
from im2win.schedules.cpu.tile import AXES, ORDERS, VECTORS, Tile
from im2win.spec.conv2d import Conv2d


def violations(conv: Conv2d, tile: Tile, machine: Machine, *, matrix: bool) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal.

    Args:
        matrix: whether the algorithm multiplies a matrix whose windows have no rows.
    """
    rules = [
        (tile.axis in AXES, f"`axis` (={tile.axis}) must be one of {', '.join(AXES)}"),
        (tile.order in ORDERS, f"`order` (={tile.order}) must be one of {', '.join(ORDERS)}"),
        (tile.lanes in VECTORS, f"`lanes` (={tile.lanes}) must be one of {VECTORS}"),
    ]
    counts = ("vectors", "rows", "cols", "row_block", "pass_blocks", "unroll")
    rules += [(getattr(tile, name) >= 1, f"`{name}` (={getattr(tile, name)}) must be at least 1") for name in counts]
    broken = [text for holds, text in rules if not holds]
    return broken or [text for holds, text in _fits(conv, tile, machine, matrix) if not holds]


def _fits(conv: Conv2d, tile: Tile, machine: Machine, matrix: bool) -> list[tuple[bool, str]]:
    out_h, out_w = conv.output_size
    group_channels, blocks = conv.out_channels // conv.groups, tile.pack.blocks(conv)
    line = tile.row_block * out_w if matrix else out_w
    windows = tile.cols if tile.axis == "channels" else tile.vectors * tile.lanes
    # A tile of more windows than a line has is the same kernel as the tile that just covers the line, so only that one is legal.
    whole_vectors = -(-line // tile.lanes) * tile.lanes
    return [
        (tile.lanes >= 4 or conv.layout == "NHWC", f"`lanes` (={tile.lanes}) must be at least 4, what shuffles can transpose to NCHW"),
        (tile.lanes <= machine.lanes, f"`lanes` (={tile.lanes}) must be at most the machine's {machine.lanes}"),
        # accumulators, one K step of the other vector operand, and one broadcast
        (tile.accumulators + tile.vectors + 1 <= machine.registers + 1, f"sums and operands must fit the {machine.registers} registers"),
        (windows <= (line if tile.axis == "channels" else whole_vectors), f"the tile's windows (={windows}) must fit the line (={line})"),
        (not matrix or tile.rows == 1, "`rows` must be 1: the windows of a matrix have no rows"),
        (not matrix or tile.axis == "channels" or tile.row_block == 1, "`row_block` must be 1: a matrix's vectors stay in one row"),
        (out_h % tile.row_block == 0, f"`row_block` (={tile.row_block}) must divide the output's rows (={out_h})"),
        (matrix or tile.row_block % tile.rows == 0, f"`rows` (={tile.rows}) must divide `row_block` (={tile.row_block})"),
        (blocks % tile.pass_blocks == 0, f"`pass_blocks` (={tile.pass_blocks}) must divide the channel blocks (={blocks})"),
        # a group's last block may only be padded if it is the layer's last block
        (
            group_channels % tile.block == 0 or (conv.groups == 1 and tile.axis == "channels"),
            f"the block (={tile.block}) must divide a group's channels (={group_channels})",
        ),
        (
            tile.axis == "windows" or tile.block < group_channels + tile.lanes,
            f"the block (={tile.block}) must not hold a whole vector of padding beyond {group_channels} channels",
        ),
        (
            tile.axis == "windows" or tile.row_block * out_w * tile.block * 4 <= machine.l2_bytes // 2,
            f"the outputs of a row block must fit half of the level-2 cache (={machine.l2_bytes})",
        ),
        (tile.axis == "channels" or conv.layout == "NCHW", "vectors of windows need NCHW"),
    ]
