"""The search space of Winograd tiles on CPUs: legal tiles that obviously waste nothing, for tuner and cost model."""

from __future__ import annotations

from collections.abc import Iterator

from im2win.compute.winograd import tiles
from im2win.device.cpu import Machine
from im2win.numerics.tolerance import trusted
from im2win.schedules.cpu.space import MAX_PASS, divisors, even_tiles
from im2win.schedules.cpu.tile import VECTORS
from im2win.schedules.cpu_winograd.legality import LARGEST, violations
from im2win.schedules.cpu_winograd.tile import WinogradTile
from im2win.spec.conv2d import Conv2d

MAX_ROW_BLOCK = 8  # rows of tiles
MAX_IMAGES, MAX_TILES = 16, 128  # images together, where they have at most so many tiles
MAX_VECTORS = 6


def forms(conv: Conv2d) -> list[int]:
    """Outputs m of the forms F(m x m, kernel) that keep the tolerance, each with fewer tiles than all smaller ones."""
    found: list[int] = []
    for outputs in range(2, LARGEST - max(conv.kernel) + 2):
        if trusted(conv, outputs) and all(tiles(conv, outputs) != tiles(conv, smaller) for smaller in found):
            found.append(outputs)
    return found


def widths(channels: int, machine: Machine, least: int) -> list[int]:
    """Lanes of vectors for so many channels: the widest that is at most half padding, and fewer where that leaves less padding."""
    fitting = [w for w in VECTORS if least <= w <= machine.lanes and (w < 2 * channels or w == least)]
    padded = {w: -(-channels // w) * w for w in fitting}
    return [w for w in fitting if all(padded[w] < padded[wider] for wider in fitting if wider > w)]


def _register_tiles(line: int, filters: int, lanes: int, machine: Machine) -> Iterator[tuple[int, int]]:
    """(vectors, cols) with enough accumulators to occupy the FMA units (thesis eq. 3-1), unless the row block (`line` tiles) has fewer."""
    least = max(machine.outputs_in_flight[0] // machine.lanes, 1)
    for vectors in range(1, min(-(-filters // lanes), MAX_VECTORS) + 1):
        for cols in even_tiles(line, max(machine.registers // vectors - 1, 1)):
            if cols * vectors >= min(least, line * vectors):
                yield vectors, cols


def _row_blocks(conv: Conv2d, rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """(rows of tiles, images): parts of an image, or several small images."""
    for row_block in divisors(rows, MAX_ROW_BLOCK):
        yield row_block, 1
    for images in divisors(conv.batch, MAX_IMAGES):
        if images > 1 and images * rows * cols <= MAX_TILES:
            yield rows, images


def _candidates(conv: Conv2d, machine: Machine) -> Iterator[WinogradTile]:
    share, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    for outputs in forms(conv):
        rows, cols_of_tiles = tiles(conv, outputs)
        for depth in widths(share, machine, 1):
            for lanes in widths(filters, machine, 4):
                for row_block, images in _row_blocks(conv, rows, cols_of_tiles):
                    for vectors, cols in _register_tiles(row_block * images * cols_of_tiles, filters, lanes, machine):
                        blocks = conv.groups * -(-filters // (lanes * vectors))
                        for pass_blocks in sorted({*divisors(blocks, MAX_PASS), blocks}):
                            for unroll in sorted({1, min(depth, 4)}):
                                yield WinogradTile(outputs, depth, lanes, vectors, cols, row_block, images, pass_blocks, unroll)


def space(conv: Conv2d, machine: Machine) -> list[WinogradTile]:
    """Every legal tile worth a trial, in a fixed order."""
    return [tile for tile in _candidates(conv, machine) if not violations(conv, tile, machine)]
