"""Cost model of persistent kernels; the tuner begins with the tiles that it ranks first.

The cycles of the beginning and of rearranging, and `NARROW`, are fitted to times on an NVIDIA H200, as is what is imported from
`schedules.cuda.model.multistage`. The other constants, and how the parts are combined, are estimated.
"""

from __future__ import annotations

import math

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.model.multistage import EXPOSED, GROUP_CYCLES, SECTOR, Estimate
from im2win.schedules.cuda.tile_scheduler.persistent import resident_grid
from im2win.schedules.cuda.tiles.persistent import LANES, HaloTile, M, PersistentTile
from im2win.spec.conv2d import Conv2d

SMALL_COLUMNS = 12  # cost of reading the filters of a product, in columns
BEGIN_CYCLES = 5200  # cycles until the first step is in shared memory
STORE_CYCLES = 14  # cycles of a warp's scheduler for storing an output of each thread
COPY_LATENCY = 1050  # cycles from the issue of a copy to its completion
NARROW = 2.35  # times of writing the output that runs of a sector cost; those of two sectors cost a quarter
FIRST = 1.2  # factor on the time of blocks that rearrange elements channels first
TAKE_CYCLES = 163  # cycles to rearrange 16 bytes in each of 32 threads


def estimate(conv: Conv2d, tile: PersistentTile, gpu: Gpu) -> Estimate:
    """The estimate for a legal tile."""
    field, pack = HaloTile(conv, tile), tile.pack(conv)
    blocks = resident_grid(conv, tile, gpu)
    resident = -(-blocks // gpu.multiprocessors)  # blocks of a multiprocessor
    rounds = -(-field.output_tiles // (blocks // pack.blocks(conv) * tile.groups))
    products = pack.steps(conv) * math.prod(conv.kernel) * tile.units // 2 * (tile.block_m // M)
    multiplied = products * (field.columns + SMALL_COLUMNS) * GROUP_CYCLES
    copies = 0.0 if field.boxed else pack.steps(conv) * field.pixels * tile.units / LANES * TAKE_CYCLES
    together = 2 if conv.layout == "NHWC" or (conv.out_itemsize <= 2 and conv.output_size[1] % 8 == 0) else 1  # see `epilogue`
    stores = field.sum_registers / together * STORE_CYCLES
    sharing = resident * tile.groups
    alone = multiplied + stores + (0 if sharing > 1 else copies)
    loaded = (pack.steps(conv) - 1) / (tile.stages - 1) * COPY_LATENCY  # where copies run too few steps ahead
    cycles = BEGIN_CYCLES + rounds * max(sharing * max(multiplied, copies + stores), alone, loaded) + stores
    narrow = 0.0
    if conv.layout == "NCHW":
        cycles *= FIRST
        run = (1 if tile.cols < conv.output_size[1] else tile.rows) * tile.cols * conv.itemsize  # neighbouring bytes of a channel
        narrow = NARROW * (SECTOR / run) ** 2 * conv.output_bytes / gpu.dram_bytes_s
    filters = blocks * field.filters * conv.itemsize
    windows = pack.blocks(conv) * field.output_tiles * field.pixels * pack.channels(conv) * conv.itemsize
    memory = (math.prod(conv.input_shape) * conv.itemsize + conv.output_bytes) / gpu.dram_bytes_s
    return Estimate(
        compute=cycles / gpu.clock_hz + narrow + EXPOSED * memory,
        cache=(filters + windows + conv.output_bytes) / gpu.l2_bytes_s,
        memory=memory,
        transform=0.0,
        occupancy=resident * tile.threads // 32,
        shared_bytes=field.shared_bytes,
    )
