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
SECTOR, LINE = 32, 128  # bytes of memory that are read at once; of a line of level-1 cache, which looks one up a cycle
L2_BYTES = 50 << 20  # of level-2 cache
CONFLICT_ISSUES = 2.0  # more of an element that is stored along terms, for every eight terms of a step after the first


def resident(conv: Conv2d, tile: ScheduledTile, gpu: Gpu) -> int:
    """Thread blocks that a multiprocessor runs at a time."""
    by_registers = gpu.registers // (min(registers(tile), 255) * tile.threads)
    by_shared = gpu.shared // (shared_bytes(conv, tile) + 1024)
    return max(min(by_registers, by_shared, gpu.threads // tile.threads, BLOCKS), 1)


def estimate(conv: Conv2d, tile: ScheduledTile, gpu: Gpu, stored: int, apart: int = 1) -> Estimate:
    """The cost model's estimate for a legal tile.

    Args:
        stored: bytes of the tensor of windows in global memory; 0 where there is none.
        apart: elements between the same element of neighbouring windows in that tensor.
    """
    outputs, steps = conv.batch * math.prod(conv.output_size), -(-depth(conv) // tile.block_k)
    blocks = -(-outputs // tile.block_n) * (conv.out_channels // tile.block_m)
    running = min(resident(conv, tile, gpu), -(-blocks // gpu.multiprocessors))
    busy = running * tile.threads / LANES / SCHEDULERS
    issues = tile.block_k * (tile.accumulators * FMA_ISSUES + (tile.thread_m / 4 + tile.thread_n / tile.strip) * OPERAND_ISSUES)
    issues += _copy_issues(conv, tile)
    apart = apart if stored else 1
    looked_up = tile.block_k * tile.block_n / tile.threads * _lines(conv, tile, apart) * SCHEDULERS * busy
    cycles = steps * (max(issues * busy * max(FEW_WARPS / busy, 1.0) ** 0.5, looked_up) + STEP_CYCLES)
    cycles += _stores(conv, tile) * STORE_CYCLES * busy
    waves = blocks / (gpu.multiprocessors * running)
    given = math.prod(conv.input_shape) * conv.itemsize
    elements = blocks * steps * tile.block_k * tile.block_n
    windows, read = _windows_bytes(conv, tile, gpu, running, apart)
    return Estimate(
        compute=(waves if waves >= 6 else math.ceil(waves)) * cycles / gpu.clock_hz,
        cache=blocks * steps * tile.block_k * (tile.block_m * conv.itemsize + tile.block_n * windows) / gpu.l2_bytes_s,
        memory=(max(stored or given, elements * read) + conv.output_bytes * (1 + conv.residual)) / gpu.dram_bytes_s,
        transform=((given + 2 * stored) / gpu.dram_bytes_s + LAUNCH_S) if stored else 0.0,
        occupancy=running * tile.threads // LANES,
        shared_bytes=shared_bytes(conv, tile),
    )


def _lines(conv: Conv2d, tile: ScheduledTile, apart: int) -> int:
    """Lines of level-1 cache in which a warp finds the windows' elements of one load: those of neighbouring windows, or of a few."""
    if tile.order == "cvu":
        return max(LANES // tile.block_k, 1)
    return min(max(LANES * apart * conv.itemsize // LINE, 1), LANES)


def _windows_bytes(conv: Conv2d, tile: ScheduledTile, gpu: Gpu, running: int, apart: int) -> tuple[int, int]:
    """Bytes for an element of windows: those that pass through level-2 cache, and those read from device memory each time.

    With channels innermost, elements that share a sector are used a whole pass over channels apart. They are read again and again where
    the sectors of that pass exceed the level-1 caches, and the level-2 cache. Otherwise the tensor is read from memory once, which counts
    as 0 here.
    """
    sector = min(SECTOR, apart * conv.itemsize)
    if tile.order != "uvc" or sector == conv.itemsize:
        return conv.itemsize, 0
    passed = conv.in_channels // conv.groups * tile.block_n * sector * running
    first = gpu.shared - running * shared_bytes(conv, tile)
    return sector if passed > first else conv.itemsize, sector if passed * gpu.multiprocessors > L2_BYTES else 0


def _copy_issues(conv: Conv2d, tile: ScheduledTile) -> float:
    """Instructions with which a thread copies its windows of a step; those of filters are hidden."""
    elements = tile.block_k * tile.block_n / tile.threads
    if tile.order == "cvu":  # a term of every window
        return elements * (COPY_ISSUES + CONFLICT_ISSUES * (tile.block_k / 8 - 1)) + DECODE_ISSUES
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
