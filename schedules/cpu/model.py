"""Analytic cost model of CPU tiles: it chooses the tile of an untuned layer, and the tuner begins with the tiles that it ranks first.

It counts cycles of one core: the micro-kernel (bounds by FMA, load and latency), the write-back, staging, and the traffic of the caches.
Constants are those of current x86 and Arm cores (two FMAs and two loads a cycle, see `fma_units`). Those of caches and write-back are
fitted to tuning records. Estimates rank tiles; they do not predict times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from im2win.device.arm import input_registers
from im2win.device.cpu import FMA_LATENCY, FMA_UNITS, Machine
from im2win.schedules.cpu.tile import Tile
from im2win.spec import padding
from im2win.spec.conv2d import Conv2d
from im2win.spec.objective import cost

HALVES = ("znver4",)  # microarchitectures that load and multiply vectors of 512 bits in two halves
L2_BYTES, L3_BYTES = 48.0, 20.0  # bytes a cycle that a core gets from its level-2 and from the level-3 cache
FILTER_BYTES = 2.5  # bytes a cycle, for each lane of a vector, of filters that every register tile reads from level-2 cache
INPUT_SHARE = 0.6  # share of the cache lines with a register tile's inputs that are read beside them
LINE = 60  # bytes that they take beyond a run of inputs
RUN = 20.0  # cycles that a run of output rows costs at its start
SPILL = 0.04  # share of a K step that each missing register costs, of 32
SHORT_SPILL = 4.5  # cycles of a K step that it costs with fewer registers: short steps do not hide that sums pass through memory
LOADED_AGAIN = 0.022  # share of that for a shared input without a register: it is loaded again, while no sum waits for it
ROW = 0.5  # cycles of each further row of inputs that a K step reads, shared by the columns of the kernel
AHEAD = 3  # registers with inputs that LLVM loads ahead
GUARD = 1.0  # cycles to ask whether a tap lies inside the input
PREDICATE = 1.5  # share of a K step that predicated reads cost
ADDED = 1.5  # cycles of a vector of sums to which a chunk of channels is added
WAKE = 4000.0  # cycles to wake the other threads and to wait for the last of them
TRANSPOSE = 10.0  # cycles of a vector of 16 outputs for the buffer and the transpose
SHARPNESS = 6.0  # of the maximum of the products' time and that of the filters' way from a cache
STAGED = {"row_block": 0.5, "root": 1.8}  # cycles of an element that is transformed
PARTED = 1.4  # the same where a strided row is parted into rows of neighbouring windows, in a block of output rows
CROWDED = 2.0  # cycles of a vector of outputs where a step writes more planes than the level-1 cache's sets hold lines of
CONFLICT = 8.0  # cycles of a row of inputs in one channel whose lines were evicted, as their set of the level-2 cache has too few
SHUFFLE = 5.0  # loads that cost as much as a vector of strided inputs, for each element between windows
PIECE = 3.5  # loads that cost as much as each further piece of a vector that the windows of a row do not fill
MANY = 32  # vector registers, and masks; machines with fewer have sixteen, and none
_WAY = 4096  # bytes of a way of the level-1 cache: lines at this distance lie in one set
_WAYS = 8  # of the level-2 cache
_FREE_WAYS = 5  # of these, that filters and outputs leave to inputs
_SHUFFLED = 8  # elements between windows up to which LLVM shuffles vectors; beyond, it loads one element at a time


@dataclass(frozen=True)
class Estimate:
    """Cycles of one core by cause, and bytes of workspace. `cost` ranks tiles, see `im2win.spec.objective`.

    steps: parallel steps that the threads share. passes: times that the threads are woken, when there are several steps. alone: steps of
        these that run on one thread after the others: the pass with a smaller last block is peeled off the parallel loop.
    """

    conv: Conv2d
    product: float
    write_back: float
    stage: float
    cache: float
    memory: float
    steps: int
    threads: int
    held: float
    passes: int = 1
    alone: int = 0

    @property
    def cost(self) -> float:
        """`total`, weighted by the price of the workspace."""
        return cost(self.conv, self.total, self.held)

    @property
    def total(self) -> float:
        """Cycles of the whole layer on all threads."""
        work = self.product + self.write_back + self.stage + self.cache + self.memory
        return work * self.imbalance / self.threads + (WAKE * self.passes if min(self.steps - self.alone, self.threads) > 1 else 0.0)

    @property
    def imbalance(self) -> float:
        """Steps of the thread that has most, over the average."""
        return (-(-(self.steps - self.alone) // self.threads) + self.alone) * self.threads / self.steps


def fma_units(machine: Machine, lanes: int) -> int:
    """FMAs of vectors with so many float32 lanes that a core begins in a cycle; as many loads."""
    return FMA_UNITS // 2 if machine.mcpu in HALVES and lanes > 8 else FMA_UNITS


def further_pieces(machine: Machine, windows: int, lanes: int) -> int:
    """Further pieces of the last vector of so many windows where they do not fill it: 4 + 2 + 1 of seven. None with masks."""
    return max((windows % lanes).bit_count() - 1, 0) if machine.registers < MANY else 0


def _step_cycles(tile: Tile, windows: int, step: int, machine: Machine) -> float:
    """Cycles of one K step of the register tile, with `windows` windows in its row."""
    begun = fma_units(machine, tile.lanes)
    if tile.axis == "channels":
        sums = tile.rows * windows * tile.vectors
        loads: float = tile.vectors + tile.rows * windows
    else:
        vectors = -(-windows // tile.lanes)
        sums = tile.rows * vectors * tile.cols
        # a vector of neighbouring windows mostly crosses a cache line; of strided ones LLVM loads what lies between, too, and shuffles
        one = 2.0 if step == 1 else SHUFFLE * step if step <= _SHUFFLED else 2.0 * tile.lanes
        loads = tile.rows * (vectors * one + PIECE * further_pieces(machine, windows, tile.lanes)) + tile.cols
    overhead = 1.0 / tile.unroll
    return max(sums / begun, loads / begun, FMA_LATENCY) + overhead


def _spill_cycles(conv: Conv2d, tile: Tile, machine: Machine, matrix: bool, cycles: float) -> float:
    """Cycles that missing registers add to a K step of so many cycles."""
    many = machine.registers >= MANY
    if tile.axis == "windows":
        # LLVM loads a K step's inputs and filters before it multiplies; as measured, each missing register costs more than a shared input
        missing: float = max(tile.accumulators + tile.rows * tile.vectors + tile.cols - machine.registers, 0) * 3
    else:
        registers = machine.registers - (input_registers(machine) if tile.inputs == "reloaded" else 0)
        missing = (_missing_of_many if many else _missing_of_few)(conv, tile, registers, matrix)
    return missing * (SPILL * cycles if many else SHORT_SPILL)


def _missing_of_many(conv: Conv2d, tile: Tile, registers: int, matrix: bool) -> float:
    """Registers that LLVM needs beyond those there are.

    Where an unrolled kernel axis reads overlapping inputs, LLVM loads each input once and keeps all of them in registers. It unrolls loops
    of up to three steps by itself.
    """
    need = tile.accumulators + tile.vectors + 1
    if tile.inputs == "reloaded":
        return max(need - registers, 0)
    taps, down = _unrolled(conv, tile)
    if matrix or (tile.unroll == 1 and taps > 3):
        return max(need + AHEAD - registers, 0)
    shared = taps > conv.stride[0] and tile.rows > 1 if down else taps > conv.stride[1]
    long = 4 if tile.unroll > 1 and taps > 5 else 0  # long unrolled bodies: LLVM's scheduler moves loads far ahead
    return max(need + (_shared(conv, tile) - 1 if shared else AHEAD) + long - registers, 0)


def _missing_of_few(conv: Conv2d, tile: Tile, registers: int, matrix: bool) -> float:
    """The same with sixteen registers. Shared inputs for which none is left are loaded again, which costs less than a sum without one."""
    need = tile.accumulators + tile.vectors + 1 + (AHEAD if tile.vectors == 1 else 0)  # a load that a single product needs comes early
    taps, _ = _unrolled(conv, tile)
    again = 0
    if not (matrix or tile.inputs == "reloaded" or tile.order == "uvc" or math.prod(conv.kernel) == 1 or (tile.unroll == 1 and taps > 3)):
        again = max(tile.accumulators + tile.vectors + _shared(conv, tile) + AHEAD - registers, 0)
    return max(need - registers, 0) + LOADED_AGAIN * again


def _unrolled(conv: Conv2d, tile: Tile) -> tuple[int, bool]:
    """Taps of the innermost kernel axis, and whether that is the rows'."""
    if tile.order == "uvc":
        return 1, False
    down = tile.order == "cvu"
    return conv.kernel[0 if down else 1], down


def _shared(conv: Conv2d, tile: Tile) -> int:
    """Inputs that the taps of the innermost kernel axis read for all windows of a register tile."""
    taps, down = _unrolled(conv, tile)
    along, across, step = (tile.rows, tile.cols, conv.stride[0]) if down else (tile.cols, tile.rows, conv.stride[1])
    return across * ((along - 1) * step + taps)


def _input_bytes(conv: Conv2d, tile: Tile, windows: int, matrix: bool) -> float:
    """Bytes of the cache lines that hold the inputs of a register tile with so many windows in its row."""
    channels, (rows, cols) = conv.in_channels // conv.groups, conv.kernel
    if matrix:
        return channels * rows * cols * (4.0 * windows + LINE)
    run = (windows - 1) * conv.stride[1]
    row = min(4.0 * (run + conv.window[1]) + LINE, cols * (4.0 * (run + 1) + LINE))  # one run, or one for each column of the kernel
    return channels * ((tile.rows - 1) * conv.stride[0] + rows) * row


def _longer(one: float, other: float) -> float:
    """The longer of two times that overlap, and a little more where they are about as long."""
    return float((one**SHARPNESS + other**SHARPNESS) ** (1 / SHARPNESS))


def estimate(conv: Conv2d, tile: Tile, machine: Machine, *, matrix: bool, where: str, staged: float, step: int) -> Estimate:
    """The estimate for a legal tile of an algorithm.

    Args:
        matrix, where, step: see `kernel.Plan`.
        staged: elements that are staged for a block of output rows, or with `where` = "root" in all.
    """
    out_h, out_w = conv.output_size
    blocks = tile.pack.blocks(conv)
    depth = math.prod(conv.filter_shape[1:])
    line = out_w * (tile.row_block if matrix else 1)
    lines = 1 if matrix else tile.row_block // tile.rows  # rows of register tiles in a block of output rows
    width = tile.cols if tile.axis == "channels" else tile.vectors * tile.lanes
    whole, rest = divmod(line, width)

    def step_cycles(windows: int) -> float:
        if not windows:
            return 0.0
        cycles = _step_cycles(tile, windows, step, machine)
        cycles += ROW * (tile.rows - 1) / conv.kernel[1] if tile.axis == "channels" else 0.0
        return cycles + _spill_cycles(conv, tile, machine, matrix, cycles)

    sweep = lines * depth * (whole * step_cycles(width) + step_cycles(rest))
    read = 1.0  # share of the filters that a register tile reads, on average
    if not matrix and padding.skips(conv):
        columns = padding.multiplied(conv, 1, width)
        read = padding.multiplied(conv, 0, tile.rows) * columns
        sweep *= read
        if tile.order != "uvc":  # every channel asks again which taps lie inside
            rows, cols = conv.kernel
            asked = rows * (1 + cols * padding.multiplied(conv, 0, tile.rows))
            sweep += GUARD * lines * (whole + bool(rest)) * conv.in_channels / conv.groups * asked
        if where == "inline":
            sweep *= 1 + PREDICATE * (1 - padding.whole(conv, 0, tile.rows) * padding.whole(conv, 1, width))
    elif tile.padding == "skipped":
        read = padding.multiplied(conv, 0, tile.rows)
        sweep *= read * padding.multiplied(conv, 1, 1)
    row_blocks = conv.batch * out_h // tile.row_block
    passes = blocks // tile.pass_blocks

    filter_bytes = 4.0 * depth * tile.block * read
    input_bytes = 4.0 * conv.in_channels // conv.groups * ((tile.row_block - 1) * conv.stride[0] + conv.window[0]) * conv.padded_size[1]
    if where == "inline" and padding.skips(conv):
        reached = min(tile.row_block * conv.kernel[0] * padding.multiplied(conv, 0, 1), conv.height)  # rows of the input
        input_bytes = 4.0 * conv.in_channels / conv.groups * reached * conv.width
    if where == "root":
        input_bytes = 4.0 * staged / conv.groups / row_blocks
    tiles = lines * (whole + bool(rest))
    streamed = tiles * filter_bytes  # every tile reads them, of a chunk that does not stay in a nearer cache
    slowed = sweep
    if filter_bytes / tile.chunks > 0.75 * machine.l1_bytes:
        inputs = tiles * INPUT_SHARE * read * _input_bytes(conv, tile, width, matrix)
        slowed = _longer(slowed, (streamed + inputs) / (FILTER_BYTES * machine.lanes))
    if filter_bytes / tile.chunks > 0.75 * machine.l2_bytes:
        slowed = _longer(slowed, streamed / L3_BYTES)
    cache = slowed - sweep
    if filter_bytes * tile.pass_blocks > 0.6 * machine.l2_bytes:
        cache += filter_bytes / L3_BYTES
    # a chunk of a matrix that stays in level-1 cache with its inputs is read beside the products of the one before
    beside = matrix and tile.chunks > 1 and (filter_bytes + input_bytes) / tile.chunks <= 0.75 * machine.l1_bytes
    if input_bytes > 0.5 * machine.l1_bytes and not beside:
        cache += input_bytes / L2_BYTES
    if input_bytes > 0.6 * machine.l2_bytes and not beside:
        cache += input_bytes / L3_BYTES
    if where == "inline" and _conflicting(conv, tile, machine):
        rows = 1 if matrix else (tile.rows - 1) * conv.stride[0] + conv.kernel[0]
        cache += CONFLICT * tiles * rows * conv.in_channels / conv.groups
    moved = passes * math.prod(conv.input_shape) + math.prod(conv.filter_shape) + 2 * math.prod(conv.output_shape)

    steps = passes * row_blocks
    if where == "row_block":  # a pass stages the channels of its groups alone
        staged *= max(tile.pass_blocks * conv.groups // blocks, 1) / conv.groups
    parted = where == "row_block" and step == 1 and conv.stride[1] > 1
    outputs = tile.row_block * out_w * tile.block if tile.axis == "channels" and conv.layout == "NCHW" else 0
    if tile.chunks > 1:
        outputs += tile.row_block * out_w * tile.block
    private = conv.itemsize * min(machine.threads, steps) * (outputs + (staged if where == "row_block" else 0))
    return Estimate(
        conv=conv,
        product=row_blocks * blocks * sweep,
        write_back=_write_back(conv, tile, machine) + (tile.chunks - 1) * ADDED * math.prod(conv.output_shape) / tile.lanes,
        stage=(PARTED if parted else STAGED.get(where, 0.0)) * staged * (steps if where == "row_block" else 1),
        cache=row_blocks * blocks * cache,
        memory=0.3 * 4 * moved / L3_BYTES,
        steps=steps,
        threads=machine.threads,
        held=private + (conv.itemsize * staged if where == "root" else 0),
        passes=2 if where == "root" else 1,
        alone=int(passes > 1 and (conv.out_channels // conv.groups) % tile.block > 0),
    )


def _write_back(conv: Conv2d, tile: Tile, machine: Machine) -> float:
    """Cycles of the write-back, and of the start of each channel's run of rows: a new page, and nothing prefetched."""
    runs = conv.batch * conv.out_channels * (conv.output_size[0] // tile.row_block)
    return _vectors_out(conv, tile, machine) + RUN * runs


def _vectors_out(conv: Conv2d, tile: Tile, machine: Machine) -> float:
    vectors = math.prod(conv.output_size) * conv.batch * conv.out_channels / tile.lanes
    if tile.axis == "windows":
        # every row of the tile is another stream of partly written cache lines
        return vectors * (tile.rows + (CROWDED if _crowded(conv, tile, machine) else 0.0))
    padded = (conv.out_channels // conv.groups) % tile.block
    if conv.layout == "NCHW":
        return vectors * (2.0 * tile.lanes if padded else TRANSPOSE * tile.lanes / 16)
    return vectors * (tile.lanes if padded else 2.0)


def _crowded(conv: Conv2d, tile: Tile, machine: Machine) -> bool:
    """Whether the planes that a parallel step writes are more than the level-1 cache holds lines of, at the few sets that they share."""
    sets = _WAY // math.gcd(conv.itemsize * math.prod(conv.output_size), _WAY)
    return conv.layout == "NCHW" and tile.pass_blocks * tile.block > sets * machine.l1_bytes // _WAY


def _conflicting(conv: Conv2d, tile: Tile, machine: Machine) -> bool:
    """Whether the planes of a chunk of channels share a few sets of the level-2 cache, and evict each other's lines there.

    So it is where the size of a plane is a multiple of a large power of two: 32 x 32 or 64 x 64 elements.
    """
    way = machine.l2_bytes // _WAYS
    sets = way // math.gcd(conv.itemsize * conv.height * conv.width, way)
    return conv.layout == "NCHW" and conv.in_channels // conv.groups // tile.chunks >= sets * _FREE_WAYS
