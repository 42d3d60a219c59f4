"""Legality of depthwise tiles on CPUs, stated once: sampler, user input, records and tests all use this function."""

from __future__ import annotations

from im2win.compute.depthwise import columns_read, count
from im2win.device.cpu import Machine
from im2win.schedules.cpu.tile import AXES, VECTORS
from im2win.schedules.cpu_depthwise.tile import DepthwiseTile, in_place
from im2win.spec.conv2d import Conv2d


def unsupported_reason(conv: Conv2d) -> str | None:
    """Why no tile computes a problem; None if one does."""
    return None if conv.depthwise else "it is for depthwise layers, which have a group for every input channel"


def violations(conv: Conv2d, tile: DepthwiseTile, machine: Machine) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    rules = [
        (tile.axis in AXES, f"`axis` (={tile.axis}) must be one of {', '.join(AXES)}"),
        (tile.lanes in VECTORS, f"`lanes` (={tile.lanes}) must be one of {VECTORS}"),
    ]
    counts = ("vectors", "rows", "cols", "row_block", "pass_blocks")
    rules += [(getattr(tile, name) >= 1, f"`{name}` (={getattr(tile, name)}) must be at least 1") for name in counts]
    broken = [text for holds, text in rules if not holds]
    return broken or [text for holds, text in (*_fits(conv, tile, machine), *_divides(conv, tile)) if not holds]


def staged_bytes(conv: Conv2d, tile: DepthwiseTile) -> int:
    """Bytes that a parallel step copies and buffers for a channel block; 0 where vectors are read in place."""
    if in_place(conv, tile):
        return 0
    rows, (_, out_w) = (tile.row_block - 1) * conv.stride[0] + conv.window[0], conv.output_size
    cols = -(-out_w // tile.lanes) * tile.lanes if tile.axis == "windows" else out_w
    width = (cols - 1) * conv.stride[1] + conv.window[1]
    width = -(-width // conv.stride[1]) * conv.stride[1] if tile.axis == "windows" else width
    turned = columns_read(conv) * tile.block if tile.axis == "channels" and conv.layout == "NCHW" else 0
    held = tile.row_block * out_w * tile.block if tile.axis == "channels" and conv.layout == "NCHW" else 0
    return conv.itemsize * (rows * width * tile.block + turned + held)


def _fits(conv: Conv2d, tile: DepthwiseTile, machine: Machine) -> list[tuple[bool, str]]:
    out_h, out_w = conv.output_size
    channels, held = tile.axis == "channels", staged_bytes(conv, tile)
    line = out_w if channels else -(-out_w // tile.lanes) * tile.lanes
    wide = tile.cols if channels else tile.vectors * tile.lanes
    return [
        (channels or conv.layout == "NCHW", "vectors of windows need NCHW"),
        (channels or tile.cols == 1, f"`cols` (={tile.cols}) must be 1 with vectors of windows"),
        (tile.lanes <= machine.lanes, f"`lanes` (={tile.lanes}) must be at most the machine's {machine.lanes}"),
        (
            not channels or conv.layout == "NHWC" or tile.lanes >= 4,
            f"`lanes` (={tile.lanes}) must be at least 4, what shuffles can transpose to NCHW",
        ),
        # accumulators, filters of a tap, and one input
        (tile.accumulators + tile.vectors + 1 <= machine.registers, f"sums and operands must fit the {machine.registers} registers"),
        (wide <= line, f"the tile's windows (={wide}) must fit the line (={line})"),
        (tile.row_block <= out_h, f"`row_block` (={tile.row_block}) must be at most the output's rows (={out_h})"),
        (tile.block <= conv.out_channels, f"the block (={tile.block}) must be at most the output's channels (={conv.out_channels})"),
        (held <= machine.l2_bytes // 2, f"the rows of a parallel step (={held} bytes) must fit half of the level-2 cache"),
    ]


def _divides(conv: Conv2d, tile: DepthwiseTile) -> list[tuple[bool, str]]:
    out_h, blocks, partial = conv.output_size[0], count(conv, tile.pack), conv.out_channels % tile.block
    return [
        (
            tile.axis == "channels" or -(-conv.output_size[1] // tile.lanes) % tile.vectors == 0,
            f"`vectors` (={tile.vectors}) must divide the vectors of a row of windows",
        ),
        (tile.row_block % tile.rows == 0, f"`rows` (={tile.rows}) must divide `row_block` (={tile.row_block})"),
        (blocks % tile.pass_blocks == 0, f"`pass_blocks` (={tile.pass_blocks}) must divide the channel blocks (={blocks})"),
        # rows beyond the output are computed and dropped, which neither the input nor a transpose allows
        (
            tile.axis == "windows" or out_h % tile.row_block == 0,
            f"`row_block` (={tile.row_block}) must divide the output's rows (={out_h})",
        ),
        (
            not partial or in_place(conv, tile),
            f"the block (={tile.block}) must divide the output's channels (={conv.out_channels}) of a padded copy",
        ),
        # the smaller last block is cut off the loop over a pass's blocks, and off the parallel loop it would run on one thread
        (
            not partial or tile.pass_blocks == blocks,
            f"`pass_blocks` (={tile.pass_blocks}) must be all {blocks} channel blocks where the last one is smaller",
        ),
    ]
