"""Finals: the best candidates and the default tile, measured again in interleaved rounds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sessions import SMALL, names, took

from im2win.common.worker_pool import WorkerError
from im2win.device.cpu import Machine
from im2win.records.log import Log, best_first
from im2win.records.lookup import superseded
from im2win.registry.interface import Kernel
from im2win.tuner.cost_model import Choice
from im2win.tuner.measurement import Measurement
from im2win.tuner.runners.cpu import Outcome, RunJob
from im2win.tuner.session import Session
from im2win.tuner.tuning import FINALS, REMATCHES, _finals, _rematches


@pytest.fixture(scope="module")
def machine() -> Machine:
    """No kernel runs here, and candidates must have the same order on every CPU."""
    return Machine("Some CPU", "znver4", "avx512f", 2, 16, 32, 32 << 10, 1 << 20, 32 << 20)


class _Finals:
    """A measurement whose finals take the times that it is given."""

    def __init__(self, times: dict[Any, float]) -> None:
        self.times, self.libraries, self.kernels = times, dict.fromkeys(times), dict.fromkeys(times)
        self.rounds: list[list[Choice]] = []

    def each_built(self, choices: list[Choice]) -> list[Any]:
        assert not choices
        return []

    def run_finals(self, choices: list[Choice], **how: Any) -> list[Outcome]:
        self.rounds.append(choices)
        return [Outcome("ok", samples_s=[self.times[choice.key]], error=0.0) for choice in choices]


def _held(tmp_path: Path, machine: Machine, searched: list[float], final: list[float]) -> tuple[Session, _Finals]:
    """A session whose candidates, the default first, took these times in the search and in the finals."""
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    choices = session.search.all[: len(searched)]
    assert choices[0] == session.default
    for choice, seconds in zip(choices, searched, strict=True):
        took(session, choice, seconds)
    measured = _Finals({choice.key: seconds for choice, seconds in zip(choices, final, strict=True)})
    _finals(session, measured)  # type: ignore[arg-type]
    return session, measured


def test_the_default_is_in_the_finals_however_slow_it_was(tmp_path: Path, machine: Machine) -> None:
    session, measured = _held(tmp_path, machine, [9e-3, *[1e-3] * 4, 8e-3], [1e-3, *[2e-3] * 4, 8e-3])
    assert len(measured.rounds) == 1 and session.default in measured.rounds[0]
    assert session.best is not None and session.best[0] == session.default


@pytest.mark.fault("candidates", "a candidate was timed in a quiet moment")
def test_a_quiet_moment_of_the_search_wins_no_finals(tmp_path: Path, machine: Machine) -> None:
    """Finalists timed in a busy moment: who was not among them, and is now the best, meets them in another round."""
    session, measured = _held(tmp_path, machine, [9e-3, *[1e-3] * 4, 1.2e-3], [9e-3, *[2e-3] * 4, 2.5e-3])
    first, second = measured.rounds
    lucky = session.search.all[5]
    assert lucky not in first and lucky in second and session.default in second
    assert len(second) == 3, "and the best of the first, but none of the others that were in it"
    assert session.best is not None and session.best[0] != lucky


@pytest.mark.fault("candidates", "a candidate was timed in a busy moment")
def test_a_busy_moment_of_the_search_loses_no_finals(tmp_path: Path, machine: Machine) -> None:
    """Of candidates that were timed as slow, the two from which the model expects most are measured again."""
    session, measured = _held(tmp_path, machine, [9e-3, *[7e-3] * 3, *[1e-3] * 4], [9e-3, 7e-3, 5e-4, 7e-3, *[1e-3] * 4])
    unlucky = session.search.all[2]
    assert [choice in measured.rounds[0] for choice in session.search.all[1:4]] == [True, True, False]
    assert session.best is not None and session.best[0] == unlucky


def test_finals_end(tmp_path: Path, machine: Machine) -> None:
    """Each round as slow as the next one's finalists are not."""
    _, measured = _held(tmp_path, machine, [1e-3] * 20, [2e-3] * 20)
    assert len(measured.rounds) == FINALS


@pytest.mark.parametrize(("second", "joined"), [
    (Outcome("ok", error=2e-7, samples_s=[3e-3] * 8), Outcome("ok", error=2e-7, samples_s=[1e-3] * 8 + [3e-3] * 8)),
    (Outcome("wrong", "9 elements are NaN"), Outcome("wrong", "9 elements are NaN")),
])  # fmt: skip
def test_half_of_the_finals_is_of_a_new_process(second: Outcome, joined: Outcome, tmp_path: Path, machine: Machine) -> None:
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    answers, did = [Outcome("ok", error=1e-7, samples_s=[1e-3] * 8), second], list[Any]()

    def call(job: RunJob, limit: float) -> list[Outcome]:
        did.append(job.samples)
        return [answers.pop(0)]

    runner = SimpleNamespace(call=call, close=lambda: did.append("closed"))
    measurement = Measurement(session, SimpleNamespace(builders=[], runner=runner, fleet=None))  # type: ignore[arg-type]
    measurement.libraries[session.default.key] = tmp_path / "1.so"
    assert measurement.run_finals([session.default], samples=16, seconds=0.3) == [joined]
    assert did == [8, "closed", 8]
    measurement.close()


def test_what_the_first_process_drops_is_not_in_the_second(tmp_path: Path, machine: Machine) -> None:
    session = Session(SMALL, names(), machine, Log(tmp_path), 3, 0)
    fast, slow = session.search.all[:2]
    asked: list[int] = []

    def call(job: RunJob, limit: float) -> list[Outcome]:
        asked.append(len(job.candidates))
        return [Outcome("ok", samples_s=[1e-3] * 2, error=0.0), Outcome("ok", samples_s=[2e-3], error=0.0)][: len(job.candidates)]

    runner = SimpleNamespace(call=call, close=lambda: None)
    measurement = Measurement(session, SimpleNamespace(builders=[], runner=runner, fleet=None))  # type: ignore[arg-type]
    measurement.libraries = {choice.key: tmp_path / f"{place}.so" for place, choice in enumerate((fast, slow))}
    assert [one.samples_s for one in measurement.run_finals([fast, slow], samples=4, seconds=0.1)] == [[1e-3] * 4, [2e-3]]
    assert asked == [2, 1]
    measurement.close()


@pytest.mark.fault("candidates", "a finalist crashes")
def test_a_process_that_dies_among_finalists_blames_the_one_alone(tmp_path: Path, machine: Machine) -> None:
    """The others keep their times."""
    session = Session(SMALL, names(), machine, Log(tmp_path), 3, 0)
    good, bad, other = session.search.all[:3]
    guilty: list[Path] = []

    def call(job: RunJob, limit: float) -> list[Outcome]:
        if guilty[0] in [one.path for one in job.candidates]:
            raise WorkerError("crashed", "the process ended with signal SIGSEGV")
        return [Outcome("ok", samples_s=[1e-3] * job.samples, error=0.0) for _ in job.candidates]

    runner = SimpleNamespace(call=call, close=lambda: None)
    measurement = Measurement(session, SimpleNamespace(builders=[], runner=runner, fleet=None))  # type: ignore[arg-type]
    measurement.libraries = {choice.key: tmp_path / f"{place}.so" for place, choice in enumerate((good, bad, other))}
    guilty.append(measurement.libraries[bad.key])
    outcomes = measurement.run_finals([good, bad, other], samples=4, seconds=0.1)
    assert [one.outcome for one in outcomes] == ["ok", "crashed", "ok"] and len(outcomes[0].samples_s) == 4
    measurement.close()


# --- against the record that was the best before ---------------------------------------------------------------------


def _met(
    tmp_path: Path, machine: Machine, found: list[float], rounds: list[tuple[float, ...]], *, shipped: bool = False, wrong: str = "",
) -> tuple[Session, list[list[Choice]]]:
    """A session whose new candidates took `found` ms in the finals, and the holder 1 ms; then rematches.

    Args:
        rounds: times in ms of challenger and holder in each new process.
        shipped: whether the holder's record is of another log, and not tried in this session.
        wrong: "holder" or "challenger", if that one turns out to be wrong.
    """
    first = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    holder, *others = first.search.all[: 1 + len(found)]
    if not shipped:
        took(first, holder, 1e-3)
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    assert session.holder == (None if shipped else holder)
    session.holder = holder
    for other, ms in zip(others, found, strict=True):
        took(session, other, ms * 1e-3)
    ran: list[list[Choice]] = []

    def run_anew(choices: list[Choice], **how: Any) -> list[Outcome]:
        times = rounds[len(ran)]
        ran.append(choices)
        outcomes = [Outcome("ok", samples_s=[ms * 1e-3] * 3, error=0.0) for ms in times]
        if wrong:
            outcomes[("challenger", "holder").index(wrong)] = Outcome("wrong", "9 elements are NaN")
        return outcomes

    kernels: Any = {choice.key: Kernel(0, "0" * 16) for choice in (holder, *others)}
    measurement: Any = SimpleNamespace(libraries=kernels, kernels=kernels, each_built=lambda choices: [], run_anew=run_anew)
    _rematches(session, measurement)
    assert all(pair[1] == holder for pair in ran), "every time beside the holder"
    return session, ran


def _says_the_same(session: Session, tmp_path: Path, machine: Machine) -> bool:
    """Whether the next session, and a look-up, find the best of this one."""
    again = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    records = again.log.read(SMALL, machine.name)
    used = next(one for one in best_first(records) if not superseded(one, records))
    assert session.best is not None and again.best is not None
    return again.best[0] == session.best[0] and used.tile == session.best[0].tile.as_dict()


@pytest.mark.fault("candidates", "a candidate is faster than a record by luck")
@pytest.mark.parametrize(("rounds", "wins"), [
    ([(0.5, 1.0)], True), ([(1.0, 1.05)] * REMATCHES, True), ([(1.0, 1.05), (1.0, 0.99)], False), ([(1.02, 1.0)], False),
    ([(1.0, 1.02), (1.03, 1.05)], False), ([(1.0, 1.05), (1.0, 1.05), (1.04, 1.3)], True),
    ([(1.0, 1.05), (1.0, 1.05), (1.0, 1.05), (1.0, 1.0)], False),
], ids=["clear", "wins beyond the spread", "loses the second", "loses the first", "wins both, within the spread", "clear later", "a tie"],
)  # fmt: skip
def test_a_record_is_replaced_by_what_wins_beyond_the_spread_of_processes(
    rounds: list[tuple[float, ...]], wins: bool, tmp_path: Path, machine: Machine
) -> None:
    session, ran = _met(tmp_path, machine, [0.97], rounds)
    assert len(ran) == len(rounds) and session.best is not None
    assert (session.best[0] != session.holder) is wins
    assert _says_the_same(session, tmp_path, machine)


@pytest.mark.fault("records", "a record's time is of a busy day")
def test_a_lead_over_an_old_record_alone_is_none(tmp_path: Path, machine: Machine) -> None:
    """Twice as fast as what was recorded on a busy day, and no faster side by side."""
    session, ran = _met(tmp_path, machine, [0.5], [(0.51, 0.5)])
    assert len(ran) == 1 and session.best is not None and session.best[0] == session.holder
    assert _says_the_same(session, tmp_path, machine)


def test_what_is_slower_meets_nobody(tmp_path: Path, machine: Machine) -> None:
    session, ran = _met(tmp_path, machine, [1.2], [])
    assert not ran and session.best is not None and session.best[0] == session.holder


def test_another_candidate_replaces_nothing_without_meeting_the_holder(tmp_path: Path, machine: Machine) -> None:
    """The first challenger does not win, and is then behind the second one; what the holder did against the first one counts."""
    session, ran = _met(tmp_path, machine, [0.96, 0.97], [(1.0, 0.98), (0.99, 1.05)])
    first, second = session.search.all[1:3]
    assert [pair[0] for pair in ran] == [first, second] and session.best is not None and session.best[0] == session.holder
    assert _says_the_same(session, tmp_path, machine)


@pytest.mark.parametrize(("rounds", "wins"), [([(1.0, 1.05)] * REMATCHES, True), ([(1.0, 0.99)], False)])
def test_a_shipped_record_is_met(rounds: list[tuple[float, ...]], wins: bool, tmp_path: Path, machine: Machine) -> None:
    """Which this session need not have tried: it is in the log then."""
    session, _ = _met(tmp_path, machine, [0.97], rounds, shipped=True)
    assert session.best is not None and (session.best[0] != session.holder) is wins
    assert _says_the_same(session, tmp_path, machine)


def test_a_session_knows_the_shipped_record_of_its_layer(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best one that is legal and of today's kernels."""
    shipped = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path / "shipped"), 20, 0)
    best, good, other = shipped.search.all[:3]
    for choice, seconds in ((best, 1e-3), (good, 2e-3), (other, 3e-3)):
        took(shipped, choice, seconds)
    monkeypatch.setattr("im2win.tuner.session.SHIPPED", shipped.log)
    assert Session(SMALL, ["direct/tiled"], machine, Log(tmp_path / "own"), 20, 0).holder == best
    old = next(one for one in shipped.log.read(SMALL, machine.name) if one.tile == best.tile.as_dict())
    monkeypatch.setattr("im2win.tuner.session.stale", lambda record, logs: "another kernel" if record == old else None)
    assert Session(SMALL, ["direct/tiled"], machine, Log(tmp_path / "own"), 20, 0).holder == good


@pytest.mark.parametrize("wrong", ["holder", "challenger"])
def test_one_that_turns_out_wrong_is_not_the_best(wrong: str, tmp_path: Path, machine: Machine) -> None:
    session, ran = _met(tmp_path, machine, [0.97], [(1.0, 1.0)], wrong=wrong)
    assert len(ran) == 1 and session.best is not None
    assert (session.best[0] == session.holder) is (wrong == "challenger")
    assert _says_the_same(session, tmp_path, machine)


def test_a_first_session_has_nobody_to_meet(tmp_path: Path, machine: Machine) -> None:
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    took(session, session.default, 1e-3)
    assert session.holder is None
    _rematches(session, SimpleNamespace())  # type: ignore[arg-type]
