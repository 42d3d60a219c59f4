"""Cost model of TVM schedules of dense layers on GPUs: issue slots of products, operands and copies, and waves of thread blocks."""

from __future__ import annotations

import math

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.legality.scheduled import depth, registers, shared_bytes
from im2win.schedules.cuda.model.multistage import LAUNCH_S, SCHEDULERS, Estimate
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d

LANES = 32
FMA_ISSUES = 0.87  # of a product; with the others below, which overlap in part
OPERAND_ISSUES = 2.9  # of a read of shared memory: 16 bytes of filters, a strip of windows
COPY_ISSUES = 7.2  # of an element of windows
PADDED_ISSUES = 7.1  # more of an element with a condition on its place in the image
DECODE_ISSUES = 11.4  # of a step of the sum whose channel and tap a thread computes
STORE_CYCLES = 40.0  # of a warp's scheduler for a store of outputs
FEW_WARPS = 2.8  # of a scheduler's, with which it always finds one that can go on; with fewer the time grows
STEP_CYCLES = 128.0  # of a step with nothing to hide its barrier
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
    busy = running * tile.threads / LANES / SCHEDULERS
    issues = tile.block_k * (tile.accumulators * FMA_ISSUES + (tile.thread_m / 4 + tile.thread_n / tile.strip) * OPERAND_ISSUES)
    issues += _copy_issues(conv, tile)
    cycles = steps * (issues * busy * max(FEW_WARPS / busy, 1.0) ** 0.5 + STEP_CYCLES) + _stores(conv, tile) * STORE_CYCLES * busy
    waves = blocks / (gpu.multiprocessors * running)
    given = math.prod(conv.input_shape) * conv.itemsize
    return Estimate(
        compute=(waves if waves >= 6 else math.ceil(waves)) * cycles / gpu.clock_hz,
        cache=blocks * steps * tile.block_k * (tile.block_m + tile.block_n) * conv.itemsize / gpu.l2_bytes_s,
        memory=((stored or given) + conv.output_bytes * (1 + conv.residual)) / gpu.dram_bytes_s,
        transform=((given + 2 * stored) / gpu.dram_bytes_s + LAUNCH_S) if stored else 0.0,
        occupancy=running * tile.threads // LANES,
        shared_bytes=shared_bytes(conv, tile),
    )


def _copy_issues(conv: Conv2d, tile: ScheduledTile) -> float:
    """Instructions with which a thread copies its windows of a step; those of filters are hidden."""
    elements = tile.block_k * tile.block_n / tile.threads
    if tile.order == "uvc" and conv.in_channels // conv.groups >= tile.block_k:
        decoded = 1.0  # the channels of one tap
    elif tile.lanes:
        decoded = tile.block_k * LANES / tile.threads
    else:
        decoded = tile.block_k / max(tile.threads / tile.block_n, 1)
    return elements * (COPY_ISSUES + PADDED_ISSUES * any(conv.padding)) + decoded * DECODE_ISSUES


def _stores(conv: Conv2d, tile: ScheduledTile) -> float:
    """Stores of outputs of a thread, those that write parts of sectors counted more than once."""
    if conv.layout == "NHWC" or math.prod(conv.output_size) % tile.strip == 0:
        return tile.accumulators / tile.strip
    return float(tile.accumulators * math.sqrt(tile.strip))


def floor(conv: Conv2d, gpu: Gpu, stored: int) -> float:
    """Seconds that no tile is estimated below: products on all schedulers, and the tensors once."""
    products = conv.batch * math.prod(conv.output_size) * conv.out_channels * depth(conv)
    issues = products * FMA_ISSUES / LANES / SCHEDULERS / gpu.multiprocessors / gpu.clock_hz
    given = math.prod(conv.input_shape) * conv.itemsize
    memory = ((stored or given) + conv.output_bytes) / gpu.dram_bytes_s
    return max(issues, memory) + ((given + 2 * stored) / gpu.dram_bytes_s if stored else 0.0) + LAUNCH_S
