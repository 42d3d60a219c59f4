"""The process that measures on a CPU: a kernel is checked before it is timed, and timed beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import SMALL

from im2win.numerics.reference import error
from im2win.numerics.tolerance import tolerance
from im2win.spec.conv2d import Conv2d
from im2win.tuner.runners.cpu import FEWEST, GUARD, Bench, Measurer, Outcome, RunJob, verify


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(SMALL.with_(residual=True), seed=3)


def _writes(bench: Bench, values: Any) -> Any:
    def kernel() -> None:
        bench.output[...] = values

    return kernel


def test_the_right_answer_passes(bench: Bench) -> None:
    message, error = verify(bench, _writes(bench, bench.expected))
    assert message == "" and error is not None and error <= 1e-7


def test_a_wrong_answer_fails(bench: Bench) -> None:
    wrong = bench.expected.copy()
    wrong[0, 0, 0, 0] += 10 * tolerance(bench.conv) * np.abs(bench.expected).max()
    assert "exceeds" in verify(bench, _writes(bench, wrong))[0]


def test_what_was_not_written_fails(bench: Bench) -> None:
    def lazy() -> None:
        bench.output[0, 1:] = bench.expected[0, 1:]

    assert "64 elements of 1024 are NaN" in verify(bench, lazy)[0]


@pytest.mark.parametrize("place", [GUARD - 1, -GUARD])
def test_writing_outside_fails(bench: Bench, place: int) -> None:
    def careless() -> None:
        bench.output[...] = bench.expected
        bench.guarded[place] = 0

    assert verify(bench, careless)[0] == "wrote outside its output"
    assert verify(bench, _writes(bench, bench.expected))[0] == "", "the guard is whole again"


def test_writing_into_an_input_fails(bench: Bench) -> None:
    def greedy() -> None:
        bench.output[...] = bench.expected
        bench.inputs["residual"][0, 0, 0, 0] += 1

    assert verify(bench, greedy)[0] == "wrote into its input residual"
    assert verify(bench, _writes(bench, bench.expected))[0] == ""


def test_the_next_process_of_a_session_finds_the_expected_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same problem and seed alone; a folder that cannot be written to costs time only."""
    conv = Conv2d(1, 4, 9, 9, 8, 3, layout="NHWC")
    first = Bench(conv, 0, tmp_path)
    assert Bench(conv, 0, tmp_path / "missing").expected.tobytes() == first.expected.tobytes()
    monkeypatch.setattr("im2win.tuner.runners.cpu.reference", None)
    assert Bench(conv, 0, tmp_path).expected.tobytes() == first.expected.tobytes()
    for other in ((conv, 1), (conv.with_(batch=2), 0)):
        with pytest.raises(TypeError):
            Bench(*other, tmp_path)


def test_errors_are_found_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("im2win.tuner.runners.cpu.BLOCK", 7)
    bench = Bench(Conv2d(1, 4, 9, 9, 8, 3), seed=0)
    for place in (0, 6, 7, bench.expected.size - 1):
        y = bench.expected.copy()
        y.reshape(-1)[place] += 0.5
        bench.output[...] = y
        assert bench.error() == pytest.approx(error(bench.output, bench.expected)) and bench.error() > 0.01
    bench.output.reshape(-1)[8] = np.nan
    assert np.isnan(bench.error())


def test_a_kernel_runs_before_its_sample_where_another_one_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be timed with the other one's tensors in the caches. The last one that is sampled is alone."""
    for name in ("COLD_S", "WARM_S", "SAMPLE_S", "SETTLE_S"):
        monkeypatch.setattr(f"im2win.tuner.runners.cpu.{name}", 0.0)
    ran: list[str] = []
    one, other = Outcome("ok"), Outcome("ok", samples_s=[0.0])
    job = RunJob(SMALL, (), 0, samples=2, seconds=0.0)
    Measurer()._time(job, [(lambda: ran.append("a"), one), (lambda: ran.append("b"), other)])  # type: ignore[list-item]
    assert "".join(ran) == "aabb" + "aabb" + "a" and len(one.samples_s) == len(other.samples_s) == 2


@pytest.mark.parametrize(("drop_above", "sampled"), [(1.5, FEWEST), (3.0, 6)])
def test_one_that_is_far_behind_is_dropped(drop_above: float, sampled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLD_S", "WARM_S", "SETTLE_S"):
        monkeypatch.setattr(f"im2win.tuner.runners.cpu.{name}", 0.0)
    monkeypatch.setattr("im2win.tuner.runners.cpu._sample", lambda kernel, calls: kernel())
    fast, slow = Outcome("ok"), Outcome("ok")
    job = RunJob(SMALL, (), 0, samples=6, seconds=0.0, drop_above=drop_above)
    Measurer()._time(job, [(lambda: 1e-3, fast), (lambda: 2e-3, slow)])  # type: ignore[list-item]
    assert fast.samples_s == [1e-3] * 6 and slow.samples_s == [2e-3] * sampled
