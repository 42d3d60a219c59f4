"""Cost model of TVM schedules of dense layers on tensor cores.

It is that of `multistage`, with its measured times of instructions, copies and launches. Instructions of copies are counted in the source
that TVM generates: it computes the places of a step's elements anew in every step. They are estimates that no measurement has corrected.
"""

from __future__ import annotations

import math

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.legality.scheduled import MAX_STAGES, depth
from im2win.schedules.cuda.legality.scheduled_mma import LINES, filter_elements, registers, shared_bytes, window_elements
from im2win.schedules.cuda.model import floor as floors
from im2win.schedules.cuda.model.multistage import (
    BLOCK_LATENCY,
    CACHE_SHARE,
    COPY_LATENCY,
    FETCH_LATENCY,
    LAST_LATENCY,
    LAUNCH_S,
    PRODUCT_CYCLES,
    SCHEDULERS,
    STEP_LATENCY,
    Estimate,
)
from im2win.schedules.cuda.primitives import WORD
from im2win.schedules.cuda.tiles.scheduled_mma import ScheduledMmaTile
from im2win.spec.conv2d import Conv2d

LANES = 32
LOAD_ISSUES = 4  # of an `ldmatrix` and its address
FILTER_ISSUES = 6  # of a copy of filters, whose places follow one another
WINDOW_ISSUES = 36  # of a copy of windows: the place of its window and of its tap
PADDED_ISSUES = 12  # more with conditions on the place in the image
STEP_ISSUES = 40  # of a step, beside these
STORE_ISSUES = 14  # of a store of two outputs with what is computed of them
BLOCKS = 32  # most of a multiprocessor
STEP_BYTES = 32  # of the sum that an instruction takes


def resident(conv: Conv2d, tile: ScheduledMmaTile, gpu: Gpu) -> int:
    """Thread blocks that a multiprocessor runs at a time."""
    by_registers = gpu.registers // (registers(tile) * tile.threads)
    by_shared = gpu.shared // (shared_bytes(conv, tile) + 1024)
    return max(min(by_registers, by_shared, gpu.threads // tile.threads, BLOCKS), 1)


def estimate(conv: Conv2d, tile: ScheduledMmaTile, gpu: Gpu, stored: int) -> Estimate:
    """The cost model's estimate for a legal tile.

    Args:
        stored: bytes of the tensor of windows in global memory; 0 where there is none.
    """
    outputs, steps = conv.batch * math.prod(conv.output_size), -(-depth(conv) // tile.block_k)
    blocks, warps = -(-outputs // tile.block_n) * (conv.out_channels // tile.block_m), tile.threads // LANES
    at_once = resident(conv, tile, gpu)
    together = min(at_once, -(-blocks // gpu.multiprocessors))
    instructions = tile.block_k * conv.itemsize // STEP_BYTES
    busy = tile.warp_m // LINES * (tile.warp_n // 8) * instructions * PRODUCT_CYCLES[tile.product]
    wide = window_elements(conv, tile, stored > 0)
    cycles = busy + (tile.warp_m + tile.warp_n) // LINES * instructions * LOAD_ISSUES + _copies(conv, tile, wide) + STEP_ISSUES
    per_scheduler = together * warps / SCHEDULERS
    step = max(per_scheduler * cycles, cycles + STEP_LATENCY, COPY_LATENCY / max(tile.stages - 1, 0.5))
    if wide * conv.itemsize < WORD or "copies" not in tile.rule_names:
        step = max(step, cycles + STEP_LATENCY + FETCH_LATENCY)
    stores = tile.accumulators / 2 * STORE_ISSUES
    block = steps * step + max(per_scheduler, 1.0) * stores + BLOCK_LATENCY / together
    waves = blocks / (gpu.multiprocessors * at_once)
    rounds = math.ceil(waves) if waves < 4 else waves + 0.5
    given = math.prod(conv.input_shape) * conv.itemsize
    copied = blocks * steps * tile.block_k * (tile.block_m + tile.block_n) * conv.itemsize
    return Estimate(
        compute=(rounds * block + LAST_LATENCY * (1 - 1 / together)) / gpu.clock_hz,
        cache=(CACHE_SHARE * copied + CACHE_SHARE * 2 * conv.output_bytes) / gpu.l2_bytes_s,
        memory=((stored or given) + conv.output_bytes * (1 + conv.residual)) / gpu.dram_bytes_s,
        transform=((given + 2 * stored) / gpu.dram_bytes_s + LAUNCH_S) if stored else 0.0,
        occupancy=at_once * warps,
        shared_bytes=shared_bytes(conv, tile),
    )


def _copies(conv: Conv2d, tile: ScheduledMmaTile, wide: int) -> float:
    """Instructions with which a thread copies its share of a step."""
    windows = tile.block_n * tile.block_k / wide / tile.threads * (WINDOW_ISSUES + PADDED_ISSUES * any(conv.padding))
    return windows + tile.block_m * tile.block_k / filter_elements(conv, tile) / tile.threads * FILTER_ISSUES


def floor(conv: Conv2d, gpu: Gpu, product: str, stored: int, most: int) -> float:
    """Seconds that no tile is estimated below: products, latencies of copies, and the tensors once.

    Args:
        most: most elements of the sum that a step has.
    """
    given = math.prod(conv.input_shape) * conv.itemsize
    latency = -(-depth(conv) // most) * COPY_LATENCY / (MAX_STAGES - 1)
    one = Estimate(
        compute=max(floors.product_cycles(conv, gpu, product), latency) / gpu.clock_hz,
        cache=0.0,
        memory=((stored or given) + conv.output_bytes) / gpu.dram_bytes_s,
        transform=((given + 2 * stored) / gpu.dram_bytes_s + LAUNCH_S) if stored else 0.0,
        occupancy=0,
        shared_bytes=0,
    )
    return floors.seconds([one])
