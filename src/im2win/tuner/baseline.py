"""Finds out while a session measures whether other work on the machine disturbs it, and measures again what was disturbed.

One kernel of the session, its first correct one, is the baseline. It is timed before and after the candidates of each batch are measured.
If it is slower than it can be, other work, a lower clock or a cold process slowed the candidates down as well, and those that were timed
are measured once more. Where the machine stays slow, its new speed is the one that later batches are compared with: a machine that is
always shared costs one repetition and not one for every batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from im2win.tuner.cost_model import Choice
from im2win.tuner.measurement import Measurement
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import Session

DISTURBED = 1.15  # times the baseline's least median; one kernel's medians differ by some per cent between quiet moments


class Baseline:
    """The kernel that shows how fast the machine is.

    Args:
        measure: times a candidate that is built.
    """

    def __init__(self, measure: Callable[[Choice], Outcome]) -> None:
        self._measure = measure
        self._choice: Choice | None = None
        self._least_s = math.inf
        self._last_s = math.inf

    def offer(self, choice: Choice, outcome: Outcome) -> None:
        """Takes a candidate of the session as the baseline if it is correct and there is none yet."""
        if self._choice is None and outcome.outcome == "ok" and outcome.samples_s:
            self._choice = choice
            self._least_s = self._last_s = statistics.median(outcome.samples_s)

    def steady(self) -> bool:
        """Times the baseline. Returns whether the machine is as fast as it was; true where no baseline can be timed.

        A baseline that is far faster than ever before shows that the machine was slow until now: that is not steady, either.
        """
        return self._choice is None or self.judge(self._measure(self._choice))

    def judge(self, outcome: Outcome) -> bool:
        """As `steady`, of the baseline's outcome."""
        if outcome.outcome != "ok" or not outcome.samples_s:
            return True
        self._last_s = statistics.median(outcome.samples_s)
        before, self._least_s = self._least_s, min(self._least_s, self._last_s)
        return self._last_s <= DISTURBED * before and before <= DISTURBED * self._last_s

    def accept(self) -> None:
        """Takes the machine's speed of the last `steady` as its usual one."""
        self._least_s = self._last_s


def measure_batch(
    session: Session, measurement: Measurement, baseline: Baseline, batch: list[Choice], hopeless: float,
    built: Callable[[int], None], tried: Callable[[Choice], None], disturbed: Callable[[], None],
) -> None:  # fmt: skip
    """Builds, measures and records a batch, and measures and records it again where the machine was disturbed meanwhile.

    A candidate whose kernel was measured before is recorded as such, and not measured.

    Args:
        hopeless: sampling stops early for a candidate that is so many times slower than the best.
        built, tried: called after each build with the number of builds, and after each trial.
        disturbed: called before candidates are measured again.
    """
    timed: list[Choice] = []
    steady: bool | None = None

    def measured(choice: Choice) -> Outcome:
        return measurement.run([choice], give_up_s=hopeless * session.best[1] if session.best else math.inf)[0]

    for choice, failed in measurement.each_built(batch, built):
        if steady is None:  # a CPU has built the whole batch by now
            steady = baseline.steady()
        outcome = failed or session.measured_before(choice, measurement.kernels[choice.key]) or measured(choice)
        session.record(choice, outcome, measurement.kernels[choice.key])
        baseline.offer(choice, outcome)
        timed += [choice] if outcome.outcome == "ok" else []
        tried(choice)
    if not timed or (baseline.steady() and steady):
        return
    disturbed()
    _measure_again(session, measurement, timed, measured)
    if not baseline.steady():
        baseline.accept()


def _measure_again(session: Session, measurement: Measurement, timed: Iterable[Choice], measured: Callable[[Choice], Outcome]) -> None:
    for choice in timed:
        session.record(choice, measured(choice), measurement.kernels[choice.key], again=True)
