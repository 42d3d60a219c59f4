"""Analytic cost model of dot products on CPUs, in cycles of one core, comparable with `schedules.cpu.model`.

Constants are fitted to measurements of ResNet-50's layers on a Sapphire Rapids core; those of other cores differ in `fma_units`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from im2win.device.cpu import Machine
from im2win.schedules.cpu.model import L2_BYTES, L3_BYTES, Estimate, fma_units
from im2win.schedules.cpu_dot.geometry import CACHE_LINE, Geometry
from im2win.schedules.cpu_dot.instructions import Instruction, instruction
from im2win.schedules.cpu_dot.legality import held_bytes_of_step
from im2win.schedules.cpu_dot.tile import DotTile
from im2win.spec.conv2d import Conv2d

LATENCY = 5.0  # cycles of a dot product until its sum can be added to
TILE, SUM = 12.0, 1.5  # cycles of a register tile beside its products, and of each vector of its sums
LOOP = 1.0  # cycles of the loops over taps, for each
TILE_LOAD, TILE_SUM, TILE_START = 8.0, 24.0, 40.0  # cycles to load an AMX tile, to clear and store one, and of a register tile of them
CROSSED = 2.0  # the same, further, of a tile whose rows all cross the end of a cache line, in loads of one
STREAM_BYTES = 20.0  # bytes of filters a cycle that a core gets from beyond its level-2 cache
ROWS, PRODUCT = 16.0, 52.0  # cycles of a product of AMX tiles of 16 rows, half of them for any rows, and until its sums can be added to
SHARED = (1.0, 1.0, 1.4, 2.2)  # times of a product, by the register tile's AMX tiles of sums, where another thread uses the core, too
AHEAD = 200.0  # cycles by which a core is ahead with the next register tile of AMX tiles while products wait for sums
EXPANDED, SHUFFLED = 3.0, 0.5  # cycles of a vector of words of kernel columns, to be stored or to be multiplied
WRITTEN = {"int32": 2.0, "float32": 3.0, "float16": 4.0, "bfloat16": 5.0, "int8": 5.0, "uint8": 5.0}  # cycles of a vector of outputs
STEPPED = 4.0  # more for residuals in their own steps, counted from the instructions
COPIED_ROW = 3.0  # cycles of a short row that is copied out of a line
PIECE = 3.0  # cycles of each further piece of a row's outputs
COPIED = 2.0  # cycles of 64 copied bytes
REPEATED = 2.0  # cycles of a vector of words that is copied for a tap
ROW = 12.0  # cycles of a row that is copied with its padding
SCATTERED = 4.0  # cycles of a pixel that is copied by itself
STRIDED = 24.0  # cycles of a vector of pixels that are far from each other in their planes
TOGETHER = 0.9  # share of the level-1 cache that filters and inputs of a register tile may take
THRASHED = 4.0  # times of their bytes where they take more
STEP = 300.0  # cycles of a parallel step
MULTIPLIED = {"madd": 0.5, "mul": 0.33}  # vectors that are multiplied and added in the time of a fused multiply-add
DPBF16 = {"znver": 1.0, "": 0.25}  # the same of vdpbf16ps, by the beginning of the microarchitecture's name: Intel's begin half of one


def estimate(conv: Conv2d, tile: DotTile, machine: Machine) -> Estimate:
    """The estimate for a legal tile."""
    geometry, one = Geometry(conv, tile), instruction(tile.instruction, conv.dtype)
    assert one is not None
    row_blocks = -(-conv.output_size[0] // tile.row_block)
    passes = tile.pack.blocks(conv) // tile.pass_blocks
    steps = passes * conv.batch * row_blocks
    blocks = steps * tile.pass_blocks
    register_tiles = blocks * geometry.lines * geometry.tiles
    group_copies = tile.pass_blocks if tile.axis == "depthwise" else max(tile.pass_blocks // tile.pack.blocks_per_group(conv), 1)
    moved = conv.bytes_moved - math.prod(conv.filter_shape) * conv.itemsize + _filters_read(conv, tile, passes, steps, machine)
    each = _register_tile(conv, tile, geometry, one, machine)
    return Estimate(
        conv=conv,
        product=register_tiles * each + _waits(conv, tile, passes, steps, machine, each),
        write_back=blocks * _written(conv, tile, geometry) + STEP * steps,
        stage=steps * group_copies * _copied(conv, tile, geometry, one),
        cache=blocks * _cache(conv, tile, geometry, machine),
        memory=0.3 * moved / L3_BYTES,
        steps=steps,
        threads=machine.threads,
        held=min(machine.threads, steps) * held_bytes_of_step(conv, tile),
    )


def _register_tile(conv: Conv2d, tile: DotTile, geometry: Geometry, one: Instruction, machine: Machine) -> float:
    steps, sums = tile.pack.steps(conv), tile.accumulators
    if one.tiles:
        chunks = steps // geometry.chunk
        left, right = tile.cols * _rows(tile.rows) / ROWS, tile.vectors * _rows(geometry.chunk) / ROWS
        inputs, filters = (right, left) if tile.axis == "windows" else (left, 0.0)  # what may cross the ends of cache lines
        crossing = inputs * _crossing(conv, tile, geometry)
        if CACHE_LINE % geometry.chunk:
            crossing += filters * (geometry.chunk - 1) / CACHE_LINE
        loads = left + right + CROSSED * crossing
        each = SHARED[min(sums, len(SHARED)) - 1] * (ROWS + tile.rows) / 2
        products = max(chunks * (sums * each + TILE_LOAD * loads), PRODUCT * chunks - AHEAD)
        return products + TILE_SUM * sums * tile.rows / ROWS + TILE_START
    share = next(share for name, share in DPBF16.items() if machine.mcpu.startswith(name))
    begun = fma_units(machine, tile.lanes) * (share if one.name == "dpbf16" else MULTIPLIED.get(one.name, 1.0))
    loads = tile.vectors + tile.cols * (tile.vectors if tile.axis == "depthwise" else 1)
    step = max(sums / begun, tile.vectors * SHUFFLED) if geometry.shuffled else max(sums / begun, loads / 2.0, LATENCY)
    taps = math.prod(conv.kernel) / (conv.kernel[1] if geometry.over_columns and tile.axis == "channels" else 1)
    return steps * step + LOOP * taps + TILE + SUM * sums


def _filters_read(conv: Conv2d, tile: DotTile, passes: int, steps: int, machine: Machine) -> float:
    """Bytes of filters that cores get from beyond their level-2 caches: a pass once for each of its threads if its filters stay there."""
    of_pass = 4.0 * tile.pack.steps(conv) * tile.block * tile.pass_blocks
    return of_pass * (max(passes, min(machine.threads, steps)) if of_pass <= machine.l2_bytes // 2 else steps)


def _waits(conv: Conv2d, tile: DotTile, passes: int, steps: int, machine: Machine, register_tile: float) -> float:
    """Cycles that the first register tiles of channel blocks wait for filters which do not stay in the level-2 cache between calls."""
    of_block = 4.0 * tile.pack.steps(conv) * tile.block
    if of_block * tile.pass_blocks * max(passes // machine.threads, 1) <= machine.l2_bytes // 2:
        return 0.0
    blocks = _filters_read(conv, tile, passes, steps, machine) / of_block
    return blocks * max(of_block / STREAM_BYTES - register_tile, 0.0)


def _crossing(conv: Conv2d, tile: DotTile, geometry: Geometry) -> float:
    """Share of the rows of AMX tiles of inputs that cross the end of a cache line: most that begin at any word do."""
    across = tile.axis == "windows"
    aligned = (geometry.expanded or conv.kernel == (1, 1)) if across else geometry.words % CACHE_LINE == 0 == CACHE_LINE % geometry.chunk
    return 0.0 if aligned else ((CACHE_LINE if across else geometry.chunk) - 1) / CACHE_LINE


def _rows(rows: int) -> float:
    """Cycles of an AMX tile's rows."""
    return max(float(rows), 4.0)


def _written(conv: Conv2d, tile: DotTile, geometry: Geometry) -> float:
    """Cycles of the epilogue of a channel block."""
    each = WRITTEN[conv.out_dtype] + conv.residual + STEPPED * conv.own_steps + (conv.activation not in ("none", "relu")) * 6.0
    windows = tile.row_block * conv.output_size[1]
    if tile.axis != "windows":
        return windows * (tile.vectors * each + 2.0)
    if geometry.finishes_lines:
        return tile.block * (geometry.held_line / tile.lanes * each + tile.row_block * COPIED_ROW + 6.0)
    whole = geometry.pitch == conv.output_size[1]
    rows, run = (1, geometry.line) if whole else (tile.row_block, conv.output_size[1])
    vectors = run // tile.lanes + (1 if run % tile.lanes and run > tile.lanes else 0) if run >= tile.lanes else bin(run).count("1")
    return tile.block * (rows * (vectors * each + PIECE) + 6.0)


def _copied(conv: Conv2d, tile: DotTile, geometry: Geometry, one: Instruction) -> float:
    """Cycles to copy a row block's input for a group."""
    words, channels = geometry.copied, conv.in_channels // conv.groups
    vectors = words * 4 / 64
    if geometry.expanded:
        return geometry.size[0] * geometry.words * (6.0 + -(-conv.output_size[1] // 16) * EXPANDED)
    if geometry.repeated:
        vectors = tile.pack.steps(conv) * tile.row_block * -(-conv.output_size[1] // 16)
        return _copied(conv, replace(tile, along="channels"), geometry.once, one) + REPEATED * vectors
    if geometry.shuffled:
        return channels * geometry.size[0] * (ROW + geometry.size[1] / 64 * COPIED)
    if tile.axis == "windows":
        rows = geometry.words * math.prod(geometry.phases) * geometry.size[0]
        far = geometry.steps[1] * geometry.cycles[1]
        per_vector = COPIED * 2 if far == 1 else 10.0 if far == 2 else STRIDED * tile.group
        return rows * (4.0 + -(-geometry.size[1] // 16) * per_vector)
    pixels = math.prod(geometry.size)
    if tile.axis == "depthwise" or (channels % tile.group == 0 and conv.groups == 1 and geometry.steps[1] == 1):
        return vectors * COPIED + 6.0 * geometry.size[0]
    if geometry.words * tile.group <= 4 and conv.groups == 1:
        return pixels * 0.5 + 6.0 * geometry.size[0]
    return pixels * (SCATTERED + vectors / pixels * COPIED)


def _cache(conv: Conv2d, tile: DotTile, geometry: Geometry, machine: Machine) -> float:
    """Cycles of a channel block for what its register tiles read from the level-2 cache, beside products that hide a part."""
    filters = 4.0 * tile.pack.steps(conv) * tile.block
    tiles = geometry.lines * geometry.tiles
    inputs = 4.0 * geometry.copied
    of_tile = min(4.0 * tile.pack.steps(conv) * tile.windows, inputs)
    read = 0.0
    if filters > 0.6 * machine.l1_bytes:
        read += filters * tiles
    elif tile.axis == "windows" and filters + of_tile > TOGETHER * machine.l1_bytes:  # each takes the other's place
        read += THRASHED * (filters + of_tile) * tiles
    if inputs > 0.5 * machine.l1_bytes:
        read += inputs
    sums = 8.0 * geometry.line * tile.block if tile.axis == "windows" else 0.0
    if sums > 0.5 * machine.l1_bytes:
        read += sums
    return 0.5 * read / L2_BYTES
