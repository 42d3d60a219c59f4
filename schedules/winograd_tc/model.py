"""How long a tile will take, from the machine's numbers: where the tuner begins.

Constants named as in `schedules.cuda.model` are measured; those below, and how the parts add up, are reasoned.
"""

from __future__ import annotations

import math

import numpy as np

from im2win.cuda_packing import OUTPUT_DTYPES
from im2win.gpu import Gpu
from im2win.problem import Conv2d
from im2win.schedules.cuda.model import LAUNCH_S, PRODUCT_CYCLES, SCHEDULERS, Estimate
from im2win.schedules.winograd_tc.legality import LAST_LEVEL_BYTES, OTHER_REGISTERS
from im2win.schedules.winograd_tc.tile import SLAB, Sizes, TensorCoreTile

PRODUCT = 16 * 8 * 16  # products of one number with another that `PRODUCT_CYCLES` are for
LOAD_CYCLES = 24.0  # of a scheduler, for a fragment from shared memory
COPY_CYCLES = 12.0  # for 16 bytes of 32 threads from level-2 cache to shared memory
WAIT_CYCLES = 90.0  # of a barrier of the block, and 0.2 of that of one of a warp
TRANSFORM_CYCLES = 6.0  # for an element of a tile, in 32 threads, and its share of the transform


def _step_cycles(tile: TensorCoreTile) -> float:
    """Cycles that a warp holds its scheduler for a step of the sum."""
    (across, along), (m, n, k) = (tile.fragments if tile.mapping == "sync_free" else (1, 1)), tile.shape
    depth = tile.block_k // k
    products = depth * across * along * (m * n * k / PRODUCT) * PRODUCT_CYCLES
    loads = depth * (across + along) * LOAD_CYCLES
    warps = 1 if tile.mapping == "sync_free" else tile.warps
    elements = tile.block_k * (tile.block_n + (tile.block_m if tile.staged else 0))
    copies = elements * tile.itemsize / 16 / 32 / warps * COPY_CYCLES
    wait = WAIT_CYCLES * (0.2 if tile.mapping == "sync_free" else 1.0)
    return max(products, 0.3 * products + loads + copies) + wait


def _at_once(sizes: Sizes, gpu: Gpu) -> int:
    """Blocks of the products that a multiprocessor runs at once."""
    tile = sizes.tile
    registers = 40 + (tile.block_m * tile.block_n // 32 if tile.mapping == "sync_free" else 24)
    shared = sizes.staged_bytes + (sizes.held_bytes if tile.fusion == "shmem" else 0)
    return max(1, min(gpu.registers // (min(registers, 255) * tile.threads), gpu.shared // (shared + 1024), gpu.threads // tile.threads))


def _whole(conv: Conv2d, sizes: Sizes, gpu: Gpu) -> Estimate:
    """Of one kernel that does everything: a block transforms its tiles, and its warps multiply what all of them have made."""
    tile, (tiles, filters, _) = sizes.tile, sizes.tile.shape
    registers = min(tile.sums + OTHER_REGISTERS, 255)
    at_once = min(gpu.registers // (registers * tile.threads), gpu.shared // (sizes.held_bytes + 1024), gpu.threads // tile.threads)
    at_once = max(at_once, 1)
    products = tile.positions * sizes.depth * tiles * filters / PRODUCT * PRODUCT_CYCLES / 2  # int8 is twice as fast as float16
    loads = tile.positions * sizes.depth / SLAB * (2 + filters / 8) * LOAD_CYCLES / 2
    made = sizes.block_transformed / tile.threads * TRANSFORM_CYCLES
    alone = products + loads + made + WAIT_CYCLES + tile.positions * tile.sums / 8
    busy = at_once * tile.warps / SCHEDULERS
    waves = sizes.blocks * sizes.filter_blocks / (gpu.multiprocessors * at_once)
    rounds = math.ceil(waves) if waves < 4 else waves + 0.5
    given, output = _tensor_bytes(conv)
    filter_bytes = math.prod(tile.pack(conv).shape(conv))
    return Estimate(
        compute=rounds * max(busy * (max(products, loads) + made), alone) / gpu.clock_hz,
        cache=(2 * given * sizes.filter_blocks + filter_bytes * sizes.blocks) / gpu.l2_bytes_s,
        memory=(given + output) / gpu.dram_bytes_s,
        transform=0.0,
        occupancy=at_once * tile.warps,
        shared_bytes=sizes.held_bytes,
    )


def _tensor_bytes(conv: Conv2d) -> tuple[int, int]:
    """Of the input and of the output."""
    itemsize = np.dtype(OUTPUT_DTYPES[conv.dtype]).itemsize
    return math.prod(conv.input_shape) * conv.itemsize, math.prod(conv.output_shape) * itemsize


def estimate(conv: Conv2d, tile: TensorCoreTile, gpu: Gpu) -> Estimate:
    """The model's estimate of a legal tile."""
    sizes = Sizes(conv, tile)
    if tile.mapping == "whole":
        return _whole(conv, sizes, gpu)
    at_once = _at_once(sizes, gpu)
    rows = tile.positions // tile.warps if tile.mapping == "sync_free" else 1
    steps = rows * (sizes.depth // tile.block_k)
    blocks = sizes.blocks * sizes.filter_blocks * (1 if tile.mapping == "sync_free" else tile.positions)
    busy = at_once * tile.warps / SCHEDULERS
    block = steps * max(busy * _step_cycles(tile), _step_cycles(tile) + WAIT_CYCLES)
    transformed, multiplied = tile.itemsize * sizes.transformed, 4 * sizes.multiplied
    made = sizes.transformed * TRANSFORM_CYCLES / 32 / SCHEDULERS / gpu.multiprocessors
    if tile.fusion == "shmem":
        made *= sizes.filter_blocks
    waves = blocks / (gpu.multiprocessors * at_once)
    rounds = math.ceil(waves) if waves < 4 else waves + 0.5
    given, output = _tensor_bytes(conv)
    between = 2 * multiplied + (0 if tile.fusion == "shmem" else (1 + sizes.filter_blocks) * transformed)
    stored = multiplied + (transformed if tile.fusion == "none" else 0)
    filters = tile.itemsize * sizes.blocks * tile.positions * sizes.depth * sizes.filter_blocks * tile.block_n
    spilled = max(2 * stored - LAST_LEVEL_BYTES, 0)
    return Estimate(
        compute=(rounds * block + made) / gpu.clock_hz,
        cache=(between + filters) / gpu.l2_bytes_s,
        memory=(given + output + spilled) / gpu.dram_bytes_s,
        transform=LAUNCH_S * (1 if tile.fusion == "shmem" else 2),
        occupancy=at_once * tile.warps,
        shared_bytes=sizes.staged_bytes + (sizes.held_bytes if tile.fusion == "shmem" else 0),
    )
