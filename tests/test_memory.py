"""Memory: the papers' formulas by hand, and what an operator says it allocates against the buffers that TVM's own pipeline allocates."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import tvm
from ops import computing, default, host, sampled_tiles
from regimes import REGIMES
from tvm.ir.instrument import pass_instrument

from im2win.codegen.llvm import llvm_target
from im2win.codegen.workspace import Allocations, buffer_bytes, children
from im2win.registry.algorithms import ALGORITHMS
from im2win.registry.cpu_lowering import lower
from im2win.registry.schedules import Windows
from im2win.schedules.cpu.loop_peeling import CONFIG
from im2win.schedules.cpu.registers import PIPELINE
from im2win.schedules.cpu.tile import Tile
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite

# Elements of the whole transformed tensor, in the letters of the papers; Wi and Hi count the padding. Thesis eq. 2-4, 2-5; MEC section 3.
FORMULAS: dict[str, Callable[..., int]] = {
    "direct": lambda **_: 0,
    "direct_persistent": lambda **_: 0,
    "direct_streamed": lambda **_: 0,
    "im2col": lambda N, Ci, Hf, Wf, Ho, Wo, **_: N * Ci * Hf * Wf * Ho * Wo,
    "im2win": lambda N, Ci, Hf, Wi, Ho, **_: N * Ci * Ho * Hf * Wi,
    "im2win_fused": lambda **_: 0,
    "implicit_gemm": lambda **_: 0,
    "implicit_gemm_split": lambda N, Co, Ho, Wo, **_: 2 * N * Co * Ho * Wo,
    "mec": lambda N, Ci, Wf, Hi, Wo, **_: N * Ci * Wo * Hi * Wf,
    "mcfa": lambda **_: 0,
    "winograd": lambda **_: 0,
    "winograd_tc": lambda N, Ci, Ho, Wo, **_: N * Ci * 36 * -(-Ho // 4) * -(-Wo // 4),
}
WINDOWS = [name for name, row in ALGORITHMS.items() if isinstance(row.scheduler, Windows)]


def letters(conv: Conv2d) -> dict[str, int]:
    """The sizes of a problem in the papers' letters."""
    top, left, bottom, right = conv.padding
    (Hf, Wf), (Ho, Wo) = conv.kernel, conv.output_size
    return {
        "N": conv.batch, "Co": conv.out_channels, "Ci": conv.in_channels, "Hi": conv.height + top + bottom, "Wi": conv.width + left + right,
        "Hf": Hf, "Wf": Wf, "Ho": Ho, "Wo": Wo,
    }  # fmt: skip


def stored(name: str, conv: Conv2d) -> int:
    """Elements of an algorithm's transformed tensor."""
    return ALGORITHMS[name].transform_bytes(conv) // conv.itemsize


def test_worked_example() -> None:
    """Thesis fig. 2-5: a 1x3x3x3 input and a 2x2 filter: 48 elements for im2col, 36 for im2win."""
    conv = Conv2d(1, 3, 3, 3, 1, 2)
    assert (stored("im2col", conv), stored("im2win", conv)) == (48, 36)
    assert ALGORITHMS["im2win"].transform_bytes(conv) == 4 * 36


@pytest.mark.parametrize("name", ALGORITHMS)
def test_formulas(name: str) -> None:
    for conv in [*REGIMES.values(), *(layer.conv for layer in suite("papers12"))]:
        assert stored(name, conv) == FORMULAS[name](**letters(conv)), str(conv)


def test_ratio_of_im2col_to_im2win() -> None:
    """Thesis eq. 2-7: Wf * Wo / Wi; equal when kernel and stride agree and the windows cover the row; less than the input if Hf < s."""
    for conv in REGIMES.values():
        sizes = letters(conv)
        ratio = Fraction(sizes["Wf"] * sizes["Wo"], sizes["Wi"])
        assert Fraction(stored("im2col", conv), stored("im2win", conv)) == ratio
    tiles = Conv2d(2, 3, 12, 15, 4, 3, stride=3)
    assert stored("im2col", tiles) == stored("im2win", tiles) == math.prod(tiles.input_shape)
    gaps = Conv2d(1, 3, 11, 11, 8, 2, stride=3)
    assert stored("im2win", gaps) < math.prod(gaps.input_shape)


# --- what is really allocated


@pass_instrument
class Buffers:
    """Watches the compiler: bytes of each buffer as scheduled, by name (of a loop cut in two, the larger part's)."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def run_after_pass(self, module: Any, info: Any) -> None:
        if info.name == "tirx.FlattenBuffer":
            [function] = module.functions.values()
            self._note(function.body)

    def _note(self, stmt: Any) -> None:
        if count := buffer_bytes(stmt):
            self.bytes[stmt.buffer.name] = max(count, self.bytes.get(stmt.buffer.name, 0))
        for child in children(stmt):
            self._note(child)


def allocated(conv: Conv2d, name: str, tile: Tile) -> tuple[dict[str, int], int]:
    """Bytes of a kernel's buffers by name, and what `Allocations` says that a call allocates: of one compilation."""
    watch, said = Buffers(), Allocations(host().threads)
    module = lower(conv, ALGORITHMS[name], tile, host())
    with tvm.transform.PassContext(config=CONFIG, instruments=[watch, said]):
        tvm.compile(module, llvm_target(host()), tir_pipeline=PIPELINE)
    return watch.bytes, said.bytes


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


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("conv", [REGIMES[key] for key in CASES], ids=str)
def test_formulas_hold_for_the_buffers_of_a_kernel(conv: Conv2d, name: str) -> None:
    """A stored transform is exactly the formula's; a strip has its rows, or windows up to whole tiles; the rest are outputs held back."""
    row = ALGORITHMS[name]
    assert isinstance(row.scheduler, Windows)
    plan = row.plan(conv)
    for tile in sampled_tiles(conv, name, 1):
        buffers, total = allocated(conv, name, tile)
        line = conv.output_size[1]
        outputs = tile.strip * line
        staged = buffers.pop(plan.stage, 0) if plan.stage else 0
        if plan.where == "root":
            assert staged == row.transform_bytes(conv), tile
        else:
            windows = tile.cols if tile.axis == "channels" else tile.vectors * tile.lanes
            beyond = windows - 1 if plan.matrix else 0  # of the last tile, beyond the line
            assert staged * outputs <= row.scheduler.strip_elements(conv, tile.strip) * (outputs + beyond) * conv.itemsize, tile
            assert bool(staged) == (plan.where == "strip"), tile
        assert set(buffers) <= {"rows", "turned"}, tile
        assert buffers.get("rows", 0) <= (outputs + tile.cols - 1) * tile.block * conv.itemsize, tile
        assert buffers.get("turned", 0) <= (outputs + line + tile.lanes) * tile.lanes * conv.itemsize, tile
        private = sum(buffers.values()) + (staged if plan.where == "strip" else 0)
        copies = host().threads + (conv.out_channels // conv.groups % tile.block > 0)  # the rest of a parallel loop has its own
        assert total <= row.transform_bytes(conv) + copies * private, tile


@computing("n16-c8x28x30-k16x3x3")
def test_an_op_says_what_it_allocates(algorithm: str) -> None:
    """Who stores a tensor allocates at least the formula's bytes, and who does not, far less than im2col."""
    conv = Conv2d.parse("n16-c8x28x30-k16x3x3")
    said = default(conv, algorithm).extra_bytes
    assert said >= ALGORITHMS[algorithm].transform_bytes(conv)
    if not ALGORITHMS[algorithm].transform_bytes(conv):
        assert said < ALGORITHMS["im2col"].transform_bytes(conv) * host().threads / conv.batch * 2
