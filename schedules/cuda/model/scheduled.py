"""Cost model of TVM schedules of dense layers on GPUs: issue slots of products, operands and copies, and waves of thread blocks."""

from __future__ import annotations

import math

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.legality.scheduled import depth, registers, shared_bytes
from im2win.schedules.cuda.model.multistage import LAUNCH_S, SCHEDULERS, Estimate
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d

LANES = 32
FMA_ISSUES = 1.1  # of a product
OPERAND_ISSUES = 2.0  # of 16 bytes that a thread reads from shared memory
COPY_ISSUES = 16.0  # of an element of windows, with its address and condition
VECTOR_ISSUES = 8.0  # of a vector of filters
FEW_WARPS = 8.0  # of a scheduler's, with which it always finds one that can go on: with fewer, the time grows
STEP_CYCLES = 60.0  # of a step with nothing to hide its barrier
BEGIN_CYCLES = 2500.0  # of a thread block's first copies and last stores
BLOCKS = 32  # most of a multiprocessor


def resident(conv: Conv2d, tile: ScheduledTile, gpu: Gpu) -> int:
    """Thread blocks that a multiprocessor runs at a time."""
    by_registers = gpu.registers // (min(registers(tile), 255) * tile.threads)
    by_shared = gpu.shared // (shared_bytes(conv, tile) + 1024)
    return max(min(by_registers, by_shared, gpu.threads // tile.threads, BLOCKS), 1)


def estimate(conv: Conv2d, tile: ScheduledTile, gpu: Gpu, stored: int) -> Estimate:
    """The cost model's estimate for a legal tile.

    Args:
        stored: bytes of the tensor of windows in global memory; 0 where there is none.
    """
    outputs, steps = conv.batch * math.prod(conv.output_size), -(-depth(conv) // tile.block_k)
    blocks = -(-outputs // tile.block_n) * (conv.out_channels // tile.block_m)
    running = min(resident(conv, tile, gpu), -(-blocks // gpu.multiprocessors))
    warps = tile.threads // LANES
    operands = tile.block_k * (tile.thread_m + tile.thread_n) / 4
    copies = tile.block_k * tile.block_n / tile.threads * COPY_ISSUES
    copies += tile.block_k * tile.block_m / 4 / tile.threads * VECTOR_ISSUES
    issues = tile.block_k * tile.accumulators * FMA_ISSUES + operands * OPERAND_ISSUES + copies
    busy = running * warps / SCHEDULERS
    idle = max(FEW_WARPS / busy, 1.0) ** 0.5
    cycles = steps * (issues * busy * idle + STEP_CYCLES) + BEGIN_CYCLES
    waves = blocks / (gpu.multiprocessors * running)
    given = math.prod(conv.input_shape) * conv.itemsize
    return Estimate(
        compute=(waves if waves >= 6 else math.ceil(waves)) * cycles / gpu.clock_hz,
        cache=blocks * steps * tile.block_k * (tile.block_m + tile.block_n) * conv.itemsize / gpu.l2_bytes_s,
        memory=((stored or given) + conv.output_bytes * (1 + conv.residual)) / gpu.dram_bytes_s,
        transform=((given + 2 * stored) / gpu.dram_bytes_s + LAUNCH_S) if stored else 0.0,
        occupancy=running * warps,
        shared_bytes=shared_bytes(conv, tile),
    )


def floor(conv: Conv2d, gpu: Gpu, stored: int) -> float:
    """Seconds that no tile is estimated below: products on all schedulers, and the tensors once."""
    products = conv.batch * math.prod(conv.output_size) * conv.out_channels * depth(conv)
    issues = products * FMA_ISSUES / LANES / SCHEDULERS / gpu.multiprocessors / gpu.clock_hz
    given = math.prod(conv.input_shape) * conv.itemsize
    memory = ((stored or given) + conv.output_bytes) / gpu.dram_bytes_s
    return max(issues, memory) + ((given + 2 * stored) / gpu.dram_bytes_s if stored else 0.0) + LAUNCH_S
