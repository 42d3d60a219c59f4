"""Analytic cost model of Winograd tiles on CPUs, in the units of `cpu.model`, so that tiles of all algorithms can be ranked together.

Operations of transforms are counted from their matvec programs. Other constants are those of `cpu.model`, or counted from the instructions
that LLVM generates.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from im2win.compute import nest, winograd
from im2win.device.cpu import FMA_LATENCY, Machine
from im2win.numerics.matvec_program import program
from im2win.numerics.winograd_matrices import transform
from im2win.schedules.cpu.model import AHEAD, FILTER_BYTES, L2_BYTES, L3_BYTES, RUN, SPILL, TRANSPOSE, Estimate, fma_units
from im2win.schedules.cpu_winograd.kernel import held_bytes
from im2win.schedules.cpu_winograd.tile import WinogradTile
from im2win.spec.conv2d import Conv2d

TRANSPOSE_IN = 5.0  # cycles to transpose a vector of inputs: four stages of shuffles, a load and a store
SCALAR = 1.5  # cycles of an element that is copied without shuffles
PAD = 2.0  # cycles of a vector that is copied to the padded row block: load, store, and the test of the padding
OVERLAP = 0.9  # share of the products' time that hides how filters and inputs are read from the caches
FAR_BYTES = 24.0  # bytes a cycle that a core gets from the level-3 cache, of the filters of one position
MEMORY_BYTES = 28.0  # bytes a cycle that all cores together get from memory, for filters that no cache holds
KEPT = 0.7  # share of the level-3 cache in which filters stay from one row block to the next
KEPT_ON = {"znver3": 0.4}  # the same on microarchitectures where measurements show less of it


@dataclass(frozen=True)
class _Form:
    """Operations of the four one-dimensional transforms, and the sizes of a tile."""

    rows: int
    cols: int
    into_rows: int
    into_cols: int
    back_rows: int
    back_cols: int


@functools.lru_cache(maxsize=64)
def _form(kernel: tuple[int, int], outputs: int) -> _Form:
    down, across = (transform(outputs, taps) for taps in kernel)
    operations = [program(matrix).operations for matrix in (down.bt, across.bt, down.at, across.at)]
    return _Form(down.size, across.size, *operations)


def _work(operations: int, stores: int, begun: int) -> float:
    """Cycles of vector operations, beside half as many stores a cycle."""
    return max(operations / begun, 2.0 * stores / begun)


def _register_tile(tile: WinogradTile, cols: int, depth: int, machine: Machine) -> float:
    """Cycles of the product of one position for `cols` tiles of the row block."""
    begun = fma_units(machine, tile.lanes)
    step = max(cols * tile.vectors / begun, (cols + tile.vectors) / begun, FMA_LATENCY) + 1.0 / tile.unroll
    spilled = max(tile.accumulators + tile.vectors + 1 + AHEAD - machine.registers, 0)
    return depth * step * (1 + SPILL * spilled) + cols * tile.vectors + FMA_LATENCY


def _into(conv: Conv2d, tile: WinogradTile, form: _Form, row_block_cols: int, begun: int) -> float:
    """Cycles to transform a row block's input of one image, for one vector of channels."""
    rows = (tile.row_block - 1) * tile.outputs + form.rows
    width = (row_block_cols - 1) * tile.outputs + form.cols
    whole = (conv.in_channels // conv.groups) % tile.depth == 0
    if conv.layout == "NHWC":
        transposing = 0.0 if whole else SCALAR * tile.depth
    else:
        transposing = TRANSPOSE_IN * tile.depth / 16 + 1 if whole and tile.depth >= 4 else SCALAR * tile.depth
    down = tile.row_block * width * _work(form.into_rows, form.rows, begun)
    across = tile.row_block * row_block_cols * form.rows * _work(form.into_cols, form.cols, begun)
    return rows * conv.width * transposing + rows * width * PAD + down + across


def _out_of(conv: Conv2d, tile: WinogradTile, form: _Form, line: int, begun: int) -> float:
    """Cycles to transform a row block's products back and to write them, for one channel block."""
    operations = form.cols * form.back_rows + tile.outputs * form.back_cols
    back = line * tile.vectors * (_work(operations, tile.outputs**2, begun) + form.rows * form.cols / begun)
    rows, width = tile.images * tile.row_block * tile.outputs, conv.output_size[1]
    whole = (conv.out_channels // conv.groups) % tile.block == 0
    if conv.layout == "NHWC":
        return back + rows * width * tile.vectors * (2.0 if whole else float(tile.lanes))
    if not whole:
        return back + rows * width * tile.vectors * 2.0 * tile.lanes
    transposed = -(-width // tile.lanes)  # vectors of a row; the last one costs as much as a whole one
    return back + rows * transposed * tile.block * TRANSPOSE + RUN * tile.block * tile.images


def buffers(conv: Conv2d, tile: WinogradTile) -> dict[str, int]:
    """Bytes of the buffers of a parallel step, by block: V of all its channels, M and outputs of one channel block, input rows."""
    form, (_, cols), pack = _form(conv.kernel, tile.outputs), winograd.tiles(conv, tile.outputs), tile.pack
    line, positions = tile.images * tile.row_block * cols, form.rows * form.cols
    rows, width = (tile.row_block - 1) * tile.outputs + form.rows, (cols - 1) * tile.outputs + form.cols
    groups = max(tile.pass_blocks // pack.blocks_per_group(conv), 1)
    elements = {
        winograd.INPUT: groups * pack.depth(conv) * positions * line,
        nest.CONV: positions * line * tile.block,
        nest.ROWS: tile.outputs**2 * line * tile.block,
        winograd.PADDED: tile.images * tile.depth * rows * width,
        winograd.DOWN: tile.depth * form.rows * width,
        winograd.TRANSPOSED_IN: tile.depth * conv.width if conv.layout == "NCHW" else 0,
    }
    return {name: conv.itemsize * count for name, count in elements.items()}


def row_block_bytes(conv: Conv2d, tile: WinogradTile) -> int:
    """Most bytes that a parallel step needs at once: M and outputs reuse the memory of the input rows."""
    held = buffers(conv, tile)
    row_block = held[winograd.PADDED] + held[winograd.DOWN] + held[winograd.TRANSPOSED_IN]
    return held[winograd.INPUT] + max(held[nest.CONV] + held[nest.ROWS], row_block)


def estimate(conv: Conv2d, tile: WinogradTile, machine: Machine) -> Estimate:
    """The estimate for a legal tile."""
    form, (tile_rows, tile_cols) = _form(conv.kernel, tile.outputs), winograd.tiles(conv, tile.outputs)
    pack, line, positions = tile.pack, tile.images * tile.row_block * tile_cols, form.rows * form.cols
    depth, blocks = pack.depth(conv), pack.blocks(conv)
    row_blocks, passes = conv.batch // tile.images * tile_rows // tile.row_block, blocks // tile.pass_blocks
    steps = row_blocks * passes

    whole, rest = divmod(line, tile.cols)
    per_position = whole * _register_tile(tile, tile.cols, depth, machine)
    per_position += _register_tile(tile, rest, depth, machine) if rest else 0.0
    sweep = positions * per_position
    groups = max(tile.pass_blocks // pack.blocks_per_group(conv), 1)
    vectors_in = groups * depth // tile.depth

    panel, given = 4.0 * depth * tile.block, 4.0 * depth * line  # filters and inputs of a position
    again = whole + bool(rest) if panel > 0.75 * machine.l1_bytes else 1
    panels = panel * again / (FILTER_BYTES * machine.lanes if again > 1 else L2_BYTES)
    streamed = positions * (panels + given / L2_BYTES)
    sums = 4.0 * positions * line * tile.block
    near = positions * (panel * tile.pass_blocks + given * groups) + sums
    if near > 0.6 * machine.l2_bytes:
        streamed += positions * panel / FAR_BYTES
    cache = max(0.0, streamed - OVERLAP * sweep)
    if positions * given * groups + sums > 0.6 * machine.l2_bytes:
        cache += (positions * given + sums) / L3_BYTES
    filters = 4.0 * math.prod(pack.shape(conv))
    moved = 4 * (passes * math.prod(conv.input_shape) + 2 * math.prod(conv.output_shape)) + filters
    memory = 0.3 * moved / L3_BYTES
    if filters > KEPT_ON.get(machine.mcpu, KEPT) * machine.l3_bytes:
        memory += max(1.0, row_blocks / machine.threads) * filters / MEMORY_BYTES * machine.threads

    return Estimate(
        conv=conv,
        product=steps * tile.pass_blocks * sweep,
        write_back=steps * tile.pass_blocks * _out_of(conv, tile, form, line, fma_units(machine, tile.lanes)),
        stage=steps * vectors_in * tile.images * _into(conv, tile, form, tile_cols, fma_units(machine, tile.lanes)),
        cache=steps * tile.pass_blocks * cache,
        memory=memory,
        steps=steps,
        threads=machine.threads,
        held=min(machine.threads, steps) * row_block_bytes(conv, tile) + held_bytes(conv, tile),
    )
