"""Memory: the papers' formulas by hand, and what an operator says it allocates against the buffers that TVM's own pipeline allocates."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from allocations import allocated
from memory_formulas import FORMULAS, letters
from ops import computing, default, host, sampled_tiles
from regimes import REGIMES

from im2win.registry.cpu_schedules import Windows
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite

WINDOWS = [name for name, row in SCHEDULES.items() if isinstance(row.scheduler, Windows)]


def stored(name: str, conv: Conv2d) -> int:
    """Elements of an algorithm's transformed tensor."""
    return schedule_of(name).transform_bytes(conv) // conv.itemsize


def test_worked_example() -> None:
    """Thesis fig. 2-5: a 1x3x3x3 input and a 2x2 filter: 48 elements for im2col, 36 for im2win."""
    conv = Conv2d(1, 3, 3, 3, 1, 2)
    assert (stored("im2col/tiled", conv), stored("im2win/stored", conv)) == (48, 36)
    assert schedule_of("im2win/stored").transform_bytes(conv) == 4 * 36


@pytest.mark.parametrize("name", SCHEDULES)
def test_formulas(name: str) -> None:
    for conv in [*REGIMES.values(), *(layer.conv for layer in suite("papers12"))]:
        assert stored(name, conv) == FORMULAS[name](**letters(conv)), str(conv)


def test_ratio_of_im2col_to_im2win() -> None:
    """Thesis eq. 2-7: Wf * Wo / Wi; equal when kernel and stride agree and the windows cover the row; less than the input if Hf < s."""
    for conv in REGIMES.values():
        sizes = letters(conv)
        ratio = Fraction(sizes["Wf"] * sizes["Wo"], sizes["Wi"])
        assert Fraction(stored("im2col/tiled", conv), stored("im2win/stored", conv)) == ratio
    tiles = Conv2d(2, 3, 12, 15, 4, 3, stride=3)
    assert stored("im2col/tiled", tiles) == stored("im2win/stored", tiles) == math.prod(tiles.input_shape)
    gaps = Conv2d(1, 3, 11, 11, 8, 2, stride=3)
    assert stored("im2win/stored", gaps) < math.prod(gaps.input_shape)


# --- what is really allocated


CASES = [
    "n2-c8x12x14-k16x3x3-p1",
    "n2-c5x11x13-k17x3x3-p1",
    "n1-c7x29x31-k19x3x3",
    "n2-c16x7x7-k32x1x1",
    "n1-c4x15x17-k20x3x3-s2-p1",
    "n1-c3x23x27-k16x7x7-s4-p3",
    "n1-c4x9x11-k16x3x3-p0.1.2.0",
    "n1-c3x10x13-k8x2x2-s3",
    "n1-c4x15x17-k16x3x3-p2-d2",
    "n1-c6x9x11-k15x3x3-p1-g3",
    "n1-c16x9x11-k16x3x3-p1-g16",
    "n2-c4x9x11-k32x3x3-p1-add",
    "n1-c4x9x11-k48x3x3-p1-bias-add-relu",
    "n1-c4x9x11-k32x3x3-p1-NHWC-bias-add-relu",
]


@pytest.mark.sampled(12)
@pytest.mark.pairwise
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("conv", [REGIMES[key] for key in CASES], ids=str)
def test_formulas_hold_for_the_buffers_of_a_kernel(conv: Conv2d, name: str, turn: int) -> None:
    """A stored transform is exactly the formula's; a row block has its rows, or whole tiles of windows; the rest are outputs held back.

    The default tile and tiles of both axes have their turns.
    """
    row = schedule_of(name)
    assert isinstance(row.scheduler, Windows)
    plan = row.plan(conv)
    tiles = sampled_tiles(conv, name, 1)
    tile = tiles[turn % len(tiles)]
    buffers, total = allocated(conv, name, tile)
    line = conv.output_size[1]
    outputs = tile.row_block * line
    staged = buffers.pop(plan.stage, 0) if plan.stage else 0
    if plan.where == "root":
        assert staged == row.transform_bytes(conv), tile
    else:
        windows = tile.cols if tile.axis == "channels" else tile.vectors * tile.lanes
        beyond = windows - 1 if plan.matrix else 0  # of the last tile, beyond the line
        assert staged * outputs <= row.scheduler.row_block_elements(conv, tile.row_block) * (outputs + beyond) * conv.itemsize, tile
        assert bool(staged) == (plan.where == "row_block"), tile
    assert set(buffers) <= {"rows", "transposed"}, tile
    assert buffers.get("rows", 0) <= (outputs + tile.cols - 1) * tile.block * conv.itemsize, tile
    assert buffers.get("transposed", 0) <= (outputs + line + tile.lanes) * tile.lanes * conv.itemsize, tile
    private = sum(buffers.values()) + (staged if plan.where == "row_block" else 0)
    copies = host().threads + (conv.out_channels // conv.groups % tile.block > 0)  # the rest of a parallel loop has its own
    assert total <= row.transform_bytes(conv) + copies * private, tile


@computing("n16-c8x28x30-k16x3x3")
def test_an_op_says_what_it_allocates(algorithm: str) -> None:
    """Who stores a tensor allocates at least the formula's bytes, and who does not, far less than im2col."""
    conv = Conv2d.parse("n16-c8x28x30-k16x3x3")
    said = default(conv, algorithm).extra_bytes
    assert said >= schedule_of(algorithm).transform_bytes(conv)
    if not schedule_of(algorithm).transform_bytes(conv):
        assert said < schedule_of("im2col/tiled").transform_bytes(conv) * host().threads / conv.batch * 2
