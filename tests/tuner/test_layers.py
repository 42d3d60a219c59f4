"""Tuning of many layers in one run: each problem once, failures beside results, one progress, several measurement slots."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from recorded import ok

import im2win
from im2win.common.locking import LogError
from im2win.common.progress import Reporter
from im2win.device.cpu import Machine
from im2win.records.log import Log
from im2win.records.record import Record
from im2win.registry.cpu_backend import CpuBackend
from im2win.spec.conv2d import Conv2d
from im2win.tuner import layers
from im2win.tuner.layers import tune_layers
from im2win.tuner.session import Progress
from im2win.tuner.tuning import TuneError

ONE, TWO, THREE = (Conv2d(1, channels, 10, 10, 16, 3) for channels in (4, 8, 16))


class _Noted(Reporter):
    """Keeps every state that was shown."""

    def __init__(self) -> None:
        super().__init__("tuning")
        self.shown: list[tuple[int, int | None, str]] = []

    def _show(self) -> None:
        self.shown.append((self.done, self.total, self.note))


def _state(conv: Conv2d, trial: int, **changes: Any) -> Progress:
    fields: dict[str, Any] = {"algorithm": "", "trials": 8, "best_s": None, "default_s": None, "elapsed_s": 1.0, "seconds_left": None}
    return Progress(conv=conv, trial=trial, **(fields | changes))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Conv2d, dict[str, Any]]]:
    """The calls of `tune`, which measures nothing here: it reports two trials, and what TWO raises is set by a test."""
    seen: list[tuple[Conv2d, dict[str, Any]]] = []

    def tune(conv: Conv2d, target: str, *, progress: Any, **settings: Any) -> Record:
        seen.append((conv, settings))
        progress(_state(conv, 0, phase="ranking 0 of 7 algorithms"))
        for trial in (1, 2):
            progress(_state(conv, trial, phase="measuring", algorithm="im2win/stored", best_s=1e-3, default_s=1.5e-3))
        return ok(conv=conv)

    monkeypatch.setattr(layers, "tune", tune)
    return seen


def test_equal_problems_are_tuned_once_with_one_pool_and_a_line_each(calls: Any, tmp_path: Path) -> None:
    told: list[Conv2d] = []
    results = tune_layers([TWO, ONE, Conv2d.parse(str(TWO))], trials=8, logs=tmp_path / "logs", finished=lambda conv, _: told.append(conv))
    assert list(results) == told == [conv for conv, _ in calls] == [TWO, ONE]
    assert results == {TWO: ok(conv=TWO), ONE: ok(conv=ONE)}
    assert len({id(settings["pool"]) for _, settings in calls}) == 1 and calls[0][1]["logs"] == tmp_path / "logs"


def test_one_progress_counts_the_trials_of_all(calls: Any) -> None:
    reporter = _Noted()
    tune_layers([ONE, TWO], trials=8, reporter=reporter, names={TWO: "conv2"})
    assert reporter.shown[0] == (0, 16, "starting"), "before any process starts"
    assert {total for _, total, _ in reporter.shown} == {16}
    done = [done for done, _, _ in reporter.shown]
    assert done == sorted(done) and done[-1] == 16 and done.count(8) >= 2, "a session that ends early counts in full"
    notes = [note for _, _, note in reporter.shown]
    assert f"{ONE} (1 of 2): ranking 0 of 7 algorithms" in notes
    last = "conv2 (2 of 2): measuring im2win / stored, best 1.000 ms, 1.50x default, at most "
    assert any(note.startswith(last) and note.endswith(" left") for note in notes)


def test_more_trials_in_the_log_than_asked_for_are_not_more_than_all(calls: Any) -> None:
    reporter = _Noted()
    tune_layers([ONE, TWO], trials=1, reporter=reporter)
    assert [done for done, _, _ in reporter.shown if done is not None and done > 2] == [] and reporter.shown[-1][:2] == (2, 2)


def test_a_layer_that_cannot_be_tuned_gives_its_exception_and_the_rest_goes_on(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = layers.tune
    failures = {ONE: ValueError("no tile is legal"), TWO: TuneError("found no right kernel")}

    def failing(conv: Conv2d, *arguments: Any, **settings: Any) -> Record:
        if conv in failures:
            raise failures[conv]
        return tune(conv, *arguments, **settings)

    monkeypatch.setattr(layers, "tune", failing)
    assert tune_layers([ONE, TWO, THREE], trials=8) == {**failures, THREE: ok(conv=THREE)}


@pytest.mark.parametrize("failure", [LogError("the disk is full"), KeyboardInterrupt()])
def test_what_concerns_all_ends_the_run(failure: BaseException, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(conv: Conv2d, *arguments: Any, **settings: Any) -> Record:
        calls.append((conv, settings))
        raise failure

    monkeypatch.setattr(layers, "tune", failing)
    with pytest.raises(type(failure)):
        tune_layers([ONE, TWO], trials=8)
    assert len(calls) == 1


def test_several_slots_tune_a_layer_each_at_the_same_time(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "measurement_slots", lambda self: [{"TVM_NUM_THREADS": "1"}] * 2)
    tune, both = layers.tune, threading.Barrier(2, timeout=10)

    def together(conv: Conv2d, *arguments: Any, **settings: Any) -> Record:
        both.wait()
        return tune(conv, *arguments, **settings)

    monkeypatch.setattr(layers, "tune", together)
    reporter = _Noted()
    assert list(tune_layers([ONE, TWO], trials=8, reporter=reporter)) == [ONE, TWO]
    assert len({id(settings["pool"]) for _, settings in calls}) == 2 and reporter.shown[-1][:2] == (16, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, r"`trials` \(=0\) must be an integer of at least 1"),
        ({"seed": -1}, r"`seed` \(=-1\) must be an integer of at least 0"),
        ({"threads": 0}, r"`threads` \(=0\) must be an integer from 1"),
        ({"target": "tpu"}, r"`target` \(='tpu'\) must be one of cpu"),
        ({"accuracy": "none"}, r"`accuracy` \(='none'\) must be"),
    ],
)
def test_bad_arguments_are_errors_not_results(changes: dict[str, Any], message: str, calls: Any) -> None:
    with pytest.raises(ValueError, match=message):
        tune_layers([ONE], **({"trials": 8} | changes))
    assert not calls


def test_no_layer_is_no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IM2WIN_LOGS", str(tmp_path / "mine"))
    assert tune_layers([], trials=8) == {} and not (tmp_path / "mine").exists()


def test_what_was_tuned_is_found_without_being_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real thing: two layers, one of which no algorithm computes, into the user's folder."""
    monkeypatch.setenv("IM2WIN_LOGS", str(tmp_path / "mine"))
    none = TWO.with_(dtype="int8", activation="silu")
    assert not im2win.build(TWO, algorithm="direct").tuned
    results = tune_layers([TWO, none], trials=2, algorithm="direct")
    assert isinstance(results[none], ValueError) and "no algorithm computes" in str(results[none])
    assert isinstance(results[TWO], Record) and results[TWO] in Log(tmp_path / "mine").read(TWO, Machine.host().name)
    assert im2win.build(TWO, algorithm="direct").tuned

    def started(*_: Any) -> Any:
        raise AssertionError("worker processes are started")

    monkeypatch.setattr(layers, "pools", started)
    reporter, told = _Noted(), []
    again = tune_layers([TWO], trials=2, algorithm="direct", reporter=reporter, finished=lambda conv, record: told.append(record))
    assert again[TWO] == results[TWO] == told[0] and reporter.shown[-1][:2] == (2, 2), "nothing is left to do"
    # two trials, and the default of all algorithms where that is another one
    for more in ({"trials": 4}, {"trials": 2, "algorithm": "auto", "accuracy": "exact", "logs": tmp_path / "other"}):
        with pytest.raises(AssertionError, match="worker processes"):
            tune_layers([TWO], **more)  # type: ignore[arg-type]
