"""Cost model of warp-specialized kernels; the tuner begins with the tiles that it ranks first.

Constants are fitted to times on an NVIDIA H200, in float16, of tiles of layers in both layouts. `tuning_logs/` has times, in float16 and
int8, of 1405 tiles of 95 layers: how far estimates are off has a standard deviation of 9 % within a layer, and its mean one of 5 % between
layers. Constants that say so are fitted to fewer layers.
"""

from __future__ import annotations

import math

from im2win.device.gpu import Gpu
from im2win.packing.window_rows import row_elements
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.model.multistage import EXPOSED, GROUP_CYCLES, L2_SHARE, SECTOR, Estimate
from im2win.schedules.cuda.model.persistent import NARROW, STORE_CYCLES
from im2win.schedules.cuda.tile_scheduler.persistent import staged_grid
from im2win.schedules.cuda.tiles.copied_lines import CopiedLines, copy_elements
from im2win.schedules.cuda.tiles.copied_pixels import CopiedPixels, copies_all
from im2win.schedules.cuda.tiles.fields import copy_bytes, field_of
from im2win.schedules.cuda.tiles.pixel_lines import PixelLines
from im2win.schedules.cuda.tiles.rearranged import QUAD, TOGETHER, RearrangedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import REARRANGERS, WarpSpecializedTile
from im2win.schedules.cuda.tiles.window_rows import WindowRows
from im2win.spec.conv2d import Conv2d

BEGIN_CYCLES = 5200  # cycles of a block before its first copies are issued and behind its last store
SMALL_COLUMNS = 7  # cost of every product, in columns
COPY_LATENCY = 1440  # cycles from the issue of a copy to its completion, with all multiprocessors busy
COPY_CYCLES = 50  # cycles of a warpgroup for every copy of filters: the wait at its full barrier and the release
ARRIVING_BYTES = 84  # bytes of all copies that a multiprocessor receives in a cycle, with all of them busy
TURNS = 1.03  # factor of ping-pong consumers
PAIRED = 1.07  # factor of clusters of two that share windows or filters, except lines of pixels
FOUR = 1.7  # factor of clusters of four that share windows or filters, for tiles of several rows
FOUR_LONG = 1.17  # the same for other tiles
CROWDED = {2: 1.0, 4: 1.15, 8: 1.45}  # by size, factor of clusters that share accumulators and do not all find their places at once
FULL = 0.9  # share of the places that are taken, from which on clusters wait for one another's
FEW = 2  # copies of filters for a tile, so that its blocks wait for one another most of the time
SENT_LATENCY = 330  # cycles until accumulators of other blocks have arrived, and may be overwritten
SENT_BYTES = 8  # bytes of accumulators that a block receives in a cycle
SUM_BYTES = 4
PLANES = 1.1  # factor on the cycles for storing outputs channels first
CHAIN_CYCLES = 100  # cycles of a warpgroup from the last product of a chain until it adds accumulators to sums; estimated, not fitted
SHIFT_CYCLES = 4  # cycles of a warpgroup to add one accumulator of another phase, columns shifted
MOVE_CYCLES = 132  # cycles of a warp to rearrange as much as it takes at a time
HAND_CYCLES = 1140  # cycles that a step of rearranged windows takes from one pipeline to the other, beside those
REARRANGED = 1.16  # factor on the time of blocks that rearrange windows
COPYING = 2.06  # factor on the time of memory and level-2 cache of the kernel that copies pixels; fitted to three layers
BEGIN_COPY_S = 1e-6  # of kernels that copy to channels last or to rows of windows, beside the time of memory; fitted to ten layers
FROM_COPY = 1.09  # factor on the time of blocks whose halo tiles come from a copy in channels last; fitted beside `REARRANGED`
FROM_ROWS = 1.6  # the same from rows of windows, whose pixels are small boxes; fitted to three layers of three channels
FROM_SHORT_ROWS = 3.5  # and from rows of fewer bytes than `ROW_BYTES`; fitted to one layer with 3x3 kernels
ROW_BYTES = 64
CACHED = 0.34  # factor on the traffic of level-2 cache: blocks that run at the same time request the same filters


def estimate(conv: Conv2d, tile: WarpSpecializedTile, gpu: Gpu) -> Estimate:
    """The estimate for a legal tile."""
    field, blocks = field_of(conv, tile), staged_grid(conv, tile, gpu)
    work, taps = field.output_tiles * tile.pack(conv).blocks(conv) * tile.sum_blocks, math.prod(field.conv.kernel)
    steps = tile.steps(conv) // tile.sum_blocks  # steps of a block
    resident = -(-blocks // gpu.multiprocessors)  # blocks of a multiprocessor
    count = -(-work // blocks)
    products = steps * taps * tile.units // 2 * (tile.block_m // 64)
    copies = steps * taps // tile.taps
    multiplied = products * (field.columns + SMALL_COLUMNS) * GROUP_CYCLES + copies * COPY_CYCLES
    raw = field.raw_buffer if isinstance(field, RearrangedHaloTile) else None
    buffers = ((steps, raw or field.window_buffer), (copies, field.filter_buffer))  # one stage of each is still being read
    arriving = resident * conv.itemsize * sum(number * stage for number, (_, stage) in buffers) / ARRIVING_BYTES
    loaded = math.hypot(arriving, COPY_LATENCY * max(number / (stages - 1) for number, (stages, _) in buffers))
    outputs = field.sum_registers / field.sums
    stores = outputs / 2 * STORE_CYCLES * tile.groups / tile.sum_blocks * (PLANES if conv.layout == "NCHW" else 1)
    stores += (field.sum_registers - outputs) * SHIFT_CYCLES * tile.groups
    if tile.sum_blocks > 1:
        stores += SENT_LATENCY + math.prod(field.received) * SUM_BYTES / SENT_BYTES
    added = _chains(tile) * copies * (CHAIN_CYCLES + field.sum_registers)  # warpgroups that multiply together add while others multiply
    if tile.pingpong == 1:
        alone = max(multiplied, multiplied / tile.groups + added) + stores
    else:
        alone = max(multiplied + added, (multiplied + added + stores) / tile.pingpong)
    moved = 0.0
    if isinstance(field, RearrangedHaloTile):
        batches = field.steps_of_eights * (tile.units // QUAD) // (TOGETHER * tile.rearrangers)
        moved = steps * (batches * MOVE_CYCLES + HAND_CYCLES) * tile.rearrangers / REARRANGERS
    cycles = BEGIN_CYCLES + count * max(resident * multiplied, alone, loaded, moved) + stores
    apart = REARRANGED if tile.rearranged else FROM_COPY if isinstance(field, CopiedPixels) else 1.0
    if isinstance(field, WindowRows):
        apart = FROM_ROWS if row_elements(conv) * conv.itemsize >= ROW_BYTES else FROM_SHORT_ROWS
    if tile.pingpong > 1:
        apart *= TURNS
    if tile.cluster == 2 and tile.sum_blocks == 1 and not (isinstance(field, PixelLines) and tile.shared == "windows"):
        apart *= PAIRED
    if tile.cluster // tile.sum_blocks == 4:
        apart *= FOUR if tile.rows > 1 or copies <= FEW else FOUR_LONG
    if tile.sum_blocks > 1 and resident > 1 and blocks > FULL * resident * gpu.multiprocessors:
        apart *= CROWDED[tile.cluster]
    size = conv.itemsize * steps * tile.units * tile.unit
    filters = work // tile.filter_blocks * tile.block_m * taps * size
    windows = work // tile.window_blocks * field.pixels * size
    read = _read_bytes(conv, isinstance(field, RearrangedHaloTile) and field.sparse)
    copying = narrow = 0.0
    if isinstance(field, CopiedLines):
        copy = copy_elements(field) * conv.itemsize
        copying = _copy_seconds(conv, field, gpu)
        read = max(2 * copy - L2_SHARE, 0)
    elif isinstance(field, CopiedPixels | WindowRows):
        copying, read = _transposing_seconds(conv, tile, gpu), max(copy_bytes(conv, tile) - L2_SHARE, 0)
        if conv.layout == "NCHW" and tile.cols < field.conv.output_size[1]:
            narrow = NARROW * (SECTOR / (tile.cols * conv.out_itemsize)) ** 2 * conv.output_bytes / gpu.dram_bytes_s
    memory = (read + conv.output_bytes) / gpu.dram_bytes_s
    return Estimate(
        compute=apart * cycles / gpu.clock_hz + narrow + EXPOSED * memory,
        cache=apart * CACHED * (filters + windows + conv.output_bytes) / gpu.l2_bytes_s,
        memory=memory,
        transform=copying,
        occupancy=resident * tile.threads // 32,
        shared_bytes=field.shared_bytes,
    )


def _chains(tile: WarpSpecializedTile) -> int:
    """Chains of products between two copies of filters, after each of which sums take over the accumulators; 0 where none do."""
    chain = MULTIPLIERS[tile.dtype].chain
    return -(-tile.taps * (tile.units // 2) // chain) if chain else 0


def _copy_seconds(conv: Conv2d, field: CopiedLines, gpu: Gpu) -> float:
    """Seconds of the kernel that copies pixels, and until the next kernel begins."""
    copy, read = copy_elements(field) * conv.itemsize, _read_bytes(conv, conv.stride[0] > 1)
    return COPYING * (read / gpu.dram_bytes_s + copy / gpu.l2_bytes_s) + BEGIN_COPY_S


def _transposing_seconds(conv: Conv2d, tile: WarpSpecializedTile, gpu: Gpu) -> float:
    """Seconds of the kernel that copies to channels last or to rows of windows, and until the next kernel begins."""
    moved = copy_bytes(conv, tile) + _read_bytes(conv, not tile.window_rows and not copies_all(conv))
    return moved / gpu.dram_bytes_s + BEGIN_COPY_S


def _read_bytes(conv: Conv2d, sparse: bool) -> int:
    """Bytes of the input that are read: channels last those of windows, else all or, where it is `sparse`, of every stride-th row."""
    whole = math.prod(conv.input_shape) * conv.itemsize
    if conv.layout == "NHWC":  # pixels between windows are left out
        axes = zip((conv.height, conv.width), conv.output_size, conv.kernel, conv.stride, strict=True)
        return whole // (conv.height * conv.width) * math.prod(min(size, out * min(k, s)) for size, out, k, s in axes)
    row = -(-conv.width * conv.itemsize // SECTOR) * SECTOR
    return min(whole, conv.batch * conv.in_channels * conv.output_size[0] * row) if sparse else whole
