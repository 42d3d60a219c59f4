"""How a session's candidates go through a fleet's queue: nobody waits for a batch, and each worker is compared with itself.

The workers here are threads that say what a test tells them to; `test_fleet.py` has processes.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from im2win.tuner.fleet.fleet import FleetError
from im2win.tuner.fleet.task import Answer
from im2win.tuner.proposer import BATCH
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.shared_queue import QUEUED, SharedQueue


@dataclass(frozen=True)
class Candidate:
    key: int
    algorithm: str = "direct/tiled"


Speed = Callable[[str, int], float]  # seconds that a worker measures, by its name and how many jobs it did before


@dataclass
class Threads:
    """A session, its measurement and a fleet in one: `workers` take candidates from one queue."""

    names: list[str]
    speed: Speed = lambda worker, before: 1.0
    gone: set[str] = field(default_factory=set)  # workers that leave when they are asked for the baseline
    recorded: list[tuple[int, bool, float]] = field(default_factory=list)
    alone: Counter[str] = field(default_factory=Counter)  # jobs for one worker only
    waiting: int = 0  # candidates that had no outcome when a batch was over
    best: Any = None

    def __post_init__(self) -> None:
        self.kernels: Any = Counter()
        self.done: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.open: queue.Queue[Any] = queue.Queue()
        self.own = {name: queue.Queue[Any]() for name in self.names}
        for name in self.names:
            threading.Thread(target=self._work, args=(name,), daemon=True).start()

    @property
    def workers(self) -> list[str]:
        return self.names

    def each_built(self, batch: list[Candidate], built: Callable[[int], None]) -> Iterator[tuple[Candidate, Outcome | None]]:
        for count, choice in enumerate(batch, 1):
            built(count)
            yield choice, Outcome("build_error", "no") if choice.key < 0 else None

    def submit(self, choices: list[Candidate], *, only: str | None = None, give_up_s: float = 0.0) -> Future[Answer]:
        future: Future[Answer] = Future()
        self.alone[only or ""] += 1
        if only in self.gone:
            future.set_exception(FleetError(f"the worker {only} is gone."))
        else:
            (self.own[only] if only else self.open).put(future)
        return future

    def measured_before(self, choice: Candidate, kernel: Any) -> None:
        """No two candidates are the same kernel."""

    def record(self, choice: Candidate, outcome: Outcome, kernel: Any, *, again: bool = False) -> None:
        self.recorded.append((choice.key, again, outcome.samples_s[0] if outcome.samples_s else 0.0))

    def _work(self, name: str) -> None:
        while True:
            for mine in (self.own[name], self.open):
                try:
                    future = mine.get(timeout=0.002)
                except queue.Empty:
                    continue
                if future is None:
                    return
                with self.lock:
                    seconds = self.speed(name, self.done[name])
                    self.done[name] += 1
                future.set_result(Answer([Outcome("ok", samples_s=[seconds] * 3)], name))

    def run(self, batches: int) -> list[int]:
        """Measures batches of candidates; returns how often something was measured again since a worker was disturbed."""
        disturbed: list[int] = []
        tried: list[int] = []
        shared = SharedQueue(self, self, self, 1.5, lambda choice: tried.append(choice.key), lambda: disturbed.append(1))  # type: ignore[arg-type]
        for batch in range(batches):
            shared.measure_batch([Candidate(batch * BATCH + place) for place in range(BATCH)], lambda count: None)
            self.waiting = max(self.waiting, len(shared.pending))
        shared.finish()
        assert sorted(tried) == list(range(batches * BATCH)) and not shared.pending
        for _ in self.names:
            self.open.put(None)
        return disturbed


@pytest.mark.parametrize("workers", [1, 4])
def test_nobody_waits_for_the_end_of_a_batch(workers: int) -> None:
    """What a batch leaves in the queue is measured while the next one is proposed. Baselines cost a worker one job in nine."""
    fleet = Threads([f"w{place}" for place in range(workers)])
    assert fleet.run(8) == []
    assert sorted(key for key, again, _ in fleet.recorded) == list(range(64)) and not any(again for _, again, _ in fleet.recorded)
    assert 0 < fleet.waiting <= QUEUED * workers
    asked = sum(count for name, count in fleet.alone.items() if name)
    assert 64 // BATCH - workers <= asked <= 64 // BATCH + workers, "after each batch that a worker measured, and at the end"


def test_what_a_disturbed_worker_measured_is_measured_again() -> None:
    """The second worker is twice as slow after some jobs: what it measured then counts no more, and its new speed is its usual one."""
    fleet = Threads(["fast", "slow"], lambda worker, before: 2.0 if worker == "slow" and before >= BATCH + 4 else 1.0)
    assert 1 <= len(fleet.run(16)) <= 2
    again = [key for key, again, _ in fleet.recorded if again]
    first = {key: seconds for key, again, seconds in fleet.recorded if not again}
    assert len(again) >= BATCH and any(first[key] == 2.0 for key in again)


def test_a_worker_that_leaves_is_not_judged() -> None:
    fleet = Threads(["stays", "leaves"], gone={"leaves"})
    assert fleet.run(6) == [] and len(fleet.recorded) == 6 * BATCH


def test_what_cannot_be_built_is_recorded_at_once() -> None:
    fleet = Threads(["one"])
    tried: list[int] = []
    shared = SharedQueue(fleet, fleet, fleet, 1.5, lambda choice: tried.append(choice.key), lambda: None)  # type: ignore[arg-type]
    shared.measure_batch([Candidate(-1), Candidate(-2)], lambda count: None)
    shared.finish()
    assert tried == [-1, -2] and not fleet.done
