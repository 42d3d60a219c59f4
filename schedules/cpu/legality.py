"""Legality of CPU tiles, stated once: sampler, user input, records and tests all use this function."""

from __future__ import annotations

import math
from collections.abc import Iterator

from im2win.device.cpu import Machine
from im2win.schedules.cpu.tile import AXES, INPUTS, ORDERS, PADDING, VECTORS, Tile
from im2win.spec import padding
from im2win.spec.conv2d import Conv2d

COUNTS = ("vectors", "rows", "cols", "row_block", "pass_blocks", "unroll", "chunks")


def violations(conv: Conv2d, tile: Tile, machine: Machine, *, matrix: bool) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal.

    Args:
        matrix: whether the algorithm multiplies a matrix whose windows have no rows.
    """
    return list(_fields(tile)) or list(_fits(conv, tile, machine, matrix))


def unrolls_columns(conv: Conv2d, tile: Tile) -> bool:
    """Whether the kernel's columns are the unrolled steps of the sum; `matrix` aside."""
    return tile.order == "cuv" and tile.unroll > 1 and conv.kernel[1] > 1


def _fields(tile: Tile) -> Iterator[str]:
    if tile.axis not in AXES:
        yield f"`axis` (={tile.axis}) must be one of {', '.join(AXES)}"
    if tile.order not in ORDERS:
        yield f"`order` (={tile.order}) must be one of {', '.join(ORDERS)}"
    if tile.padding not in PADDING:
        yield f"`padding` (={tile.padding}) must be one of {', '.join(PADDING)}"
    if tile.inputs not in INPUTS:
        yield f"`inputs` (={tile.inputs}) must be one of {', '.join(INPUTS)}"
    if tile.lanes not in VECTORS:
        yield f"`lanes` (={tile.lanes}) must be one of {VECTORS}"
    for name in COUNTS:
        if getattr(tile, name) < 1:
            yield f"`{name}` (={getattr(tile, name)}) must be at least 1"


def _fits(conv: Conv2d, tile: Tile, machine: Machine, matrix: bool) -> Iterator[str]:
    (out_h, out_w), channels, along_channels = conv.output_size, conv.out_channels // conv.groups, tile.axis == "channels"
    line, block, blocks = tile.row_block * out_w if matrix else out_w, tile.block, tile.pack.blocks(conv)
    windows = tile.cols if along_channels else tile.vectors * tile.lanes
    if tile.lanes < 4 and conv.layout != "NHWC":
        yield f"`lanes` (={tile.lanes}) must be at least 4, what shuffles can transpose to NCHW"
    if tile.lanes > machine.lanes:
        yield f"`lanes` (={tile.lanes}) must be at most the machine's {machine.lanes}"
    # accumulators, one K step of the other vector operand, and one broadcast
    if tile.accumulators + tile.vectors + 1 > machine.registers + 1:
        yield f"sums and operands must fit the {machine.registers} registers"
    # A tile of more windows than a line has is the same kernel as the tile that just covers the line, so only that one is legal.
    if windows > (line if along_channels else -(-line // tile.lanes) * tile.lanes):
        yield f"the tile's windows (={windows}) must fit the line (={line})"
    if tile.order == "uvc" and (matrix or not padding.skips(conv)):
        yield "`order` uvc is for layers that leave out taps in the padding, and not for a matrix"
    if matrix and tile.rows != 1:
        yield "`rows` must be 1: the windows of a matrix have no rows"
    if matrix and not along_channels and tile.row_block != 1:
        yield "`row_block` must be 1: a matrix's vectors stay in one row"
    if out_h % tile.row_block:
        yield f"`row_block` (={tile.row_block}) must divide the output's rows (={out_h})"
    if not matrix and tile.row_block % tile.rows:
        yield f"`rows` (={tile.rows}) must divide `row_block` (={tile.row_block})"
    if blocks % tile.pass_blocks:
        yield f"`pass_blocks` (={tile.pass_blocks}) must divide the channel blocks (={blocks})"
    if tile.chunks > 1 and ((matrix and not conv.pointwise) or not along_channels):
        yield f"`chunks` (={tile.chunks}) must be 1: only vectors of channels of windows with rows, or of 1x1, add up chunks of channels"
    if (conv.in_channels // conv.groups) % tile.chunks:
        yield f"`chunks` (={tile.chunks}) must divide a group's input channels (={conv.in_channels // conv.groups})"
    if tile.padding == "skipped" and (matrix or not (along_channels and tile.cols == out_w and unrolls_columns(conv, tile))):
        yield "`padding` must be multiplied: only vectors of channels of whole output rows with unrolled kernel columns skip it"
    if tile.padding == "skipped" and padding.skips(conv):
        yield "`padding` must be multiplied: kernels of a layer with so many taps in the padding skip it whatever the tile is"
    if tile.inputs == "reloaded" and (matrix or math.prod(conv.kernel) == 1):
        yield "`inputs` must be shared: only taps of windows with rows read inputs more than once"
    # a group's last block may only be padded if it is the layer's last block
    if channels % block and not (conv.groups == 1 and along_channels):
        yield f"the block (={block}) must divide a group's channels (={channels})"
    if along_channels and block >= channels + tile.lanes:
        yield f"the block (={block}) must not hold a whole vector of padding beyond {channels} channels"
    if along_channels and tile.row_block * out_w * block * 4 > machine.l2_bytes // 2:
        yield f"the outputs of a row block must fit half of the level-2 cache (={machine.l2_bytes})"
    if not along_channels and conv.layout != "NCHW":
        yield "vectors of windows need NCHW"
