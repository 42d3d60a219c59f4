"""How long a tile of filters and windows in steps will take, from the machine's numbers: where the tuner begins.

Constants are those of `schedules.cuda.model` and `schedules.persistent.model`, or reasoned; nothing here was fitted to this kernel.
"""

from __future__ import annotations

import math

from im2win.gpu import Gpu
from im2win.problem import Conv2d
from im2win.schedules.cuda.model import GROUP_CYCLES, Estimate
from im2win.schedules.persistent.model import BEGIN_CYCLES, SMALL_COLUMNS, STORE_CYCLES
from im2win.schedules.streamed.kernel import grid
from im2win.schedules.streamed.tile import StreamedField, StreamedTile, flat

UNMEASURED = 1.15  # what estimates of other kernels were short by before they were fitted


def estimate(conv: Conv2d, tile: StreamedTile, gpu: Gpu) -> Estimate:
    """The model's estimate of a legal tile."""
    one, pack = flat(conv), tile.pack(conv)
    field, blocks = StreamedField(one, tile), grid(conv, tile, gpu)
    work, taps, steps = field.patches * pack.blocks(conv), math.prod(conv.kernel), pack.steps(conv)
    resident = -(-blocks // gpu.multiprocessors)  # blocks of a multiprocessor
    count = -(-work // blocks)
    products = steps * taps * tile.units // 2 * (tile.block_m // 64)
    multiplied = products * (field.columns + SMALL_COLUMNS) * GROUP_CYCLES
    stores = field.sum_registers / 2 * STORE_CYCLES * tile.groups
    alone = multiplied + stores if tile.turns == 1 else max(multiplied, (multiplied + stores) / tile.turns)
    cycles = BEGIN_CYCLES + count * max(resident * multiplied, alone) + stores
    size = conv.itemsize * steps * tile.units * tile.unit
    filters = work * tile.block_m * taps * size
    windows = work // tile.cluster * field.pixels * size
    return Estimate(
        compute=UNMEASURED * cycles / gpu.clock_hz,
        cache=UNMEASURED * (filters + windows + conv.output_bytes) / gpu.l2_bytes_s,
        memory=(math.prod(conv.input_shape) * conv.itemsize + conv.output_bytes) / gpu.dram_bytes_s,
        transform=0.0,
        occupancy=resident * tile.threads // 32,
        shared_bytes=field.shared_bytes,
    )
