"""The tuner: proposals, the cost model, worker isolation, sessions, and what survives a killed run."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paths import SUPPORT
from sessions import SMALL, names, took

import im2win
from im2win.common.locking import LogError
from im2win.common.torch_import import BEGIN
from im2win.common.worker_pool import Worker, WorkerError
from im2win.device.cpu import Machine
from im2win.numerics.tolerance import tolerance
from im2win.records.judge import rivals_now
from im2win.records.log import Log
from im2win.records.lookup import stale
from im2win.registry.interface import Kernel
from im2win.registry.ranking import default_tile, ranked_tiles
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.tuner.cost_model import LEAST, Choice, CostModel
from im2win.tuner.proposer import BATCH, Search
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import Progress, Session
from im2win.tuner.tuning import _batches

SMALL_KEY = str(SMALL)


def _search(machine: Machine, seed: int = 0) -> Search:
    able = {name: row for name, row in SCHEDULES.items() if row.supports(SMALL) is None}
    ranked = {name: [Choice(name, t, c) for c, t in ranked_tiles(SMALL, row, machine)] for name, row in able.items()}
    return Search(SMALL, machine, ranked, seed, CostModel())


def _pretend(choice: Choice) -> float:
    """A made-up time: what a slower machine with few registers would say."""
    return choice.cycles * 1e-9 * (1 + 0.1 * max(choice.tile.accumulators - 8, 0))


def _sequence(search: Search, trials: int) -> list[Choice]:
    tried: list[tuple[Choice, float]] = []
    while len(tried) < trials:
        tried += [(choice, _pretend(choice)) for choice in search.propose(tried, min(BATCH, trials - len(tried)))]
    return [choice for choice, _ in tried]


# --- proposals ---------------------------------------------------------------------------------------------------


def test_the_first_trial_is_the_default_tile(machine: Machine) -> None:
    first = _search(machine).propose([], BATCH)[0]
    assert (first.algorithm, first.tile) == default_tile(SMALL, machine=machine)


def test_a_seed_gives_the_same_sequence_and_nothing_twice(machine: Machine) -> None:
    one, two = _sequence(_search(machine), 40), _sequence(_search(machine), 40)
    assert one == two
    assert len({choice.key for choice in one}) == 40
    assert _sequence(_search(machine, seed=1), 40) != one


def test_every_algorithm_gets_a_trial(machine: Machine) -> None:
    able = {name for name, row in SCHEDULES.items() if row.supports(SMALL) is None}
    assert {choice.algorithm for choice in _sequence(_search(machine), 16)} == able


def test_a_used_up_space_ends_the_proposals(machine: Machine) -> None:
    search = _search(machine)
    everything = [(choice, 1e-3) for choice in search.all]
    assert search.propose(everything, BATCH) == []
    assert len(search.propose(everything[:-3], BATCH)) == 3


def test_failed_candidates_are_not_proposed_again(machine: Machine) -> None:
    search = _search(machine)
    failed = [(choice, math.inf) for choice in search.propose([], BATCH)]
    assert not {c.key for c, _ in failed} & {c.key for c in search.propose(failed, BATCH)}


# --- the cost model ----------------------------------------------------------------------------------------------


def test_the_cost_model_is_silent_until_it_has_seen_enough() -> None:
    few = np.ones((LEAST - 1, 3))
    assert not CostModel().rank(few, np.ones(LEAST - 1), np.ones((5, 3)), 0).any()


def test_the_cost_model_orders_what_it_has_not_seen() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((64, 6))
    truth = x[:, 0] - 2 * x[:, 3]
    predicted = CostModel().rank(x[:24], truth[:24], x[24:], 0)
    assert np.corrcoef(predicted, truth[24:])[0, 1] > 0.7


def test_other_layers_teach_it_before_this_one_does() -> None:
    rng = np.random.default_rng(1)
    x = rng.random((300, 6))
    truth = x[:, 1] ** 2
    seen = slice(0, LEAST)
    alone = CostModel().rank(x[seen], truth[seen], x[200:], 0)
    taught = CostModel((x[50:200], truth[50:200])).rank(x[seen], truth[seen], x[200:], 0)
    assert np.corrcoef(taught, truth[200:])[0, 1] > np.corrcoef(alone, truth[200:])[0, 1]


# --- isolation ---------------------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Any:
    with Worker("worker_jobs", {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}) as worker:
        yield worker


def test_a_worker_keeps_its_process_and_survives_noise(worker: Worker) -> None:
    (first, pid), (second, same) = worker.call("a", 30), worker.call("b", 30)
    assert (first, second) == ("did a", "did b") and pid == same


@pytest.mark.fault("candidates", "a candidate crashes")
def test_a_crash_is_an_outcome_and_the_next_job_runs(worker: Worker) -> None:
    _, pid = worker.call("a", 30)
    with pytest.raises(WorkerError, match="signal SIGSEGV") as caught:
        worker.call("crash", 30)
    assert caught.value.kind == "crashed"
    assert worker.call("b", 30)[1] != pid


def test_an_exception_ends_the_process_with_its_message(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="a job that fails"):
        worker.call("raise", 30)


@pytest.mark.fault("candidates", "a candidate hangs")
def test_a_hanging_job_is_killed_in_time(worker: Worker) -> None:
    worker.call("a", 30)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="no result within 1 s") as caught:
        worker.call("hang", 1.0)
    assert caught.value.kind == "timeout" and time.monotonic() - start < 5



# --- sessions ----------------------------------------------------------------------------------------------------


def test_a_session_records_every_trial_and_resumes(tmp_path: Path, machine: Machine) -> None:
    seen: list[Progress] = []
    record = im2win.tune(SMALL, trials=10, logs=tmp_path, progress=seen.append)
    assert record.outcome == "ok" and record.samples_s and record.error is not None and record.error <= tolerance(SMALL)
    measured = [p for p in seen if p.phase == "measuring"]
    assert [p.trial for p in measured] == list(range(1, 11)) and measured[0].default_s is not None
    phases = [p.phase for p in seen]
    assert phases[0].startswith("ranking 0 of ") and phases[-1] == "measuring the best again"
    assert phases.index("building 1 of 8") < phases.index("building 8 of 8") < phases.index("measuring")
    records = Log(tmp_path).read(SMALL, machine.name)
    assert {r.trial for r in records} == set(range(10)) and not any(stale(r) for r in records)
    again: list[Progress] = []
    im2win.tune(SMALL, trials=13, logs=tmp_path, progress=again.append)
    assert [p.trial for p in again if p.phase == "measuring"] == [11, 12, 13]
    tiles = [(r.method, json.dumps(r.tile)) for r in Log(tmp_path).read(SMALL, machine.name)]
    assert len(set(tiles)) == 13
    op = im2win.build(SMALL, logs=tmp_path)
    assert op.tuned


def test_what_was_best_before_the_code_changed_is_tried_first(tmp_path: Path, machine: Machine) -> None:
    """Records whose code has changed count for nothing but this; those that are not legal any more for nothing at all."""
    candidates = [Choice("direct/tiled", tile, cost) for cost, tile in ranked_tiles(SMALL, schedule_of("direct/tiled"), machine)]
    made, log = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path / "made"), 10, 0), Log(tmp_path / "log")
    for place, seconds in ((40, 2e-3), (50, 1e-3), (60, 3e-3)):
        record = made.record(candidates[place], Outcome("ok", samples_s=[seconds], error=0.0), Kernel(0, "0" * 16))
        log.append(replace(record, generator="0" * 16))
    log.append(replace(record, generator="0" * 16, tile={**record.tile, "cols": 1000}, samples_s=(1e-9,)))
    session = Session(SMALL, ["direct/tiled"], machine, log, 10, 0)
    assert session.tried == []
    assert [choice.tile for choice in session.next_batch()[1:4]] == [candidates[place].tile for place in (50, 40, 60)]


def test_what_was_faster_before_the_code_changed_is_tried_whatever_the_log_holds(tmp_path: Path, machine: Machine) -> None:
    """The log holds as many valid trials as are asked for, and older ones of other kernels: the faster of these are tried."""
    candidates = [Choice("direct/tiled", tile, cost) for cost, tile in ranked_tiles(SMALL, schedule_of("direct/tiled"), machine)]
    made, log = Session(SMALL, names(), machine, Log(tmp_path / "made"), 3, 0), Log(tmp_path / "log")
    session = Session(SMALL, names(), machine, log, 3, 0)
    for choice in (session.default, candidates[20], candidates[30]):
        took(session, choice, 2e-3)
    for place, seconds in ((40, 3e-3), (50, 1.5e-3), (60, 1e-3)):
        record = made.record(candidates[place], Outcome("ok", samples_s=[seconds], error=0.0), Kernel(0, "0" * 16))
        log.append(replace(record, generator="0" * 16))
    session = Session(SMALL, names(), machine, log, 3, 0)
    assert [choice.tile for choice in session.next_batch()] == [candidates[place].tile for place in (60, 50)]
    took(session, candidates[60], 1.2e-3)
    assert session.next_batch() == []  # what was slower than that before is not worth a trial


def test_shipped_records_of_other_devices_are_hints(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up takes none that has not met the default; the tuner tries the best two of each device, right after it."""
    candidates = [Choice("direct/tiled", tile, cost) for cost, tile in ranked_tiles(SMALL, schedule_of("direct/tiled"), machine)]
    made, shipped = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path / "made"), 10, 0), Log(tmp_path / "shipped")
    for place, seconds in ((40, 2e-3), (50, 1e-3), (60, 3e-3)):
        record = made.record(candidates[place], Outcome("ok", samples_s=[seconds], error=0.0), Kernel(0, "0" * 16))
        shipped.append(replace(record, device="intel-xeon-other-2t"))
        shipped.append(replace(record, device="intel-xeon-fewer-1t", threads=machine.threads + 1))
    monkeypatch.setattr("im2win.tuner.session.SHIPPED", shipped)
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path / "log"), 10, 0)
    batch = session.next_batch()
    assert batch[0] == session.default and [choice.tile for choice in batch[1:3]] == [candidates[place].tile for place in (50, 40)]
    assert candidates[60].tile not in [choice.tile for choice in batch[:4]]


def test_the_default_is_measured_whatever_the_log_holds(tmp_path: Path, machine: Machine) -> None:
    """Records of before a new algorithm, and more of them than trials: only the default is left to try. Then it vouches for the rest."""
    before = Session(SMALL, names(), machine, Log(tmp_path), 3, 0)
    others = [choice for choice in before.search.all if choice.key != before.default.key][:5]
    assert {took(before, choice, 1e-3) for choice in others} == {""}
    session = Session(SMALL, names(), machine, Log(tmp_path), 3, 0)
    assert (session.default.algorithm, session.default.tile) == default_tile(SMALL, machine=machine)
    assert session.next_batch() == [session.default]
    assert took(session, session.default, 2e-3) == rivals_now("cpu", "float32", default=True)
    assert session.next_batch() == [] and Session(SMALL, names(), machine, Log(tmp_path), 3, 0).next_batch() == []
    more = Session(SMALL, names(), machine, Log(tmp_path), 7, 0)
    [last] = more.next_batch()
    assert took(more, last, 3e-3) == rivals_now("cpu", "float32")


def test_candidates_that_are_not_measured_yet_are_not_proposed_again(tmp_path: Path, machine: Machine) -> None:
    """They count as trials, and the default tile among them as one that is tried."""
    session = Session(SMALL, names(), machine, Log(tmp_path), 20, 0)
    first = session.next_batch()
    second = session.next_batch(first)
    third = session.next_batch([*first, *second])
    keys = [choice.key for choice in (*first, *second, *third)]
    assert len(keys) == len(set(keys)) == 20 and session.default.key == keys[0]
    assert session.next_batch([*first, *second, *third]) == []


@pytest.mark.parametrize("ahead", [0, 1, 12])
def test_batches_are_built_while_those_before_are_measured(tmp_path: Path, machine: Machine, ahead: int) -> None:
    """As many candidates as there are builders, where that disturbs no times; the session ends after the same number of trials."""
    session = Session(SMALL, names(), machine, Log(tmp_path), 40, 0, patience=None)
    begun: list[Choice] = []
    measurement: Any = SimpleNamespace(ahead=ahead, start=begun.extend)
    for batch in _batches(session, measurement, None):
        place = len(session.tried)
        assert begun[place : place + len(batch)] == batch
        assert len(begun) - place - len(batch) >= min(ahead, 40 - place - len(batch)) and (ahead or begun[place:] == batch)
        for choice in batch:
            took(session, choice, 1e-3)
    assert len(session.tried) == len(begun) == 40


def test_a_session_that_gains_nothing_drops_what_is_built(tmp_path: Path, machine: Machine) -> None:
    session = Session(SMALL, names(), machine, Log(tmp_path), 60, 0, patience=8)
    begun: list[Choice] = []
    measurement: Any = SimpleNamespace(ahead=16, start=begun.extend)
    for batch in _batches(session, measurement, None):
        for choice in batch:
            took(session, choice, 1e-3)
    assert len(session.tried) == 16 < len(begun)


def test_an_algorithm_that_is_asked_for_meets_the_default_of_all(tmp_path: Path, machine: Machine) -> None:
    ranking = {name: ranked_tiles(SMALL, schedule_of(name), machine) for name in names()}
    [asked] = [name for name in names() if name != default_tile(SMALL, machine=machine)[0]][:1]
    session = Session(SMALL, [asked], machine, Log(tmp_path), 2, 0, ranking=ranking)
    batch = session.next_batch()
    assert [choice.algorithm == asked for choice in batch] == [False, True, True] and batch[0] == session.default
    vouched = {took(session, choice, seconds) for choice, seconds in zip(batch, (1e-3, 2e-3, 3e-3), strict=True)}
    assert vouched == {rivals_now("cpu", "float32", default=default) for default in (True, False)}
    assert session.best == (batch[1], session.tried[1][1]) and session.next_batch() == []
    again = Session(SMALL, [asked], machine, Log(tmp_path), 2, 0, ranking=ranking)
    assert again.tried == session.tried and again.best == session.best
    assert Session(SMALL, [asked], machine, Log(tmp_path / "other"), 2, 0).rivals == "", "not all were ranked"



SCRIPT = f"{BEGIN}import sys, im2win; im2win.tune(sys.argv[1], trials=int(sys.argv[2]), logs=sys.argv[3], seed=int(sys.argv[4]))"


def _start(folder: Path, trials: int, seed: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, SMALL_KEY, str(trials), str(folder), str(seed)])


@pytest.mark.fault("processes", "the tuner is killed in mid-run")
@pytest.mark.slow
def test_kill_9_loses_no_record_and_the_next_run_goes_on(tmp_path: Path, machine: Machine) -> None:
    rng = np.random.default_rng(5)
    before = 0
    for _ in range(2):
        process = _start(tmp_path, 60)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(Log(tmp_path).read(SMALL, machine.name)) <= before:
            time.sleep(0.05)
        time.sleep(float(rng.random()))
        process.send_signal(signal.SIGKILL)
        process.wait()
        log = Log(tmp_path)
        records = log.read(SMALL, machine.name)
        assert len(records) > before and not log.problems
        before = len(records)
    tried = {(r.method, json.dumps(r.tile), r.trial) for r in records}  # what was disturbed is measured again, as the same trial
    assert len({(method, tile) for method, tile, _ in tried}) == len(tried), "no trial was repeated"


@pytest.mark.fault("records", "two tuners on one log")
@pytest.mark.slow
def test_two_tuners_share_a_log(tmp_path: Path, machine: Machine) -> None:
    pair = [_start(tmp_path, 9, seed) for seed in (0, 1)]
    assert [process.wait(timeout=120) for process in pair] == [0, 0]
    log = Log(tmp_path)
    assert len(log.read(SMALL, machine.name)) >= 18 and not log.problems


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, r"`trials` \(=0\) must be an integer of at least 1"),
        ({"trials": 2.5}, r"`trials` \(=2.5\) must be an integer"),
        ({"seed": -1}, r"`seed` \(=-1\) must be an integer of at least 0"),
        ({"threads": 0}, r"`threads` \(=0\) must be an integer from 1"),
        ({"threads": 10_000}, r"`threads` \(=10000\) must be an integer from 1 to the CPUs this process may use"),
        ({"algorithm": "fft"}, r"`algorithm` \(='fft'\) must be auto, one of direct"),
        ({"target": "tpu"}, r"`target` \(='tpu'\) must be one of cpu"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        im2win.tune(SMALL, logs=tmp_path, **changes)
    assert not any(tmp_path.iterdir())


@pytest.mark.fault("disks and folders", "the log is a file")
def test_a_log_that_is_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "logs"
    path.write_text("")
    with pytest.raises(LogError, match="is a file"):
        im2win.tune(SMALL, trials=1, logs=path)
