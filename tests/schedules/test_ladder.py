"""The thesis' ladder: every rung, and every move by itself, gives exactly the convolution; what is measured is reported as it is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle import assert_equal, exact_tensors, oracle
from paths import ROOT

from im2win.bench.results import Result, Row, Spread
from im2win.device.cpu import Machine
from im2win.reports import ladder as ladder_report
from im2win.reports.tables import fill, load_all
from im2win.runtime.op import Op
from im2win.schedules.studies import cpu_ladder as ladder
from im2win.schedules.studies.cpu_ladder import RUNGS, Rung
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies import ladder as ablation

PROBLEMS = (
    "n2-c5x11x13-k7x3x3",  # a prime number of windows and channels: tiles leave rests, blocks shrink to one channel
    "n1-c4x9x11-k12x3x3-p1-bias-relu",  # padding inside the transform
    "n1-c3x23x27-k8x7x7-s4-p3",  # a run longer than every vector
    "n1-c4x13x17-k8x3x5-p1x2-d2x1",  # not square
    "n1-c2x15x17-k4x3x3-p2-d2",  # dilation: a window is no contiguous run any more
    "n1-c6x9x11-k12x3x3-p1-g2-bias-add-relu6",  # groups, and the whole epilogue
    "n1-c5x9x11-k5x3x3-s2-p1-g5",  # depthwise
    "n1-c6x7x9-k8x1x1-s2-NHWC-add",  # 1x1: no vector fits a window
    "n1-c8x5x5-k6x5x5-NHWC-bias",  # one output
    "n1-c2x6x9-k3x2x1",  # the shortest vector there is
)
ALONE = {
    "vectorized": Rung("", "", vector=True),
    "unrolled": Rung("", "", unroll=True),
    "parallel": Rung("", "", parallel=True),
    "windows": Rung("", "", reorder=True, windows=3),
    "channels": Rung("", "", reorder=True, channels=5),
    "scalar tile": Rung("", "", reorder=True, unroll=True, windows=4, channels=4, parallel=True),
    "vectors and channels": Rung("", "", reorder=True, vector=True, channels=4),
}
TINY = Layer("tiny", Conv2d(1, 3, 8, 8, 4, 3))


@functools.lru_cache(maxsize=8)
def built(conv: Conv2d, rung: Rung) -> Op:
    return ablation.build_rung(conv, rung)


def check(conv: Conv2d, rung: Rung) -> None:
    tensors = exact_tensors(conv)
    y = built(conv, rung)(tensors["data"], tensors["filter"], tensors.get("bias"), tensors.get("residual"))
    assert_equal(conv, y, oracle(conv, **tensors))


@pytest.mark.sampled
@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("key", PROBLEMS)
def test_every_rung_is_exact(key: str, name: str) -> None:
    check(Conv2d.parse(key), RUNGS[name])


@pytest.mark.sampled
@pytest.mark.parametrize("key", PROBLEMS[:2] + PROBLEMS[5:8])
@pytest.mark.parametrize("name", ALONE)
def test_every_move_alone_is_exact(key: str, name: str) -> None:
    check(Conv2d.parse(key), ALONE[name])


@pytest.mark.parametrize("machine_lanes", [4, 8, 16])
def test_vectors_never_exceed_the_machine_or_the_window(machine_lanes: int) -> None:
    machine = dataclasses.replace(Machine.host(), lanes=machine_lanes)
    for kernel in ((1, 1), (2, 1), (2, 2), (3, 3), (5, 5), (11, 11)):
        lanes = ladder.lanes(Conv2d(1, 1, 11, 11, 1, kernel), machine)
        run = math.prod(kernel)
        assert lanes <= min(machine_lanes, run) < 2 * lanes or lanes == machine_lanes


def test_each_rung_switches_on_one_move() -> None:
    """The rungs of the thesis differ from the one below in exactly one field, so a gain has one cause."""
    moves = [field.name for field in dataclasses.fields(Rung) if field.name not in ("title", "source")]
    thesis = [rung for rung in RUNGS.values() if not rung.production]
    assert list(RUNGS)[-1] == "production" and len(thesis) == len(RUNGS) - 1
    for below, above in itertools.pairwise(thesis):
        changed = [name for name in moves if getattr(below, name) != getattr(above, name)]
        assert len(changed) == 1, (below, above)


@pytest.mark.parametrize("name", [name for name, rung in RUNGS.items() if not rung.production])
def test_vectors_are_in_the_code_of_vector_rungs_and_of_no_other(name: str) -> None:
    """A row of 11 windows leaves a rest of 3, a window of 9 elements a rest of 1: a test left in the tile would undo its vectors."""
    conv, machine = Conv2d(1, 4, 13, 13, 8, 3), Machine.host()
    code = ablation.compile_rung(conv, RUNGS[name], machine).executable.mod.inspect_source("ll")
    products = re.findall(rf"(?:fmul|fma|fmuladd)[^\n]*<{ladder.lanes(conv, machine)} x float>", code)
    assert bool(products) == RUNGS[name].vector
    assert RUNGS[name].vector or " x float>" not in code


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"windows": 4}, r"`windows` \(=4\) above 1 needs `reorder`"),
        ({"reorder": True, "channels": 0}, r"`channels` \(=0\) must be at least 1"),
    ],
)
def test_a_rung_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rung("", "", **fields)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`layers` and `rungs`"):
        ablation.run([])
    with pytest.raises(ValueError, match=r"`rounds` \(=0\)"):
        ablation.run([TINY], rounds=0)


@pytest.mark.slow
def test_command_measures_and_draws(command: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "device" / "ladder.json", tmp_path / "device" / "ladder.png"
    words = ("--batch", 2, "--rungs", "plain,blocked,production", "--rounds", 3, "--json", file, "--plot", picture)
    done = command("ablation", str(TINY.conv), *words)
    assert done.status == 0, done.err
    assert "production" in done.out and picture.read_bytes().startswith(b"\x89PNG")
    result = Result.load(file)
    [row] = result.layers
    assert (result.suite, result.batch, row.failed, row.peers_failed) == (f"ladder-{TINY.conv}", 2, None, {})
    assert list(row.spread) == ["plain", "blocked", "production"] and all(spread.samples == 3 for spread in row.spread.values())
    assert row.ratio is None and row.best_peer is None and row.ours_ms == row.spread["production"].median
    assert "`production`" in fill("<!-- table:device/ladder -->\n<!-- /table -->", load_all(tmp_path))


def test_unknown_rung_is_one_line(command: Callable[..., Any]) -> None:
    done = command("ablation", str(TINY.conv), "--rungs", "plain,ladder")
    assert done.status == 2 and "`--rungs` (='plain,ladder')" in done.err and "cache_blocked" in done.err


class Slow:
    """A worker whose calls take a second each and cost nothing."""

    def __init__(self) -> None:
        self.samples = 0

    def sample(self, settle: float, calls: int) -> float:
        self.samples += calls
        return 1.0


@pytest.mark.parametrize(("seconds", "samples"), [(0.5, 1), (3.0, 3), (100.0, 15)])
def test_slow_rungs_get_fewer_samples(seconds: float, samples: int) -> None:
    worker = Slow()
    found = ablation._rounds({"plain": worker}, {"plain": 1.0}, 15, seconds, {})  # type: ignore[dict-item]
    assert found == {"plain": [1.0] * samples}
    assert worker.samples == (0 if seconds < 1 else samples)


def made(*times: dict[str, float], suite: str = "ladder-made") -> Result:
    """A result of one-flop-a-millisecond layers with these medians."""
    spreads = [{name: Spread(ms, ms, ms, 5) for name, ms in row.items()} for row in times]
    rows = [Row(f"layer{i}", "n1-c1x1x1-k1x1x1", spread=spread) for i, spread in enumerate(spreads)]
    return Result(suite, "float32", 1, "cpu", "A CPU", 2, {}, "", "2026-01-01", {"fma_gflops": 1.0, "copy_gbs": 1.0}, rows)


def test_gains_by_hand() -> None:
    first, second = {"plain": 8.0, "reordered": 4.0, "blocked": 1.0}, {"plain": 8.0, "reordered": 1.0, "blocked": 1.0}
    (name, step, total, least, most), (last, *_rest) = ladder_report.gains(made(first, second))
    assert (name, last) == ("reordered", "blocked")
    assert (step, total, least, most) == (pytest.approx(4.0), pytest.approx(4.0), pytest.approx(2.0), pytest.approx(8.0))


def test_a_layer_where_a_rung_failed_is_left_out_of_its_gain() -> None:
    gains = dict((name, step) for name, step, *_ in ladder_report.gains(made({"plain": 8.0, "blocked": 4.0}, {"plain": 8.0})))
    assert gains == {"blocked": pytest.approx(2.0)}


def test_a_ladder_has_a_table_of_its_own_and_is_in_no_summary() -> None:
    results = {"cpu/a": made({"plain": 2.0, "blocked": 1.0})}
    text = fill("<!-- table:cpu/a -->\n<!-- /table -->\n<!-- table:summary -->\n<!-- /table -->", results)
    assert text.count("| `blocked` |") == 1 and "ladder-made float32" not in text


def test_the_text_names_every_rung() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in RUNGS)
    assert json.dumps([rung.source for rung in RUNGS.values()]).count("thesis Alg.") == len(RUNGS) - 1
