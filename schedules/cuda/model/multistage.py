"""Cost model of multistage kernels: it chooses default tiles, and the tuner begins with the tiles that it ranks first.

A thread block is a prologue, steps and an epilogue. The time of a step is the largest of three: the instructions of its warps on their
schedulers; the latency of one warp's chain, where too few warps hide it; the latency of its copies, where these run too few steps ahead.
Beside the multiprocessors, level-2 cache and memory give lower bounds. Constants are fitted to measurements on an NVIDIA H200.
On 90 float32 layers recorded there, the recorded tile that the models rank first costs 1.07 times as much as the best, and 1.26 times
at most.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import SLAB
from im2win.schedules.cuda.epilogue.store import run_length
from im2win.schedules.cuda.kernels.multistage import operand_of, pack_of, shared_bytes, step_filters, windows_of
from im2win.schedules.cuda.legality.multistage import OTHERS, sum_registers, word_registers
from im2win.schedules.cuda.loaders import im2col_taps
from im2win.schedules.cuda.loaders.halo_geometry import Geometry
from im2win.schedules.cuda.mma.fma import fma_lanes
from im2win.schedules.cuda.primitives import WORD
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

SCHEDULERS = 4
MOST_REGISTERS = 255  # of a thread, of a block that has so many for each
PRODUCT_CYCLES = {"f16": 14.8, "bf16": 14.8, "s8": 9.7, "tf32": 9.7, "tf32x3": 11.4}  # of a scheduler, for an `mma.sync` of 16 x 8 sums
FMA_CYCLES = 1.3  # of a scheduler, for a multiplication and addition of each lane
GROUP_CYCLES = 0.44  # of all four schedulers, for one column of a 64 x n `wgmma` of 8 words
STEP_LATENCY = 57  # cycles from a barrier through shared memory to the first accumulators and back
COPY_LATENCY = 2070  # cycles from the issue of a copy to its completion, with all multiprocessors busy; enough steps ahead hide it
BLOCK_LATENCY = 3490  # cycles of prologue and epilogue that other blocks of the multiprocessor hide
LAST_LATENCY = 2330  # cycles of the last blocks, which run together and hide nothing of each other
GROUP_LATENCY = 4010  # more cycles of a launch whose warpgroups multiply
SPLIT_LATENCY = 2230  # the same where they multiply parts of float32 elements
FETCH_LATENCY = 630  # cycles until elements that are copied through registers have arrived
SPLIT_ISSUES = 22  # instructions of a warp that splits 16 bytes in each of its threads into two TF32 parts
COPY_ISSUES = 10  # instructions of an asynchronous copy with its address
SCATTERED_ISSUES = 22  # of a copy of one element by lanes that read several lines at a time, which pass one after the other
FETCH_ISSUES = 19  # instructions of an element that is copied through registers
FETCHED_ISSUES = {4: 9, 2: 14, 1: 14}  # by bytes, of an element of a `fetched` window, with its share of a store of 16 bytes
TABLE_ISSUES = {4: 8, 2: 0, 1: 0}  # more for each number that its thread reads of the table of taps, for all its windows
SPILL_ISSUES = 20  # instructions of a step for each fetched element without a register
PATCH_ISSUES = 86  # more instructions for a pixel of a halo tile, with its look-up of the offset and neighbours in other rows
L2_SHARE = 40 << 20  # bytes that level-2 cache holds beside the data that streams through it
EXPOSED = 0.37  # share of the time of device memory that no product hides: of the first copies and the last stores
LAUNCH_S = 2.2e-6  # seconds from the end of a kernel to the work of the next
SECTOR = 32  # bytes that level-2 cache transfers at least
WASTE_SHARE = 0.38  # share that is not hidden, of sectors of which few bytes are used
GATHERED = 1.6  # factor on the time of kernels that copy two-byte elements tap by tap, channels first
FEW = 8  # least channels of a group for which it holds
CACHE_SHARE = 0.1  # share of a block's copies that misses level-1 cache or does not overlap


@dataclass(frozen=True)
class Estimate:
    """Times in seconds, and resources of a tile.

    compute: of the multiprocessors. cache: of level-2 cache. memory: of device memory. transform: of storing the workspace before the
        product, and of what runs behind it.
    occupancy: warps of a multiprocessor. shared_bytes: bytes of shared memory of a block.
    """

    compute: float
    cache: float
    memory: float
    transform: float
    occupancy: int
    shared_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a call."""
        parts = sorted((self.compute, self.cache, self.memory))
        return parts[2] + 0.25 * parts[1] + self.transform + LAUNCH_S


@dataclass(frozen=True)
class Traffic:
    """What a source of windows costs whatever the tile is.

    part, parts: the problem that one launch of the product computes, and the number of launches.
    stored: bytes of the tensors of windows that all launches read; 0 where they read the input. given: bytes of the input.
    """

    part: Conv2d
    parts: int
    stored: int
    given: int

    def memory(self, output_bytes: int, gpu: Gpu) -> float:
        """Seconds of device memory during the product."""
        return ((self.stored or self.given) + output_bytes) / gpu.dram_bytes_s

    def transform(self, gpu: Gpu) -> float:
        """Seconds of storing the tensors of windows."""
        if not self.stored:
            return 0.0
        return (self.given + 2 * self.stored) / gpu.dram_bytes_s + 2 * (self.parts - 1) * LAUNCH_S


@functools.lru_cache(maxsize=1024)
def traffic_of(conv: Conv2d, plan: WindowSource) -> Traffic:
    """The traffic of a problem's windows."""
    part, parts = plan.part(conv)
    return Traffic(part, parts, parts * plan.transform_bytes(conv), math.prod(conv.input_shape) * conv.itemsize)


@dataclass(frozen=True)
class Work:
    """What a thread block does wherever its windows come from.

    channel_blocks: blocks along channels, of all groups. steps: steps of the sum.
    registers: of a block. busy, others: see `_step_issues`. filters: bytes of filters that a block copies in all steps.
    filter_issues: instructions of a step with which a thread copies its share of them.
    stores: cycles of a warp's scheduler for the outputs. run: outputs that one store takes.
    """

    channel_blocks: int
    steps: int
    registers: int
    busy: float
    others: float
    filters: int
    filter_issues: float
    stores: float
    run: int


@functools.lru_cache(maxsize=1 << 14)  # schedules that differ in their source of windows rank the same tiles
def _work(conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> Work:
    """The work of a block. `conv` is the whole problem."""
    pack, source = pack_of(conv, tile), windows_of(conv, tile)
    channel_blocks, step = pack.blocks(conv), step_filters(source, tile)
    steps = math.prod(pack.shape(conv)) // channel_blocks // step_filters(conv, tile)
    fetched = _fetched(tile)
    registers = _registers(source, tile) + fetched
    most = min(MOST_REGISTERS, gpu.registers // tile.threads // 8 * 8)
    filters = step * source.itemsize * steps
    run = run_length(source, tile, operand_of(tile).run(source, tile))
    busy, others = _step_issues(source, tile)
    others += SPILL_ISSUES * min(max(registers - most, 0), fetched)
    return Work(
        channel_blocks, steps, min(registers, most) * tile.threads, busy, others, filters,
        filter_issues=filters / steps / 16 / tile.threads * COPY_ISSUES,
        stores=tile.positions * tile.accumulators * _kept(source, tile) / tile.warp_m / run * (6 if run == 1 else 4), run=run,
    )  # fmt: skip


def _registers(conv: Conv2d, tile: MultistageTile) -> int:
    if tile.product == "fma":
        across, along = fma_lanes(tile)
        rows, cols = tile.warp_m // across, tile.warp_n // along
        operands = rows + cols * (1 if tile.planes else 4) + 30
    elif tile.warpgroup:
        operands = word_registers(tile) + OTHERS
    else:
        parts = max(tile.arithmetic.parts, 1)
        operands = (tile.warp_m // 16 * 4 + tile.warp_n // 8 * 4) * parts + 35
    return -(-(sum_registers(conv, tile) + operands) // 8) * 8


def _fetched(tile: MultistageTile) -> int:
    """Registers in which a thread holds elements of `fetched` windows before it stores them to shared memory."""
    return tile.block_n * tile.slabs * SLAB // WORD // tile.threads if tile.fetched else 0


def _copy_issues(conv: Conv2d, tile: MultistageTile, plan: WindowSource) -> float:
    """Instructions of a copy of windows that are copied tap by tap."""
    if tile.fetched:
        numbers = 0 if im2col_taps.taps_are_whole(conv, tile) else 1 + plan.strides(conv).padded
        windows = tile.block_n * im2col_taps.lanes_along_sum(conv, tile, plan) / tile.threads
        return FETCHED_ISSUES[conv.itemsize] + TABLE_ISSUES[conv.itemsize] * numbers / windows
    unit = im2col_taps.unit_elements(conv, tile.order, plan)
    if not unit:
        return FETCH_ISSUES
    return SCATTERED_ISSUES if im2col_taps.apart(conv, tile.order, plan) else COPY_ISSUES


def _copies(conv: Conv2d, tile: MultistageTile, plan: WindowSource, steps: int) -> tuple[float, float, bool]:
    """(instructions with which a thread copies its share of a block's windows, bytes that the block copies, whether through registers)."""
    if not tile.halo:
        unit = im2col_taps.copied_elements(conv, tile, plan)
        elements = tile.block_n * tile.block_k * steps
        each = elements / max(unit, 1) / tile.threads
        return each * _copy_issues(conv, tile, plan), float(elements * conv.itemsize), not unit
    channels, most = conv.in_channels // conv.groups, 16 // conv.itemsize
    elements = Geometry.of(conv, tile, plan).pixels * channels
    unit = most if conv.layout == "NHWC" and channels % most == 0 else 1
    issues = COPY_ISSUES if unit * conv.itemsize >= 4 else FETCH_ISSUES
    return elements / unit * (issues + PATCH_ISSUES) / tile.threads, float(elements * conv.itemsize), issues == FETCH_ISSUES


@functools.lru_cache(maxsize=1024)
def _sector_waste(conv: Conv2d, order: str, plan: WindowSource) -> float:
    """Factor by which level-1 cache reads more than the elements that are copied one by one from a stored tensor.

    Several bytes of a sector serve one step only where neighbouring windows of a row, or neighbouring taps, are close in memory.
    """
    if im2col_taps.unit_elements(conv, order, plan) > 1:
        return 1.0
    strides, per_sector = plan.strides(conv), SECTOR / conv.itemsize
    tap = strides.v if order == "cuv" else strides.c
    windows, taps = (min(stride, per_sector) for stride in (strides.x, tap))
    return max(1.0, min(windows, taps))


def _pixel_waste(conv: Conv2d) -> float:
    """The same factor for the pixels of halo tiles: channels last, a group's channels may be less than a sector."""
    return max(1.0, SECTOR / (conv.in_channels // conv.groups * conv.itemsize)) if conv.layout == "NHWC" else 1.0


def _kept(conv: Conv2d, tile: MultistageTile) -> int:
    """Channels of a warp that are computed: where one warp has all of a block's, the compiler drops those that no output needs."""
    channels = conv.out_channels // conv.groups
    return min(tile.warp_m, -(-channels // 4) * 4 if channels > 1 else 1) if tile.planes and tile.warps[0] == 1 else tile.warp_m


def _step_issues(conv: Conv2d, tile: MultistageTile) -> tuple[float, float]:
    """(cycles that a warp occupies its scheduler with a step's products, other instructions of the step)."""
    if tile.product == "fma":
        across, along = fma_lanes(tile)
        rows, cols = _kept(conv, tile) // across, tile.warp_n // along
        depth = tile.slabs * conv.kernel[1] if tile.planes else tile.block_k
        loads = depth * (rows / 4 + (cols if tile.planes else cols / 4))
        return FMA_CYCLES * depth * rows * cols, 2 * loads + 30
    split = tile.arithmetic.parts == 2
    if tile.warpgroup:
        products = tile.positions * tile.warp_n // 64 * 2 * tile.slabs * (3 if split else 1)
        loads = tile.positions * tile.slabs * tile.warp_n // 64 * 2
        each = (SPLIT_ISSUES if split else 4) + (4 if tile.in_rows else 0)
        return products * tile.warp_m * GROUP_CYCLES, loads * each + 3 * products + 40
    count = tile.warp_m // 16 * (tile.warp_n // 8) * 2 * tile.slabs
    loads = tile.slabs * (tile.warp_n // 8 + tile.warp_m // 16 * 2)
    if split:
        return 3 * count * PRODUCT_CYCLES[tile.product], tile.slabs * tile.warp_n // 8 * 20 + 3 * loads + 40
    return count * PRODUCT_CYCLES[tile.product], 2 * loads + 40


def _launch_latency(tile: MultistageTile) -> int:
    """Cycles of a launch that only warpgroups need."""
    if not tile.warpgroup:
        return 0
    return SPLIT_LATENCY if tile.arithmetic.parts == 2 else GROUP_LATENCY


def estimate(conv: Conv2d, tile: MultistageTile, gpu: Gpu, plan: WindowSource) -> Estimate:
    """The estimate for a legal tile."""
    work, whole = _work(conv, tile, gpu), conv
    conv, plan = windows_of(conv, tile), WindowSource(staged="rows") if tile.in_rows else plan
    traffic, shared = traffic_of(conv, plan), shared_bytes(conv, tile, plan)
    steps, parts = work.steps, traffic.parts
    blocks = work.channel_blocks * operand_of(tile).blocks(traffic.part, tile)
    at_once = max(1, min(gpu.registers // work.registers, gpu.shared // (shared + 1024), gpu.threads // tile.threads, 24))
    warps = tile.threads // 32
    copies, copied, fetched = _copies(conv, tile, plan, steps)
    busy, others = work.busy, work.others + (copies / steps + work.filter_issues)
    cycles = busy + others
    together = min(at_once, max(1, -(-blocks // gpu.multiprocessors)))  # blocks of a multiprocessor: few blocks do not fill one
    per_scheduler = together * warps / SCHEDULERS
    latency = STEP_LATENCY * (0.5 if tile.product == "fma" else 1)
    step = max(per_scheduler * cycles, cycles + latency, COPY_LATENCY / tile.ahead)
    if fetched:
        step = max(step, cycles + latency + FETCH_LATENCY)
    block = steps * step + max(per_scheduler * work.stores, work.stores) + BLOCK_LATENCY / together
    waves = blocks / (gpu.multiprocessors * at_once)
    rounds = parts * (math.ceil(waves) if waves < 4 else waves + 0.5)
    alone = parts * (LAST_LATENCY * (1 - 1 / together) + _launch_latency(tile))
    sectors = whole.output_bytes * (2.0 if work.run * whole.out_itemsize < 8 else 1.2)
    waste = _pixel_waste(conv) if tile.halo else _sector_waste(conv, tile.order, plan)
    passed = CACHE_SHARE * (work.filters + copied) + (WASTE_SHARE * copied * waste if waste > 1 else 0)
    gathered = not tile.halo and conv.layout == "NCHW" and conv.itemsize == 2 and conv.in_channels >= FEW * conv.groups
    apart, memory = GATHERED if gathered else 1.0, traffic.memory(whole.output_bytes, gpu)
    return Estimate(
        compute=apart * (rounds * block + alone) / gpu.clock_hz + EXPOSED * memory,
        cache=(parts * blocks * passed + CACHE_SHARE * sectors) / gpu.l2_bytes_s,
        memory=memory,
        transform=traffic.transform(gpu),
        occupancy=at_once * warps,
        shared_bytes=shared,
    )
