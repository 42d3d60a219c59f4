"""Cost model of Winograd on tensor cores; the tuner begins with the tiles that it ranks first.

Constants imported from `schedules.cuda.model.multistage` are measured. Those below are fitted to kernels of 64 channels on an NVIDIA H200,
or estimated.
"""

from __future__ import annotations

import math

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.model.multistage import LAUNCH_S, SCHEDULERS, Estimate
from im2win.schedules.studies.winograd_tc.legality import LAST_LEVEL_BYTES
from im2win.schedules.studies.winograd_tc.tile import THREADS, WARP, WORD, Sizes, TensorCoreTile
from im2win.spec.conv2d import Conv2d

PRODUCT = 16 * 8 * 16  # scalar products in an instruction
PRODUCT_CYCLES = 10.0  # cycles of a scheduler for an instruction
LOAD_CYCLES = 24.0  # of a scheduler, for a fragment from shared memory
COPY_CYCLES = 12.0  # for 16 bytes of 32 threads from level-2 cache to shared memory
WAIT_CYCLES = 90.0  # of a barrier of the block; one of a warp takes 0.2 of it
STEP_CYCLES, CHUNK_CYCLES = 550.0, 200.0  # from the issue of a step's copies to its products, and for every 16 bytes that a thread copies
TURN_CYCLES = 2300.0  # from the loads of an input tile to its transformed elements in shared memory
CACHE_SHARE = 0.73  # share of level-2 cache's bandwidth that these kernels reach
FILTER_SHARE = 0.5  # share of filters that level-1 cache misses; other blocks have just read the rest
SPILLING, PRODUCT_REGISTERS, REGISTERS = 2.0, 68, 65536  # costs of a block whose registers exceed the register file
WAITS = 1.2  # factor on a transform whose blocks others wait for
TRANSFORM_CYCLES = 6.0  # for an element of a tile, in 32 threads, and its share of the transform


def _step_cycles(tile: TensorCoreTile) -> float:
    """Cycles that a warp occupies its scheduler for a step of the sum."""
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
    """Thread blocks of the products that a multiprocessor runs at once."""
    tile = sizes.tile
    registers = 40 + (tile.block_m * tile.block_n // 32 if tile.mapping == "sync_free" else 24)
    shared = sizes.staged_bytes + (sizes.held_bytes if tile.fusion == "shmem" else 0)
    return max(1, min(gpu.registers // (min(registers, 255) * tile.threads), gpu.shared // (shared + 1024), gpu.threads // tile.threads))


def _tensor_bytes(conv: Conv2d) -> tuple[int, int]:
    """(bytes of the input, bytes of the output)."""
    return math.prod(conv.input_shape) * conv.itemsize, conv.output_bytes


def estimate(conv: Conv2d, tile: TensorCoreTile, gpu: Gpu) -> Estimate:
    """The estimate for a legal tile: of the products and what is fused with them; other kernels count as its `transform`."""
    sizes = Sizes(conv, tile)
    at_once, cached, given, (made, output) = _at_once(sizes, gpu), gpu.l2_bytes_s * CACHE_SHARE, _windows_bytes(sizes), _kept_bytes(sizes)
    blocks = sizes.blocks * sizes.filter_blocks * (1 if tile.mapping == "sync_free" else tile.positions)
    waves = blocks / (gpu.multiprocessors * at_once)
    rounds = math.ceil(waves) if waves < 4 else waves + 0.5
    block = _products_cycles(sizes, at_once) + (_turns(sizes, tile.threads) * TURN_CYCLES if tile.fusion == "shmem" else 0)
    filters = tile.itemsize * sizes.blocks * math.prod(tile.pack(conv).shape(conv))
    read = given * sizes.filter_blocks if tile.fusion == "shmem" else made * sizes.filter_blocks
    multiplied = 4 * sizes.multiplied
    spilled = max(multiplied + (0 if tile.fusion == "shmem" else made) - LAST_LEVEL_BYTES, 0)
    before = 0.0
    if tile.fusion != "shmem":
        slow = _turns(sizes, THREADS) * TURN_CYCLES * math.ceil(sizes.blocks / gpu.multiprocessors / 8) / gpu.clock_hz
        before = max((given + made) / cached, slow) + LAUNCH_S
    after = (multiplied + output) / gpu.dram_bytes_s + LAUNCH_S
    return Estimate(
        compute=rounds * block / gpu.clock_hz,
        cache=(read + FILTER_SHARE * filters + multiplied) / cached,
        memory=(given * tile.outputs**2 / tile.positions + spilled) / gpu.dram_bytes_s,
        transform=before * (WAITS if tile.fusion == "llc" else 1) + after,
        occupancy=at_once * tile.warps,
        shared_bytes=sizes.staged_bytes + (sizes.held_bytes if tile.fusion == "shmem" else 0),
    )


def _windows_bytes(sizes: Sizes) -> float:
    """Bytes of all input tiles, which overlap."""
    return sizes.tiles * sizes.tile.positions * sizes.conv.in_channels * sizes.conv.itemsize


def _kept_bytes(sizes: Sizes) -> tuple[int, int]:
    """(bytes of V, bytes of the output)."""
    return sizes.tile.itemsize * sizes.transformed, _tensor_bytes(sizes.conv)[1]


def _turns(sizes: Sizes, threads: int) -> int:
    """Rounds of a block's transform, one after the other."""
    width = WORD // sizes.conv.itemsize if sizes.conv.layout == "NHWC" and sizes.conv.in_channels % 4 == 0 else 1
    return math.ceil(sizes.tile.block_m * sizes.depth / width / threads)


def _products_cycles(sizes: Sizes, at_once: int) -> float:
    """Cycles of a block's products, which wait for the copies of every step."""
    tile = sizes.tile
    warps = 1 if tile.mapping == "sync_free" else tile.warps
    steps = (tile.positions // tile.warps if tile.mapping == "sync_free" else 1) * (sizes.depth // tile.block_k)
    copies = (sizes.staged_filters + (sizes.staged_tiles if tile.staged else 0)) * tile.itemsize / 16 / WARP / warps
    busy = at_once * tile.warps / SCHEDULERS
    cycles = steps * max(busy * _step_cycles(tile), STEP_CYCLES + CHUNK_CYCLES * copies)
    return cycles * (SPILLING if (tile.accumulators + PRODUCT_REGISTERS) * tile.threads > REGISTERS else 1)
