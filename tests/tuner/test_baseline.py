"""Noise while tuning: a machine that is slow for a while, for ever, or at the beginning, and what is measured again because of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sessions import SMALL

from im2win.device.cpu import Machine
from im2win.records.log import Log
from im2win.registry.interface import Kernel
from im2win.reports.page import tuned as page
from im2win.tuner.baseline import DISTURBED, Baseline, measure_batch
from im2win.tuner.cost_model import Choice
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import Session

Noise = Callable[[int], float]
"""How many times slower the machine is at the n-th measurement, counted from 0."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    """No kernel runs here, and candidates must have the same order on every CPU."""
    return Machine("Some CPU", "znver4", "avx512f", 2, 16, 32, 32 << 10, 1 << 20, 32 << 20)


class _Noisy:
    """A measurement on a machine with noise: candidate number n takes n + 1 ms where it is quiet."""

    def __init__(self, session: Session, noise: Noise, broken: tuple[int, ...] = ()) -> None:
        self.numbers = {choice.key: number for number, choice in enumerate(session.search.all)}
        self.kernels = dict.fromkeys(self.numbers)
        self.noise, self.broken, self.clock = noise, broken, itertools.count()
        self.measured: list[int] = []

    def each_built(self, batch: list[Choice], built: Any) -> Iterator[tuple[Choice, Outcome | None]]:
        for choice in batch:
            yield choice, Outcome("build_error", "no") if self.numbers[choice.key] in self.broken else None

    def run(self, choices: list[Choice], **how: Any) -> list[Outcome]:
        [number] = [self.numbers[choice.key] for choice in choices]
        self.measured.append(number)
        return [Outcome("ok", samples_s=[1e-3 * (number + 1) * self.noise(next(self.clock))] * 5, error=0.0)]


def tuned(tmp_path: Path, machine: Machine, noise: Noise, batches: int = 2, **how: Any) -> tuple[Session, _Noisy, list[str]]:
    """A session with batches of three candidates, the best first."""
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    measurement: Any = _Noisy(session, noise, **how)
    baseline, said = Baseline(lambda choice: measurement.run([choice])[0]), list[str]()
    for first in range(0, 3 * batches, 3):
        measure_batch(
            session, measurement, baseline, session.search.all[first : first + 3], 1.5, built=lambda count: None,
            tried=lambda choice: said.append("tried"), disturbed=lambda: said.append("disturbed"),
        )  # fmt: skip
    return session, measurement, said


def milliseconds(session: Session) -> list[int]:
    return [round(1e3 * (session.seconds[choice.key] or 0)) for choice, _ in session.tried]


def test_a_quiet_machine_measures_each_candidate_once(tmp_path: Path, machine: Machine) -> None:
    """The first candidate is the baseline: it runs after the first batch, and before and after every other one."""
    session, measurement, said = tuned(tmp_path, machine, lambda place: 1 + 0.03 * (place % 3))
    assert measurement.measured == [0, 1, 2, 0, 0, 3, 4, 5, 0] and said == ["tried"] * 6
    assert len(Log(tmp_path).read(SMALL, machine.name)) == 6 and milliseconds(session) == [1, 2, 3, 4, 5, 6]


@pytest.mark.fault("compilers and devices", "other work disturbs the machine")
def test_candidates_of_a_busy_moment_are_measured_again(tmp_path: Path, machine: Machine) -> None:
    """The second batch, all of it or its end, is disturbed: the times that count are those of the quiet machine afterwards."""
    for start, end in ((5, 9), (7, 9), (4, 7)):
        session, measurement, said = tuned(tmp_path / f"{start}", machine, lambda place, a=start, b=end: 3.0 if a <= place < b else 1.0)  # type: ignore[misc]
        assert said == ["tried"] * 6 + ["disturbed"] and measurement.measured == [0, 1, 2, 0, 0, 3, 4, 5, 0, 3, 4, 5, 0]
        assert milliseconds(session) == [1, 2, 3, 4, 5, 6]
        records = Log(tmp_path / f"{start}").read(SMALL, machine.name)
        assert len(records) == 9 and [record.trial for record in records[6:]] == [3, 4, 5]


def test_a_busy_beginning_is_found_out_when_the_machine_becomes_quiet(tmp_path: Path, machine: Machine) -> None:
    session, measurement, said = tuned(tmp_path, machine, lambda place: 2.0 if place < 3 else 1.0, batches=1)
    assert said == ["tried"] * 3 + ["disturbed"] and measurement.measured == [0, 1, 2, 0, 0, 1, 2, 0]
    assert milliseconds(session) == [1, 2, 3]


def test_a_machine_that_stays_slow_is_believed(tmp_path: Path, machine: Machine) -> None:
    """One batch is measured again; then the new speed is the usual one."""
    session, measurement, said = tuned(tmp_path, machine, lambda place: 1.0 if place < 5 else 2.0, batches=4)
    assert said.count("disturbed") == 1 and measurement.measured[13:] == [0, 6, 7, 8, 0, 0, 9, 10, 11, 0]
    assert milliseconds(session)[3:] == [8, 10, 12, 14, 16, 18, 20, 22, 24]


def test_failures_are_no_noise_and_no_baseline(tmp_path: Path, machine: Machine) -> None:
    session, measurement, said = tuned(tmp_path, machine, lambda place: 1.0, broken=(0, 1, 2, 4))
    assert measurement.measured == [3, 5, 3] and "disturbed" not in said
    assert session.outcomes == {"build_error": 4, "ok": 2}


def test_a_baseline_that_fails_says_nothing(machine: Machine, tmp_path: Path) -> None:
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    outcomes = iter([Outcome("ok", samples_s=[1e-3]), Outcome("crashed", "signal 11"), Outcome("ok", samples_s=[1.1e-3 * DISTURBED])])
    baseline = Baseline(lambda choice: next(outcomes))
    assert baseline.steady(), "there is none"
    baseline.offer(session.default, next(outcomes))
    assert baseline.steady() and not baseline.steady()
    baseline.accept()


@pytest.mark.fault("candidates", "a candidate is wrong when it is measured again")
def test_what_is_wrong_when_measured_again_is_no_candidate(tmp_path: Path, machine: Machine) -> None:
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 20, 0)
    measurement: Any = _Noisy(session, lambda place: 2.0 if place == 3 else 1.0)
    run, baseline = measurement.run, Baseline(lambda choice: measurement.run([choice])[0])

    def intermittent(choices: list[Choice], **how: Any) -> list[Outcome]:
        wrong = len(measurement.measured) >= 4 and choices == [session.search.all[1]]
        return [Outcome("wrong", "9 elements are NaN")] if wrong else run(choices, **how)  # type: ignore[no-any-return]

    measurement.run = intermittent
    batch = session.search.all[:3]
    measure_batch(session, measurement, baseline, batch, 1.5, lambda count: None, lambda choice: None, lambda: None)
    assert session.seconds[batch[1].key] is None and session.best is not None and session.best[0] == batch[0]


# --- tiles that make the same kernel


def alike(tmp_path: Path, machine: Machine) -> tuple[Session, _Noisy]:
    """A session of four candidates, two of which make the kernels of the others, one with its filters in another order, and the default."""
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 6, 0)
    measurement: Any = _Noisy(session, lambda place: 1.0)
    packs = {repr(choice.tile.pack): choice for choice in session.search.all}
    assert len(packs) > 1
    same = [choice for choice in session.search.all if repr(choice.tile.pack) == next(iter(packs)) and choice.key != session.default.key]
    other = next(choice for choice in session.search.all if repr(choice.tile.pack) != next(iter(packs)))
    batch = [*same[:4], other]
    measurement.kernels |= {choice.key: Kernel(0, f"kernel {place % 2}") for place, choice in enumerate(same)}
    measurement.kernels[other.key] = Kernel(0, "kernel 0")
    measurement.kernels[session.default.key] = Kernel(0, "kernel 1")
    baseline = Baseline(lambda choice: measurement.run([choice])[0])
    how: dict[str, Any] = {"built": lambda count: None, "tried": lambda choice: None, "disturbed": lambda: None}
    known = {choice.key for choice, _ in session.tried}
    measure_batch(session, measurement, baseline, [choice for choice in batch if choice.key not in known], 1.5, **how)
    if session.default.key not in known:
        measure_batch(session, measurement, baseline, [session.default], 1.5, **how)
    return session, measurement


def test_a_kernel_is_measured_once_for_all_tiles_that_make_it(tmp_path: Path, machine: Machine) -> None:
    """But that of the default tile, and one that has filters in another order. Tiles that were not measured are no trials."""
    session, measurement = alike(tmp_path, machine)
    keys = [choice.key for choice, _ in session.tried]
    assert list(session.equals.items()) == [(keys[2], keys[0]), (keys[3], keys[1])]
    assert {measurement.numbers[keys[place]] for place in (0, 1, 4, 5)} == set(measurement.measured), "the default is the last one"
    assert keys[5] == session.default.key and session.progress().trial == 4
    records = Log(tmp_path).read(SMALL, machine.name)
    assert [record.outcome for record in records] == ["ok", "ok", "equal", "equal", "ok", "ok"]
    first = session.tried[0][0].tile.as_dict()
    assert records[2].message == f"its kernel is that of direct/tiled with the tile {first}, which was measured"
    assert records[2].fingerprint == records[0].fingerprint and not records[2].samples_s
    assert len(session.next_batch()) == 2, "of six trials"
    assert page.tuned(records).failed == 0 and len(page.tuned(records).trials) == 4
    again, nothing = alike(tmp_path, machine)
    assert again.equals == session.equals and not nothing.measured and len(again.next_batch()) == 2
    session.record(session.tried[2][0], Outcome("ok", samples_s=[1e-3], error=0.0), Kernel(0, "kernel 0"), again=True)
    assert list(session.equals) == [keys[3]], "it was measured after all"


def test_tiles_whose_kernels_were_measured_end_a_session(tmp_path: Path, machine: Machine) -> None:
    """As many as there are trials, if no other ones are left."""
    session = Session(SMALL, ["direct/tiled"], machine, Log(tmp_path), 4, 0, patience=None)
    kernel = Kernel(0, "of all tiles")
    while batch := session.next_batch():
        for choice in batch:
            session.record(choice, session.measured_before(choice, kernel) or Outcome("ok", samples_s=[1e-3], error=0.0), kernel)
    assert len(session.tried) <= 8 and len(session.equals) >= 4 and session.progress().trial <= 4
