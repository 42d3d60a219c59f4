"""Legality of the tiles of TVM schedules of dense layers on tensor cores, stated once."""

from __future__ import annotations

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import NATIVE, SLAB
from im2win.schedules.cuda.legality.scheduled import MAX_REGISTERS, MAX_STAGES, NEED_STAGES, along_terms, depth, unknown_rules
from im2win.schedules.cuda.primitives import CHUNK, WORD
from im2win.schedules.cuda.tiles.scheduled_mma import ScheduledMmaTile
from im2win.spec.conv2d import Conv2d

ORDERS = ("uvc", "cuv")
LINES = 16  # rows, and columns, of a product
MAX_THREADS = 512
OTHERS = 60  # registers of a thread for addresses and elements on their way


def unsupported_reason(conv: Conv2d) -> str | None:
    """Why no tile computes a problem; None if one does."""
    if conv.dtype not in NATIVE:
        return f"TVM's schedules on tensor cores multiply {', '.join(NATIVE)}, not {conv.dtype}"
    channels = conv.out_channels // conv.groups
    if conv.depthwise or channels % LINES:
        return f"instructions have {LINES} channels of one group, which must divide the {channels} of a group"
    return None


def line_bytes(conv: Conv2d, tile: ScheduledMmaTile) -> int:
    """Bytes from a line of an operand in shared memory to the next one: an odd number of 16 bytes."""
    return tile.block_k * conv.itemsize + CHUNK


def shared_bytes(conv: Conv2d, tile: ScheduledMmaTile) -> int:
    """Bytes of shared memory of a thread block."""
    return tile.stages * (tile.block_m + tile.block_n) * line_bytes(conv, tile)


def registers(tile: ScheduledMmaTile) -> int:
    """Registers of a thread: sums, operands of the products along a step of the sum, and others."""
    return tile.accumulators + (tile.warp_m + tile.warp_n) // LINES * 4 + OTHERS


def _elements(conv: Conv2d, tile: ScheduledMmaTile, contiguous: int, lines: int) -> int:
    """Elements of a copy: as many as are contiguous and divide what threads share out; single ones below a word."""
    for size in (CHUNK, CHUNK // 2, WORD):
        width = size // conv.itemsize
        if contiguous % width == 0 and lines * tile.block_k % (tile.threads * width) == 0:
            return width
    return 1


def filter_elements(conv: Conv2d, tile: ScheduledMmaTile) -> int:
    """Elements that a thread copies of filters at a time. Where steps are padded, only those of whole vectors are contiguous."""
    return _elements(conv, tile, tile.block_k if depth(conv) % tile.block_k == 0 else depth(conv), tile.block_m)


def along_sum(conv: Conv2d, tile: ScheduledMmaTile, stored: bool) -> bool:
    """Whether neighbouring elements of a window, not of neighbouring windows, are neighbours in memory.

    Args:
        stored: whether windows come from a tensor of windows in global memory.
    """
    return not stored and along_terms(conv, tile.order)


def window_elements(conv: Conv2d, tile: ScheduledMmaTile, stored: bool) -> int:
    """Elements that a thread copies of windows at a time: neighbouring channels of a tap."""
    return _elements(conv, tile, conv.in_channels // conv.groups, tile.block_n) if along_sum(conv, tile, stored) else 1


def violations(conv: Conv2d, tile: ScheduledMmaTile, gpu: Gpu) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    if (reason := unsupported_reason(conv)) is not None:
        return [reason]
    counts = ("block_m", "block_n", "block_k", "warp_m", "warp_n", "stages")
    broken = [f"`{name}` (={getattr(tile, name)}) must be at least 1" for name in counts if getattr(tile, name) < 1]
    if tile.product != NATIVE[conv.dtype].kind:
        broken.append(f"`product` (={tile.product}) must be {NATIVE[conv.dtype].kind} for {conv.dtype}")
    if tile.order not in ORDERS:
        broken.append(f"`order` (={tile.order}) must be among {', '.join(map(repr, ORDERS))}")
    broken += unknown_rules(tile.rules)
    for name in ("warp_m", "warp_n"):
        if getattr(tile, name) % LINES:
            broken.append(f"`{name}` (={getattr(tile, name)}) must be a multiple of {LINES}")
    return broken or [text for holds, text in _rules(conv, tile, gpu) if not holds]


def _rules(conv: Conv2d, tile: ScheduledMmaTile, gpu: Gpu) -> list[tuple[bool, str]]:
    channels, most = conv.out_channels // conv.groups, gpu.block_shared
    steps, slab = -(-depth(conv) // tile.block_k), NATIVE[conv.dtype].slab
    return [
        (channels % tile.block_m == 0, f"`block_m` (={tile.block_m}) must divide the {channels} channels of a group"),
        (tile.block_m % tile.warp_m == 0, f"`warp_m` (={tile.warp_m}) must divide `block_m` (={tile.block_m})"),
        (tile.block_n % tile.warp_n == 0, f"`warp_n` (={tile.warp_n}) must divide `block_n` (={tile.block_n})"),
        (tile.block_k % slab == 0, f"`block_k` (={tile.block_k}) must be a multiple of {slab}, {SLAB} bytes of the sum"),
        (tile.threads <= MAX_THREADS, f"a thread block (={tile.threads}) must have at most {MAX_THREADS} threads"),
        (
            tile.block_m * tile.block_k % tile.threads == 0 and tile.block_n * tile.block_k % tile.threads == 0,
            f"a step's filters (={tile.block_m * tile.block_k}) and windows (={tile.block_n * tile.block_k}) must be shared out evenly "
            f"among {tile.threads} threads",
        ),
        (tile.stages <= MAX_STAGES, f"`stages` (={tile.stages}) must be at most {MAX_STAGES}"),
        (tile.stages == 1 or tile.stages <= steps, f"`stages` (={tile.stages}) must be at most the {steps} steps of the sum"),
        *((tile.stages > 1 or name not in tile.rule_names, f"`rules` (={name}) needs at least 2 `stages`") for name in NEED_STAGES),
        (shared_bytes(conv, tile) <= most, f"filters and windows in shared memory (={shared_bytes(conv, tile)} bytes) must fit {most}"),
        (
            registers(tile) <= min(MAX_REGISTERS, gpu.registers // tile.threads),
            f"sums and operands (={registers(tile)}) must fit a thread's registers",
        ),
    ]
