"""Measures a session's batches on a fleet: all workers take candidates from one queue, and each has a baseline of its own.

The baseline is one kernel of the session, which every worker times after each batch in which it measured. Where a worker is slower than it
was, its candidates since then are measured again, by whichever worker is free (`im2win.tuner.baseline` does the same on one machine).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from im2win.common.worker_pool import WorkerError
from im2win.tuner.baseline import Baseline
from im2win.tuner.cost_model import Choice
from im2win.tuner.fleet.fleet import Fleet, FleetError
from im2win.tuner.fleet.task import Answer
from im2win.tuner.measurement import Measurement, failed
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import Session


class SharedQueue:
    """The baselines of a fleet's workers, and how batches are measured."""

    def __init__(self, session: Session, measurement: Measurement, fleet: Fleet) -> None:
        self.session, self.measurement, self.fleet = session, measurement, fleet
        self._baselines: dict[str, Baseline] = {}
        self._choice: Choice | None = None

    def measure_batch(
        self, batch: list[Choice], hopeless: float, *, built: Callable[[int], None], tried: Callable[[Choice], None],
        disturbed: Callable[[], None],
    ) -> None:  # fmt: skip
        """As `baseline.measure_batch`."""
        session, waiting = self.session, dict[Future[Answer], Choice]()
        measured: dict[str, list[Choice]] = {}

        def take(done: set[Future[Answer]], again: bool = False) -> None:
            for future in done:
                choice, answer = waiting.pop(future), future.result()
                outcome = _outcome(answer)
                session.record(choice, outcome, self.measurement.kernels[choice.key], again=again)
                if outcome.outcome == "ok":
                    measured.setdefault(answer.worker, []).append(choice)
                    self._choice = self._choice or choice
                if not again:
                    tried(choice)

        for choice, unbuilt in self.measurement.each_built(batch, built):
            if unbuilt is not None:
                session.record(choice, unbuilt, self.measurement.kernels[choice.key])
                tried(choice)
            else:
                waiting[self._submitted(choice, hopeless)] = choice
            take(wait(waiting, 0).done)
        while waiting:
            take(wait(waiting, return_when=FIRST_COMPLETED).done)
        unsteady = [worker for worker, steady in self._steady(list(measured)).items() if not steady]
        doubtful = [choice for worker in unsteady for choice in measured[worker]]
        if doubtful:
            disturbed()
            for choice in doubtful:
                waiting[self._submitted(choice, hopeless)] = choice
            while waiting:
                take(wait(waiting, return_when=FIRST_COMPLETED).done, again=True)
            for worker in unsteady:
                self._baselines[worker].accept()

    def _submitted(self, choice: Choice, hopeless: float) -> Future[Answer]:
        give_up_s = hopeless * self.session.best[1] if self.session.best else math.inf
        return self.measurement.submit([choice], give_up_s=give_up_s)

    def _steady(self, workers: list[str]) -> dict[str, bool]:
        """Whether each worker is as fast as it was; true where that is not known. They time the baseline at the same time."""
        if self._choice is None:
            return {}
        asked = {worker: self.measurement.submit([self._choice], only=worker) for worker in workers}
        found = {}
        for worker, future in asked.items():
            try:
                outcome = _outcome(future.result())
            except FleetError:  # it has left
                outcome = Outcome("crashed", "the worker has left")
            if worker in self._baselines:
                found[worker] = self._baselines[worker].judge(outcome)
            elif outcome.outcome == "ok":
                self._baselines[worker] = Baseline(lambda choice: Outcome("crashed"))
                self._baselines[worker].offer(self._choice, outcome)
        return found


def _outcome(answer: Answer) -> Outcome:
    """The outcome of a job of one candidate."""
    if isinstance(answer.result, WorkerError):
        return failed(answer.result)
    return answer.result[0]
