"""Two ways compared on a clock that the test sets: which is called faster, when rounds end, and what noise does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from im2win.common import comparison
from im2win.common.comparison import Comparison, compare


class Clock:
    """A clock that only calls move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, 0
        monkeypatch.setattr(comparison.time, "perf_counter", lambda: self.now)

    def call(self, seconds: Iterator[float]) -> Callable[[], None]:
        """A call that takes these times, one after the other."""

        def run() -> None:
            self.now += next(seconds)
            self.calls += 1

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(("ours", "faster", "slower"), [(0.9e-3, True, False), (1e-3, False, False), (1.1e-3, False, True)])
def test_the_faster_one_is_found(clock: Clock, ours: float, faster: bool, slower: bool) -> None:
    found = compare(clock.call(itertools.repeat(ours)), clock.call(itertools.repeat(1e-3)))
    assert (found.faster, found.slower, found.disturbed) == (faster, slower, False)
    assert found.ours_s == pytest.approx(ours) and found.theirs_s == pytest.approx(1e-3) and found.ratio == pytest.approx(ours / 1e-3)


def test_a_few_disturbed_samples_do_not_decide(clock: Clock) -> None:
    disturbed = itertools.cycle([0.9e-3, 0.9e-3, 0.9e-3, 5e-3, 0.9e-3])
    assert compare(clock.call(disturbed), clock.call(itertools.repeat(1e-3))).faster


def test_what_scatters_is_neither_faster_nor_kept(clock: Clock) -> None:
    wild = itertools.cycle([0.4e-3, 2e-3, 1.5e-3, 0.7e-3, 1.1e-3, 3e-3, 0.5e-3])
    found = compare(clock.call(wild), clock.call(itertools.repeat(1e-3)), seconds=0.01)
    assert not found.faster and found.disturbed
    assert Comparison(1.0, 1.0, 1.0, 0.01, 9).disturbed is False


def test_slow_calls_end(clock: Clock) -> None:
    found = compare(clock.call(itertools.repeat(2.0)), clock.call(itertools.repeat(1.0)), seconds=0.01)
    assert found.slower and found.rounds == 3 and clock.now < 20


def test_quick_calls_are_repeated_within_a_sample(clock: Clock) -> None:
    waits: list[float] = []
    found = compare(
        clock.call(itertools.repeat(1e-6)), clock.call(itertools.repeat(2e-6)), seconds=0.01, synchronize=lambda: waits.append(clock.now)
    )
    assert found.faster and clock.calls > 500 * found.rounds
    assert len(waits) > 2 * found.rounds


@pytest.mark.parametrize(("ours", "rounds"), [(1e-3, 8), (1.8e-3, 11)], ids=["clear", "not so clear"])
def test_a_clear_result_ends_early(clock: Clock, ours: float, rounds: int) -> None:
    assert compare(clock.call(itertools.repeat(ours)), clock.call(itertools.repeat(2e-3)), seconds=0.04).rounds == rounds


def test_what_scatters_does_not_end_early(clock: Clock) -> None:
    scattered = itertools.cycle([0.6e-3, 0.9e-3, 0.7e-3, 1.1e-3, 0.5e-3])
    started = clock.now
    compare(clock.call(scattered), clock.call(itertools.repeat(1e-3)), seconds=0.04)
    assert clock.now - started > 0.04
