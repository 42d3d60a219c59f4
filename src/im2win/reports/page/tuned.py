"""What the tuning records of one layer say: the best of each algorithm and schedule, the course of the search, and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from im2win.records.record import EQUAL, Record
from im2win.spec.conv2d import Conv2d

DEFAULT = ":default"  # end of `Record.rivals` of the default tile's record


@dataclass(frozen=True)
class Trial:
    """One candidate of the search: its algorithm and schedule, and the median of its first samples; None if it failed."""

    method: str
    seconds: float | None


@dataclass(frozen=True)
class Failure:
    """How often candidates of a method failed with an outcome and a message."""

    outcome: str
    method: str
    message: str
    count: int


@dataclass(frozen=True)
class TunedLayer:
    """A tuned layer.

    Attributes:
        best: of each method the record with the lowest cost, the fastest method first.
        candidates: numbers of candidates by method.
        trials: candidates in the order they were first tried.
        default_s: median seconds of the default tile, of its last record; None if records do not say which it is.
        failures: of the candidates whose last record failed, the most frequent first.
    """

    conv: Conv2d
    device: str
    target: str
    threads: int
    best: list[Record]
    candidates: dict[str, int]
    trials: list[Trial]
    default_s: float | None
    failures: list[Failure]

    @property
    def failed(self) -> int:
        """Number of candidates that failed."""
        return sum(one.count for one in self.failures)


def tuned(records: Sequence[Record]) -> TunedLayer:
    """Evaluates the records of one layer on one device, at least one, in the order they were written.

    The last record of a candidate counts, since finals measure the best candidates again. The course of the search is that of the first.
    Candidates whose kernels were measured as those of other tiles do not count.
    """
    firsts: dict[tuple[str, str], Record] = {}
    lasts: dict[tuple[str, str], Record] = {}
    default_s = None
    for record in records:
        if record.outcome == EQUAL:
            continue
        key = record.method, str(sorted(record.tile.items()))
        firsts.setdefault(key, record)
        lasts[key] = record
        if record.rivals.endswith(DEFAULT) and record.seconds is not None:
            default_s = record.seconds
    best: dict[str, Record] = {}
    for record in lasts.values():
        known = best.get(record.method)
        if record.seconds is not None and (known is None or record.cost < known.cost):
            best[record.method] = record
    failed = Counter((one.outcome, one.method, one.message) for one in lasts.values() if one.seconds is None)
    one = records[-1]
    return TunedLayer(
        one.conv2d, one.device, one.target, one.threads, sorted(best.values(), key=lambda record: record.seconds or 0.0),
        dict(Counter(method for method, _ in firsts)), [Trial(r.method, r.seconds) for r in firsts.values()], default_s,
        [Failure(*what, count) for what, count in failed.most_common()],
    )  # fmt: skip


def best_so_far(trials: Sequence[Trial]) -> list[tuple[int, float]]:
    """The course of the search: (number of the trial, counted from 1, seconds of the best until then), where that changed, and its end."""
    found: list[tuple[int, float]] = []
    for number, trial in enumerate(trials, 1):
        if trial.seconds is not None and (not found or trial.seconds < found[-1][1]):
            found.append((number, trial.seconds))
    if found and found[-1][0] != len(trials):
        found.append((len(trials), found[-1][1]))
    return found
