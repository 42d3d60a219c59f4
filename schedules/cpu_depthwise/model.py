"""Analytic cost model of depthwise tiles on CPUs, in cycles of one core, comparable with `schedules.cpu.model`.

A sum over taps has few products for each element that it reads and writes, so that staging, write-back and memory count as much as FMAs.
Constants are fitted to measurements of default and sampled tiles of mobile networks.
"""

from __future__ import annotations

import math

from im2win.compute.depthwise import count
from im2win.device.cpu import Machine
from im2win.schedules.cpu.model import L2_BYTES, L3_BYTES, Estimate, fma_units, further_pieces
from im2win.schedules.cpu_depthwise.legality import staged_bytes
from im2win.schedules.cpu_depthwise.tile import DepthwiseTile, in_place
from im2win.spec.conv2d import Conv2d

PIECE = 2.0  # loads that cost as much as each further piece of a vector that the windows of a row do not fill
SPILL = 0.06  # share of a register tile that each missing register costs
LOOP = 3.0  # cycles of a step of the loop over taps
TILE = 8.0  # cycles of a register tile beside its products
RUN = 0.4  # cycles of the channels of one input, which lie side by side: two cache lines at once are fetched as fast as one
STEP, BUFFER = 60.0, 200.0  # cycles of a parallel step, and of the buffers of one that stages its input
SHUFFLED, SINGLE = 0.25, 1.5  # cycles to stage a channel of a multiplier that divides the lanes, so that LLVM shuffles vectors, or does not
SHORT_RUN = 256.0  # bytes of a run of channels that takes twice its share of memory's time
HIDDEN = 0.5  # share of the second-level cache's traffic that products hide


def estimate(conv: Conv2d, tile: DepthwiseTile, machine: Machine) -> Estimate:
    """The estimate for a legal tile."""
    out_h, out_w = conv.output_size
    blocks, row_blocks = count(conv, tile.pack), -(-out_h // tile.row_block)
    steps = conv.batch * row_blocks * (blocks // tile.pass_blocks)
    runs = conv.batch * row_blocks * _filled_blocks(conv, tile)  # blocks of rows, a channel block at a time
    width = tile.cols if tile.axis == "channels" else tile.vectors * tile.lanes
    whole, rest = divmod(out_w, width)
    sweep = whole * _tile_cycles(conv, tile, width, machine) + (_tile_cycles(conv, tile, rest, machine) if rest else 0.0)
    moved = math.prod(conv.input_shape) + math.prod(conv.filter_shape) + 2 * math.prod(conv.output_shape)
    return Estimate(
        conv=conv,
        product=runs * (tile.row_block // tile.rows) * sweep,
        write_back=runs * _write_back(conv, tile) + (STEP if in_place(conv, tile) else STEP + BUFFER) * steps,
        stage=runs * _stage(conv, tile),
        cache=runs * _cache(conv, tile, machine),
        memory=0.3 * 4 * moved / L3_BYTES * _scattered(conv, tile, machine),
        steps=steps,
        threads=machine.threads,
        held=min(machine.threads, steps) * staged_bytes(conv, tile),
    )


def _scattered(conv: Conv2d, tile: DepthwiseTile, machine: Machine) -> float:
    """Factor of memory's cost where a pass reads some of the channels of each input: short runs are fetched worse than long ones."""
    channels = tile.pack.block * tile.pass_blocks
    if not in_place(conv, tile) or channels >= conv.out_channels or conv.bytes_moved < machine.l2_bytes:
        return 1.0
    return 1.0 + SHORT_RUN / (conv.itemsize * channels)


def _filled_blocks(conv: Conv2d, tile: DepthwiseTile) -> float:
    """Channel blocks, a smaller last one as the share of its vectors."""
    return -(-conv.out_channels // tile.lanes) / tile.vectors if tile.axis == "channels" else conv.out_channels


def _tile_cycles(conv: Conv2d, tile: DepthwiseTile, windows: int, machine: Machine) -> float:
    """Cycles of a register tile with `windows` windows in its row."""
    begun = fma_units(machine, tile.lanes)
    if tile.axis == "windows":
        (kernel, steps), vectors = conv.kernel, -(-windows // tile.lanes)
        inputs = vectors * _distinct(tile.rows, conv.stride[0], kernel, conv.dilation[0])
        sums = tile.rows * vectors
        # a vector of neighbouring windows mostly crosses a cache line, which takes both load units
        pieces = PIECE * inputs / vectors * further_pieces(machine, windows, tile.lanes)
        step = max(kernel * sums / begun, (2 * inputs + pieces + kernel) / begun)
        missing = sums + min(inputs, sums + vectors) + 1 - machine.registers
    else:
        (steps, kernel), vectors = conv.kernel, tile.vectors
        inputs = vectors * _distinct(windows, conv.stride[1], kernel, conv.dilation[1])
        sums = windows * vectors
        step = max(kernel * sums / begun, (inputs + kernel * vectors) / begun)
        step += RUN * inputs / vectors if in_place(conv, tile) else 0.0
        missing = sums + min(inputs, sums + vectors) + vectors - machine.registers
    return steps * (step * (1 + SPILL * max(missing, 0)) + LOOP) + TILE + 2.0 * sums


def _distinct(outputs: int, stride: int, taps: int, dilation: int) -> int:
    """Inputs that so many neighbouring outputs read, in one direction."""
    return len({output * stride + tap * dilation for output in range(outputs) for tap in range(taps)})


def _staged_rows(conv: Conv2d, tile: DepthwiseTile) -> int:
    return (tile.row_block - 1) * conv.stride[0] + conv.window[0]


def _stage(conv: Conv2d, tile: DepthwiseTile) -> float:
    """Cycles to stage the rows of a channel block."""
    if in_place(conv, tile):
        return 0.0
    rows, width = _staged_rows(conv, tile), conv.padded_size[1]
    if tile.axis == "windows":
        vectors = -(-width // tile.lanes)
        return rows * (4.0 + 2.0 * vectors, 8.0 + 2.5 * vectors, 12.0 + width)[min(conv.stride[1], 3) - 1]
    if conv.layout == "NHWC":  # each channel of the input is copied once for every filter of its own
        return rows * width * tile.block * (SINGLE if tile.lanes % (conv.out_channels // conv.groups) else SHUFFLED)
    return rows * (-(-conv.width // tile.lanes) * 6.0 * tile.lanes + 2.0 * width) * tile.vectors


def _write_back(conv: Conv2d, tile: DepthwiseTile) -> float:
    """Cycles to transpose buffered rows of a channel block, or to write the rest of rows that vectors do not fill."""
    out_w = conv.output_size[1]
    if tile.axis == "windows":
        return tile.row_block * 3.0 if out_w % tile.lanes else 0.0
    if conv.layout == "NCHW":
        return -(-tile.row_block * out_w // tile.lanes) * 7.0 * tile.lanes * tile.vectors + 10.0 * tile.block
    return 0.0


def _cache(conv: Conv2d, tile: DepthwiseTile, machine: Machine) -> float:
    """Cycles of a channel block's rows for what does not stay in the first-level cache."""
    if not in_place(conv, tile):
        held = staged_bytes(conv, tile)
        return held / L2_BYTES if held > 0.5 * machine.l1_bytes else 0.0
    taps, row = math.prod(conv.kernel), conv.width * tile.row_block
    read = 0.0
    if 4 * taps * tile.pass_blocks * tile.block > 0.5 * machine.l1_bytes:  # every register tile streams its filters
        read += taps * tile.row_block * -(-conv.output_size[1] // tile.cols)
    if 4 * conv.kernel[0] * conv.width * tile.pass_blocks * tile.block > 0.6 * machine.l1_bytes:  # every output row reads its rows again
        read += row * max(conv.kernel[0] - conv.stride[0], 0)
    return HIDDEN * 4 * read * tile.block / L2_BYTES
