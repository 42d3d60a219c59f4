"""Cost model of depthwise tiles on GPUs: instructions on CUDA cores, level-1 cache, and memory.

Constants are fitted to times of some 1,500 tiles of 38 layers on an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.legality.depthwise import inputs_of, registers
from im2win.schedules.cuda.model.multistage import LAUNCH_S, SCHEDULERS
from im2win.schedules.cuda.model.multistage import Estimate as MultistageEstimate
from im2win.schedules.cuda.tiles.depthwise import DepthwiseTile
from im2win.spec.conv2d import Conv2d

LANES = 32
BLOCKS = 32  # most of a multiprocessor
BEGIN_ISSUES = 10  # instructions of a thread before its first load
LOAD_ISSUES = 1.4  # of a load of a vector with its address and condition
RAGGED_ISSUES = 6.0  # more of such a load where tiles do not divide a row of outputs: nvcc computes each address anew
CONVERT_ISSUES = 0.9  # of an element that becomes float32
FILTER_ISSUES = 2.0  # of a load of filters
BEGIN_CYCLES = 100  # that a block takes with nothing to hide its latency
ROW_CYCLES = 65  # the same of each kernel row whose inputs are loaded after those of the row before
TURN_CYCLES = 0.5  # of level-1 cache, channels first, for each line that the lanes of a warp read or write at a time
L1_BYTES = 420  # that level-1 cache gives in a cycle beside the other instructions
LINE = 128  # bytes; blocks that read fewer at a time read parts of lines
PART = 0.125  # share of a line's time in level-2 cache that each further part costs
FULL_WARPS = 9.4  # of a multiprocessor, with which memory is busy


@dataclass(frozen=True)
class Estimate(MultistageEstimate):
    """The times of a tile add up: a thread loads, multiplies and stores once, and few others run beside it."""

    @property
    def seconds(self) -> float:
        """Seconds of a call."""
        return self.compute + self.cache + self.memory + LAUNCH_S


def estimate(conv: Conv2d, tile: DepthwiseTile, gpu: Gpu) -> Estimate:
    """The cost model's estimate for a legal tile."""
    out_h, out_w = conv.output_size
    across, down = -(-out_w // tile.cols), -(-out_h // tile.rows)
    blocks = conv.batch * across * down * (conv.out_channels // tile.block_m) // tile.tasks
    warps = -(-tile.threads // LANES)
    room = min(gpu.registers // (min(registers(conv, tile), 255) * warps * LANES), gpu.threads // (warps * LANES), BLOCKS)
    running = min(max(room, 1), -(-blocks // gpu.multiprocessors))
    waves = blocks / (gpu.multiprocessors * running)
    issues, idle = _thread(conv, tile)
    cycles = running * (issues * warps / SCHEDULERS + _cache_cycles(conv, tile, warps)) + idle
    moved = conv.itemsize * math.prod(conv.input_shape) + conv.output_bytes * (1 + conv.residual)
    return Estimate(
        compute=(waves if waves >= 4 else math.ceil(waves)) * cycles / gpu.clock_hz,
        cache=PART * _parts(conv, tile) * _read(conv, tile) / gpu.l2_bytes_s,
        memory=moved / (gpu.dram_bytes_s * min(running * warps / FULL_WARPS, 1.0)),
        transform=0.0,
        occupancy=running * warps,
        shared_bytes=0,
    )


def _repeated(conv: Conv2d, tile: DepthwiseTile) -> int:
    """Times that a thread loads inputs: for each kernel row, or once."""
    return conv.kernel[0] if tile.staged == "row" else 1


def _loads(conv: Conv2d, tile: DepthwiseTile) -> int:
    """Loads of inputs of a thread; channels first, nvcc leaves out those that no thread finds inside."""
    rows, cols = inputs_of(conv, tile)
    if conv.layout == "NCHW":
        rows, cols = min(rows, conv.height), min(cols, conv.width)
    return rows * cols * _repeated(conv, tile)


def _thread(conv: Conv2d, tile: DepthwiseTile) -> tuple[float, float]:
    """Instructions of a thread, and cycles that it waits in vain."""
    taps, repeated = math.prod(conv.kernel), _repeated(conv, tile)
    converted = CONVERT_ISSUES * (conv.itemsize < 4) * tile.vector
    ragged = RAGGED_ISSUES * (conv.output_size[1] % tile.cols > 0)
    issues = BEGIN_ISSUES + taps * (FILTER_ISSUES + converted + tile.accumulators)
    issues += _loads(conv, tile) * (LOAD_ISSUES + ragged + converted)
    return issues, BEGIN_CYCLES + ROW_CYCLES * (repeated if repeated > 1 else 0)


def _cache_cycles(conv: Conv2d, tile: DepthwiseTile, warps: int) -> float:
    """Cycles of level-1 cache for a thread block."""
    loads = _loads(conv, tile)
    if conv.layout == "NHWC":
        return (loads + math.prod(conv.kernel)) * max(tile.vector * conv.itemsize, 4) * tile.threads / L1_BYTES
    read, written = _lines(conv, tile, conv.stride, conv.width), _lines(conv, tile, (1, 1), conv.output_size[1])
    return TURN_CYCLES * warps * (loads * read + tile.rows * tile.stores(conv) * written)


def _lines(conv: Conv2d, tile: DepthwiseTile, step: tuple[int, int], width: int) -> float:
    """Lines that the lanes of a warp access at a time, channels first: of rows of tiles that are `step` elements apart for each output."""
    across = min(-(-conv.output_size[1] // tile.cols), LANES)
    part, pitch = across * tile.cols * step[1] * conv.itemsize / LINE, tile.rows * step[0] * width * conv.itemsize / LINE
    return max(LANES / across * max(part, min(pitch, 1.0)), 1.0)


def _parts(conv: Conv2d, tile: DepthwiseTile) -> float:
    """Further parts of lines that a block reads instead of whole ones."""
    return 0.0 if conv.layout == "NCHW" else max(LINE / (tile.block_m * conv.itemsize) - 1, 0.0)


def _read(conv: Conv2d, tile: DepthwiseTile) -> float:
    """Bytes of inputs that all blocks read, those that they share counted for each."""
    (out_h, out_w), (kernel_h, kernel_w) = conv.output_size, conv.window
    across, down = -(-out_w // tile.cols), -(-out_h // tile.rows)
    rows, cols = (min(tile.rows * (tile.tasks // across), out_h), out_w) if tile.tasks >= across else (tile.rows, tile.cols * tile.tasks)
    read = ((rows - 1) * conv.stride[0] + kernel_h) * ((min(cols, out_w) - 1) * conv.stride[1] + kernel_w)
    blocks = conv.batch * across * down / tile.tasks * max(tile.tasks // (across * down), 1)
    return blocks * read * conv.out_channels * conv.itemsize
