"""Registers that producer warps give to consumer warps (`setmaxnreg`), and how many blocks then share a multiprocessor."""

from __future__ import annotations

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import KIB, LANES
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile

OPERANDS = 48  # registers of a thread for addresses and for outputs in the epilogue
ADDRESSES = 40  # those for addresses alone, where the epilogue begins by adding several accumulators to one
BESIDE = 26  # least registers of a thread at the start beside the accumulators of one `wgmma`: with fewer the assembler refuses it
LEFT = 24  # registers of a producer thread
LEFT_REARRANGING = 72  # the same where producer warps rearrange windows
MOST = 240  # most registers of a consumer thread


def begins_with(tile: WarpSpecializedTile, gpu: Gpu, blocks: int) -> int:
    """Registers of a thread when its block begins, where `blocks` share a multiprocessor.

    Each of the multiprocessor's four partitions holds equally many warps. Registers are allocated in multiples of 8.
    """
    return min(gpu.registers // (-(-blocks * tile.threads // LANES) * LANES) // 8 * 8, MOST)


def left(tile: WarpSpecializedTile, gpu: Gpu, blocks: int) -> int:
    """Registers of a producer thread after the exchange."""
    return min(LEFT_REARRANGING, begins_with(tile, gpu, blocks)) if tile.rearranged else LEFT


def registers(tile: WarpSpecializedTile, gpu: Gpu, blocks: int) -> int:
    """Registers of a consumer thread after the exchange.

    The block has no more registers than it begins with; a `setmaxnreg` that asks for more never returns.
    """
    first = begins_with(tile, gpu, blocks)
    if not tile.exchanges:
        return first
    return min((first * tile.threads - left(tile, gpu, blocks) * LANES) // tile.multipliers // 8 * 8, MOST)


def needed(field: StagedHaloTile) -> tuple[int, int]:
    """Registers that a consumer thread needs: (for all its accumulators, for the accumulators of one `wgmma` when its block begins).

    Where accumulators take only chains of products, sums that take them over need as many.
    """
    copies = 2 if MULTIPLIERS[field.tile.dtype].chain else 1
    return copies * field.sum_registers + (OPERANDS if field.sums == 1 else ADDRESSES), field.columns // 2 + BESIDE


def enough(field: StagedHaloTile, gpu: Gpu, blocks: int) -> bool:
    """Whether `blocks` of a multiprocessor have the registers that their threads need."""
    held, first = needed(field)
    return held <= registers(field.tile, gpu, blocks) and first <= begins_with(field.tile, gpu, blocks)


def resident(field: StagedHaloTile, gpu: Gpu) -> int:
    """Thread blocks that run on a multiprocessor at once."""
    tile, blocks = field.tile, 1
    while (
        (blocks + 1) * (field.shared_bytes + KIB) <= gpu.shared
        and (blocks + 1) * tile.threads <= gpu.threads
        and enough(field, gpu, blocks + 1)
    ):
        blocks += 1
    return blocks
