"""Cost model of depthwise tiles on GPUs: instructions on CUDA cores, level-1 cache, and memory.

Constants are fitted to times of some 1,500 tiles of 38 layers on an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.legality.depthwise import copied, inputs_of, registers, shared_bytes
from im2win.schedules.cuda.model.multistage import LAUNCH_S, SCHEDULERS
from im2win.schedules.cuda.model.multistage import Estimate as MultistageEstimate
from im2win.schedules.cuda.tiles.depthwise import DepthwiseTile
from im2win.spec.conv2d import Conv2d

LANES = 32
BLOCKS = 32  # most of a multiprocessor
BEGIN_ISSUES = 10  # instructions of a thread before its first load
LOAD_ISSUES = 1.4  # of a load of a vector with its address and condition
RAGGED_ISSUES = 6.0  # more of such a load where tiles do not divide a row of outputs: nvcc computes each address anew
SHARED_LOAD_ISSUES = 0.3  # of a load from shared memory beside those of the products
CONVERT_ISSUES = 0.9  # of an element that becomes float32
FILTER_ISSUES = 2.0  # of a load of filters
COPY = 0.5  # share of the instructions to copy rows to shared memory that no others hide
BEGIN_CYCLES = 100  # that a block takes with nothing to hide its latency
ROW_CYCLES = 65  # the same of each kernel row whose inputs are loaded after those of the row before
STRIDED_CYCLES = 640  # the same of each row that is copied by its phases
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
    (out_h, out_w), taps, shared = conv.output_size, math.prod(conv.kernel), shared_bytes(conv, tile)
    across, down = -(-out_w // tile.cols), -(-out_h // tile.rows)
    if tile.shared:
        blocks = conv.batch * conv.out_channels // tile.channels * -(-out_h // tile.row_block(conv))
    else:
        blocks = conv.batch * across * down // tile.tasks * (conv.out_channels // tile.block_m)
    warps = -(-tile.threads // LANES)
    room = min(gpu.registers // (min(registers(conv, tile), 255) * warps * LANES), gpu.threads // (warps * LANES), BLOCKS)
    running = min(max(min(room, gpu.shared // shared) if shared else room, 1), -(-blocks // gpu.multiprocessors))
    waves = blocks / (gpu.multiprocessors * running)
    issues, idle = _thread(conv, tile)
    cached = (math.prod(inputs_of(conv, tile)) * _repeated(conv, tile) + taps) * max(tile.vector * conv.itemsize, 4) * tile.threads
    cycles = running * (issues * warps / SCHEDULERS + cached / L1_BYTES) + idle
    moved = conv.itemsize * math.prod(conv.input_shape) + conv.output_bytes * (1 + conv.residual)
    return Estimate(
        compute=(waves if waves >= 4 else math.ceil(waves)) * cycles / gpu.clock_hz,
        cache=PART * _parts(conv, tile) * _read(conv, tile) / gpu.l2_bytes_s,
        memory=moved / (gpu.dram_bytes_s * min(running * warps / FULL_WARPS, 1.0)),
        transform=0.0,
        occupancy=running * warps,
        shared_bytes=shared,
    )


def _repeated(conv: Conv2d, tile: DepthwiseTile) -> int:
    """Times that a thread loads inputs: for each kernel row, or once."""
    return conv.kernel[0] if tile.staged == "row" else 1


def _thread(conv: Conv2d, tile: DepthwiseTile) -> tuple[float, float]:
    """Instructions of a thread, and cycles that it waits in vain."""
    taps, repeated = math.prod(conv.kernel), _repeated(conv, tile)
    loads, converted = math.prod(inputs_of(conv, tile)) * repeated, CONVERT_ISSUES * (conv.itemsize < 4) * tile.vector
    issues = BEGIN_ISSUES + taps * (FILTER_ISSUES + converted + tile.accumulators)
    if not tile.shared:
        ragged = RAGGED_ISSUES * (conv.output_size[1] % tile.cols > 0)
        return issues + loads * (LOAD_ISSUES + ragged + converted), BEGIN_CYCLES + ROW_CYCLES * (repeated if repeated > 1 else 0)
    lines, width = copied(conv, tile)
    lanes = tile.lanes(lines, width)
    rows = -(-lines * lanes // tile.threads)
    copies = COPY * tile.copy_issues(lines, width, lanes)
    return issues + loads * (SHARED_LOAD_ISSUES + converted) + copies, BEGIN_CYCLES + STRIDED_CYCLES * rows * (conv.stride[1] > 1)


def _parts(conv: Conv2d, tile: DepthwiseTile) -> float:
    """Further parts of lines that a block reads instead of whole ones."""
    return 0.0 if tile.shared else max(LINE / (tile.block_m * conv.itemsize) - 1, 0.0)


def _read(conv: Conv2d, tile: DepthwiseTile) -> float:
    """Bytes of inputs that all blocks read, those that they share counted for each."""
    (out_h, out_w), (kernel_h, kernel_w) = conv.output_size, conv.window
    across, down = -(-out_w // tile.cols), -(-out_h // tile.rows)
    rows, cols = (min(tile.rows * (tile.tasks // across), out_h), out_w) if tile.tasks >= across else (tile.rows, tile.cols * tile.tasks)
    read = ((rows - 1) * conv.stride[0] + kernel_h) * ((min(cols, out_w) - 1) * conv.stride[1] + kernel_w)
    blocks = conv.batch * across * down / tile.tasks * max(tile.tasks // (across * down), 1)
    return blocks * read * conv.out_channels * conv.itemsize
