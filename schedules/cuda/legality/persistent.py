"""Legality of tiles of persistent kernels, stated once: sampler, user input, records and tests all use these functions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from im2win.device.gpu import H200, Gpu
from im2win.schedules.cuda.arithmetic import NATIVE
from im2win.schedules.cuda.legality import boxes
from im2win.schedules.cuda.legality.multistage import MAX_THREADS
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.persistent import MAX_BOX, HaloTile, M, PersistentTile
from im2win.spec.conv2d import Conv2d

MAX_SUMS = 192  # most registers of a thread for accumulators
MAX_PRODUCTS = 256  # most products of a step, whose code is unrolled
SMALLEST = 8  # columns of the narrowest tile of outputs, channels last; channels first it has those of 16 bytes
OPERANDS = 56  # registers of a thread for addresses and for outputs in the epilogue


def unsupported_reason(conv: Conv2d) -> str | None:
    """Why no tile computes a problem; None if one may."""
    if (reason := boxes.unsupported_reason(conv, "persistent kernels", NATIVE)) is not None:
        return reason
    if conv.layout == "NCHW" and conv.width * conv.itemsize % CHUNK:
        return f"an input row must be a multiple of {CHUNK} bytes, as TMA boxes need, not {conv.width * conv.itemsize}"
    cols = min(SMALLEST, conv.output_size[1]) if conv.layout == "NHWC" else CHUNK // conv.itemsize
    block = boxes.blocks_of(conv)[0]
    needed = HaloTile(conv, PersistentTile(boxes.PRODUCTS[conv.dtype], block, 1, cols, 1, 2, 1)).shared_bytes
    if needed > H200.block_shared:
        return f"filters of {block} channels and the least halo tiles take {needed} bytes of shared memory, more than {H200.block_shared}"
    if conv.layout == "NCHW" and conv.output_size[1] < cols:
        return f"channels first, tiles of outputs are at least {cols} outputs wide, more than {conv.output_size[1]}"
    return None


def violations(conv: Conv2d, tile: PersistentTile, gpu: Gpu) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    reason = unsupported_reason(conv)
    if reason is not None:
        return [reason]
    return list(_fields(conv, tile, gpu)) or list(_fits(HaloTile(conv, tile), gpu))


def _fields(conv: Conv2d, tile: PersistentTile, gpu: Gpu) -> Iterator[str]:
    height, width = conv.output_size
    yield from boxes.product_rules(conv, tile, gpu)
    if tile.block_m < M or tile.block_m % M:
        yield f"`block_m` (={tile.block_m}) must be a multiple of {M}"
    if tile.block_m >= conv.out_channels + M:
        yield f"`block_m` (={tile.block_m}) must hold less than {M} channels beyond {conv.out_channels}"
    if not 1 <= tile.rows <= height:
        yield f"`rows` (={tile.rows}) must be 1 to the output's {height}"
    if not 1 <= tile.cols <= width:
        yield f"`cols` (={tile.cols}) must be 1 to the output's {width}"
    if tile.stages < 2:
        yield f"`stages` (={tile.stages}) must be at least 2"
    if tile.groups < 1:
        yield f"`groups` (={tile.groups}) must be at least 1"


def _fits(field: HaloTile, gpu: Gpu) -> Iterator[str]:
    tile, conv, sums, needed = field.tile, field.conv, field.sum_registers, field.shared_bytes
    products, held = math.prod(conv.kernel) * tile.units // 2 * (tile.block_m // M), sums + OPERANDS
    box = max((field.pitch - 1) * conv.stride[1] + 1, (field.lines - 1) * conv.stride[0] + 1) if field.boxed else max(field.raw)
    yield from boxes.above(
        ("block's {} threads", tile.threads, MAX_THREADS),
        ("product's {} columns", field.columns, boxes.MAX_COLUMNS),
        ("{} sums of a thread", sums, MAX_SUMS),
        ("{} products a step", products, MAX_PRODUCTS),
        ("{} elements along an axis of a halo tile's box", box, MAX_BOX),
        ("block's {} bytes of shared memory, all filters among them,", needed, gpu.block_shared),
    )
    if held * tile.threads > gpu.registers:
        yield f"the block's {tile.threads} threads of {held} registers must have at most {gpu.registers}"
    if not field.boxed and tile.cols * conv.stride[1] % tile.unit:
        yield f"`cols` (={tile.cols}) times the stride must be a multiple of {tile.unit}: boxes begin at whole {CHUNK} bytes"
    if not field.boxed and tile.stages != 2:
        yield f"`stages` (={tile.stages}) must be 2, channels first"
