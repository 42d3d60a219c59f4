"""Registers that producer and consumer warps of a block exchange (`setmaxnreg`), and how many blocks then share a multiprocessor."""

from __future__ import annotations

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.tiles.persistent import KIB, LANES
from im2win.schedules.cuda.tiles.warp_specialized import StagedHaloTile, WarpSpecializedTile

OPERANDS = 48  # registers of a thread for addresses and outputs on their way
BESIDE = 26  # more registers than a product has sums must a thread begin with: else the assembler refuses it, whatever is exchanged later
LEFT = 24  # registers of those that copy
MOST = 240  # registers of those that multiply


def begins_with(tile: WarpSpecializedTile, gpu: Gpu, blocks: int) -> int:
    """Registers of any thread when its block begins, where so many share a multiprocessor: each of its four parts has as many warps."""
    return min(gpu.registers // (-(-blocks * tile.threads // LANES) * LANES) // 8 * 8, MOST)


def registers(tile: WarpSpecializedTile, gpu: Gpu, blocks: int) -> int:
    """Registers of a thread that multiplies. A block has no more to exchange than it begins with: whoever asks for more waits for ever."""
    first = begins_with(tile, gpu, blocks)
    if not tile.exchanges:
        return first
    return min((first * tile.threads - LEFT * LANES) // tile.multipliers // 8 * 8, MOST)


def needed(field: StagedHaloTile) -> tuple[int, int]:
    """Registers of a thread that multiplies: for all its sums, and, when its block begins, for one product."""
    return field.sum_registers + OPERANDS, field.columns // 2 + BESIDE


def enough(field: StagedHaloTile, gpu: Gpu, blocks: int) -> bool:
    """Whether so many blocks of a multiprocessor have the registers that threads need."""
    held, first = needed(field)
    return held <= registers(field.tile, gpu, blocks) and first <= begins_with(field.tile, gpu, blocks)


def resident(field: StagedHaloTile, gpu: Gpu) -> int:
    """Thread blocks that a multiprocessor has at once."""
    tile, blocks = field.tile, 1
    while (
        (blocks + 1) * (field.shared_bytes + KIB) <= gpu.shared
        and (blocks + 1) * tile.threads <= gpu.threads
        and enough(field, gpu, blocks + 1)
    ):
        blocks += 1
    return blocks
