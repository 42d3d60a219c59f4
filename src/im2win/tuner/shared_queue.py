"""Measures a session's batches on a fleet: all workers take candidates from one queue, and each has a baseline of its own.

Nobody waits at the end of a batch: while its last candidates are measured, the next batch is proposed, and the workers have what is queued.

The baseline is one kernel of the session, which every worker times after each `BATCH` of candidates that it measured. Where a worker is
slower than it was, its candidates since the time before are measured again, by whichever worker is free (`im2win.tuner.baseline` does the
same on one machine).
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
from im2win.tuner.proposer import BATCH
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import Session

QUEUED = 2  # candidates for each worker, the one that it measures included, that a finished batch may leave to be waited for later


class SharedQueue:
    """A session's candidates in a fleet's queue, and the baselines of the workers.

    Args:
        hopeless: sampling stops early for a candidate that is so many times slower than the best.
        tried: called after each trial. disturbed: called before candidates are measured again.
    """

    def __init__(
        self, session: Session, measurement: Measurement, fleet: Fleet, hopeless: float, tried: Callable[[Choice], None],
        disturbed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.session, self.measurement, self.fleet = session, measurement, fleet
        self._hopeless, self._tried, self._disturbed = hopeless, tried, disturbed
        self._trials: dict[Future[Answer], Choice] = {}
        self._repeated: dict[Future[Answer], Choice] = {}
        self._judged: dict[Future[Answer], tuple[str, list[Choice]]] = {}  # baselines: of which worker, and for which candidates
        self._since: dict[str, list[Choice]] = {}  # by worker, what it measured since its last baseline was queued
        self._baselines: dict[str, Baseline] = {}
        self._choice: Choice | None = None

    @property
    def pending(self) -> list[Choice]:
        """Candidates in the queue that have no outcome yet."""
        return list(self._trials.values())

    def measure_batch(self, batch: list[Choice], built: Callable[[int], None]) -> None:
        """Queues a batch as it is built, and records what is measured. The last candidates of the batch may be pending at the end.

        Args:
            built: called after each build with the number of builds.
        """
        for choice, unbuilt in self.measurement.each_built(batch, built):
            known = unbuilt or self.session.measured_before(choice, self.measurement.kernels[choice.key])
            if known is not None:
                self.session.record(choice, known, self.measurement.kernels[choice.key])
                self._tried(choice)
            else:
                self._trials[self._submitted(choice)] = choice
            self._take(0)
        while len(self._trials) + len(self._repeated) > QUEUED * len(self.fleet.workers):
            self._take()

    def finish(self) -> None:
        """Waits for what is pending, and for the baselines of the workers that measured it."""
        while self._trials:
            self._take()
        for worker in list(self._since):
            self._ask(worker)
        while self._judged or self._repeated:
            self._take()

    def _submitted(self, choice: Choice) -> Future[Answer]:
        give_up_s = self._hopeless * self.session.best[1] if self.session.best else math.inf
        return self.measurement.submit([choice], give_up_s=give_up_s)

    def _take(self, timeout_s: float | None = None) -> None:
        """Takes what is done; waits for something to be done, at most so many seconds."""
        queued = [*self._trials, *self._repeated, *self._judged]
        for future in wait(queued, timeout_s, FIRST_COMPLETED).done if queued else ():
            if future in self._judged:
                self._judge(future)
            else:
                self._record(future)

    def _record(self, future: Future[Answer]) -> None:
        again = future in self._repeated
        choice = (self._repeated if again else self._trials).pop(future)
        answer = future.result()
        outcome = _outcome(answer)
        self.session.record(choice, outcome, self.measurement.kernels[choice.key], again=again)
        if again:
            return
        if outcome.outcome == "ok":
            self._choice = self._choice or choice
            measured = self._since.setdefault(answer.worker, [])
            measured.append(choice)
            if len(measured) >= BATCH:
                self._ask(answer.worker)
        self._tried(choice)

    def _ask(self, worker: str) -> None:
        """Queues the baseline for a worker."""
        measured = self._since.pop(worker, [])
        if measured and self._choice is not None:
            self._judged[self.measurement.submit([self._choice], only=worker)] = worker, measured

    def _judge(self, future: Future[Answer]) -> None:
        """Takes a worker's time of the baseline, and has its candidates measured again if it is not as fast as it was."""
        worker, measured = self._judged.pop(future)
        try:
            outcome = _outcome(future.result())
        except FleetError:  # it has left
            return
        if worker not in self._baselines:
            if outcome.outcome == "ok" and self._choice is not None:
                self._baselines[worker] = Baseline(lambda choice: Outcome("crashed"))
                self._baselines[worker].offer(self._choice, outcome)
        elif not self._baselines[worker].judge(outcome):
            self._disturbed()
            for choice in measured:
                self._repeated[self._submitted(choice)] = choice
            self._baselines[worker].accept()


def _outcome(answer: Answer) -> Outcome:
    """The outcome of a job of one candidate."""
    if isinstance(answer.result, WorkerError):
        return failed(answer.result)
    return answer.result[0]
