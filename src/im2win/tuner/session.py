"""The state of one tuning session of one problem."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm

from im2win import __version__
from im2win.common.worker_pool import MachineError
from im2win.numerics.tolerance import tolerance
from im2win.records.folders import PACKAGED
from im2win.records.judge import rivals_now
from im2win.records.log import Log, best_first
from im2win.records.lookup import applies_at_once, stale, superseded, tile_violations
from im2win.records.record import EQUAL, NO_KERNEL, Record, utc_now
from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Backend, Kernel
from im2win.registry.ranking import first_of
from im2win.registry.schedules import candidates, schedule_of
from im2win.registry.sources import code_digest
from im2win.spec import methods
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.cost_model import Choice, CostModel, training_data, with_cycles
from im2win.tuner.pool import Ranking
from im2win.tuner.proposer import BATCH, Search
from im2win.tuner.runners.cpu import Outcome

PATIENCE = 24  # trials
MOST_UNDECIDED = 8
ELSEWHERE = 2  # hints of one device's shipped records
HINTS = 6  # candidates of records of other code versions and devices; they follow the default tile
SHIPPED = Log(PACKAGED)


@dataclass(frozen=True)
class Progress:
    """Progress of a session; times in seconds. `best_s` and `default_s` are None until they are known.

    Attributes:
        algorithm: of the last trial; "" in phases without one.
        phase: "measuring" after a trial; else what has begun: "ranking 2 of 7 algorithms", "building 3 of 8",
            "measuring again what was disturbed", "measuring the best again".
    """

    conv: Conv2d
    algorithm: str
    trial: int
    trials: int
    best_s: float | None
    default_s: float | None
    elapsed_s: float
    seconds_left: float | None
    phase: str = "measuring"


def batch_size(backend: Backend) -> int:
    """The candidates of a batch. A CPU measures only when a batch is built, so that it has one for each process that builds."""
    return BATCH if backend.target == "cuda" else max(BATCH, backend.workers)


def batches(
    propose: Callable[[list[Choice]], list[Choice]], ahead: int, over: Callable[[], bool] = lambda: False
) -> Iterator[list[Choice]]:
    """Batches to measure, in order.

    Args:
        propose: the batch that follows those candidates that are proposed and not measured; empty if there is none.
        ahead: candidates that are proposed, and may be built, before the batch in front of them is measured: this many at least.
        over: whether batches that nobody has begun to measure are dropped.
    """
    waiting: list[list[Choice]] = []
    while True:
        if over():
            waiting.clear()
        while not waiting or sum(map(len, waiting[1:])) < ahead:
            batch = propose([choice for one in waiting for choice in one])
            if not batch:
                break
            waiting.append(batch)
        if not waiting:
            return
        yield waiting.pop(0)


class Session:
    """The state of tuning one problem: the candidates that were tried, their outcomes and costs."""

    def __init__(
        self, conv: Conv2d, names: list[str], device: Device, log: Log, trials: int, seed: int, patience: int | None = PATIENCE,
        accuracy: Accuracy = "float32", ranking: Ranking | None = None,
    ) -> None:  # fmt: skip
        self.conv, self.device, self.log, self.trials, self.seed, self.patience = conv, device, log, trials, seed, patience
        self.accuracy = accuracy
        self.backend = backend_for(device, accuracy)
        self.names = names
        found = {name: self.backend.ranked(conv, schedule_of(name)) for name in names} if ranking is None else ranking
        ranked = {name: [Choice(name, tile, cycles) for cycles, tile in found[name]] for name in names}
        if not any(ranked.values()):
            raise ValueError(f"no tile of {', '.join(names)} is legal for {conv} on {self.backend.name}.")
        self.default, self.rivals = self._standard(found, ranked, accuracy)
        model = CostModel(training_data(list(self._other_layers()), device))
        self.hints = self._hints(names, accuracy)
        self.search = Search(conv, device, ranked, seed, model, [choice for choice, _ in self.hints])
        self.tried: list[tuple[Choice, float]] = []  # each with its `Record.cost`
        self.seconds: dict[Any, float | None] = {}
        self.equals: dict[Any, Any] = {}  # candidates that were not measured, and those with the same kernels that were
        self._kernels: dict[tuple[Any, ...], Choice] = {}  # the first candidate that was measured with each kernel
        self.outcomes: dict[str, int] = {}
        self._undecided = 0  # outcomes since the last one that was decided
        self.started = time.monotonic()
        self._resume(names)
        self.resumed, self._trials_before = len(self.tried), len(self.tried) - len(self.equals)  # candidates, and trials among them
        self.holder = self.best[0] if self.best else self._shipped()  # whose record this session may replace as the one that is used

    def _standard(self, found: Ranking, ranked: dict[str, list[Choice]], accuracy: Accuracy) -> tuple[Choice, str]:
        """The default tile among all ranked algorithms, and what `Record.rivals` says once it is measured.

        That says nothing unless all algorithms were ranked that support the problem. Where the layer has no default, since no tile is
        proven, the best estimate takes its place.
        """
        first = first_of(self.conv, found, self.backend)
        if first is None:
            return min((choices[0] for choices in ranked.values() if choices), key=lambda choice: choice.cycles), ""
        able = {row.key for row in candidates("auto", self.conv, self.backend.target, accuracy)}
        cycles, name, tile = first
        return Choice(name, tile, cycles), rivals_now(self.backend.target, accuracy) if able <= set(found) else ""

    def _beside(self, choice: Choice) -> str:
        """What `Record.rivals` says of a candidate that is measured now."""
        if choice.key == self.default.key:
            return self.rivals and rivals_now(self.backend.target, self.accuracy, default=True)
        return self.rivals if self.met else ""

    def _same_place(self, record: Record) -> bool:
        """Whether a record was taken with this session's target and number of threads."""
        return record.threads == self.backend.threads and record.target == self.backend.target

    def _applies(self, record: Record) -> bool:
        """Whether a record is valid for today's code and this session's device."""
        return self._same_place(record) and stale(record, [self.log]) is None

    def _hints(self, names: list[str], accuracy: Accuracy) -> list[tuple[Choice, float]]:
        """The best legal candidates of records that the look-up refuses: of other versions of the code or of TVM, or of other devices.

        For a problem that requantises its outputs, records of the same problem without requantisation count as well, of whatever version.
        Records of this device come before those that ship with the package for others. Each comes with the cost of its record, or with
        infinity where that is of another device or problem.
        """
        old: dict[tuple[str, str], Record] = {}
        for conv in (self.conv, self.conv.with_(out_dtype=None)) if self.conv.requantised else (self.conv,):
            for record in self.log.read(conv, self.backend.name):
                hint = conv != self.conv or stale(record, [self.log]) is not None
                if hint and record.seconds is not None and self._same_place(record) and record.method in names:
                    old[record.method, str(record.tile)] = record
        own = [(record, record.cost if record.conv == str(self.conv) else math.inf) for record in best_first(old.values())]
        found = (*own, *((record, math.inf) for record in best_first(self._elsewhere(names))))
        legal = (one for one in found if not tile_violations(self.conv, one[0].method, one[0].tile, self.device, accuracy))
        return [(self._choice(self.conv, record), cost) for record, cost in itertools.islice(legal, HINTS)]

    def _elsewhere(self, names: list[str]) -> list[Record]:
        """The best shipped records of this layer: of this device, and of other ones."""
        found = []
        for device in SHIPPED.devices():
            here = (record for record in SHIPPED.read(self.conv, device) if record.method in names)
            records = best_first(record for record in here if self._same_place(record))
            distinct = {(record.method, str(record.tile)): record for record in reversed(records)}
            found += best_first(distinct.values())[:ELSEWHERE]
        return found

    def _shipped(self) -> Choice | None:
        """The candidate of the best shipped record of this layer and device that applies: a look-up uses it until this log has one."""
        records = SHIPPED.read(self.conv, self.backend.name)
        for record in best_first(one for one in records if one.method in self.names and not superseded(one, records)):
            legal = not tile_violations(self.conv, record.method, record.tile, self.device, self.accuracy)
            if legal and self._applies(record):
                return self._choice(self.conv, record)
        return None

    def _choice(self, conv: Conv2d, record: Record) -> Choice:
        """The candidate of a record, with its estimate for a problem."""
        tile = self.backend.tile(schedule_of(record.method), record.tile)
        return with_cycles(conv, record.method, tile, self.device)

    def _other_layers(self) -> Iterable[tuple[Conv2d, Choice, float]]:
        """Measurements of other layers on this device, with their costs."""
        for conv in self.log.convs(self.backend.name):
            if conv == self.conv:
                continue
            for record in self.log.read(conv, self.backend.name):
                # Thousands of records may be there: none is worth emitting its kernel again.
                if record.seconds is not None and self._same_place(record) and applies_at_once(record, [self.log]):
                    yield conv, self._choice(conv, record), record.cost

    def _resume(self, names: list[str]) -> None:
        """Takes over the trials that the log already holds, the default tile's too. The last record of a candidate counts."""
        known: dict[Any, tuple[Choice, float]] = {}
        for record in self.log.read(self.conv, self.backend.name):
            if self._applies(record) and record.method in {*names, self.default.algorithm}:
                choice = self._choice(self.conv, record)
                if record.method not in names and choice.key != self.default.key:
                    continue
                if self.backend.violations(self.conv, schedule_of(record.method), choice.tile):
                    continue  # tried by a session that allowed more
                known[choice.key] = (choice, record.cost)
                self.seconds[choice.key] = record.seconds
                self._note_kernel(choice, record)
        self.tried = list(known.values())

    def _kernel_of(self, choice: Choice, fingerprint: str) -> tuple[Any, ...]:
        """What two candidates have in common whose measurement is the same: kernel, packed filters, workspace and tolerance."""
        row, backend = schedule_of(choice.algorithm), self.backend
        pack, workspace = backend.pack(self.conv, row, choice.tile), backend.workspace_bytes(self.conv, row, choice.tile)
        return choice.algorithm, fingerprint, repr(pack), workspace, backend.accuracy(choice.tile)

    def _note_kernel(self, choice: Choice, record: Record) -> None:
        """Remembers a decided candidate by its kernel, or by that of the one that was measured in its place."""
        if record.fingerprint == NO_KERNEL or record.outcome in ("build_error", "illegal"):
            return
        first = self._kernels.setdefault(self._kernel_of(choice, record.fingerprint), choice)
        if record.outcome == EQUAL:
            self.equals[choice.key] = first.key
        else:
            self.equals.pop(choice.key, None)

    def measured_before(self, choice: Choice, kernel: Kernel | None) -> Outcome | None:
        """The outcome of a candidate whose kernel was measured as that of another tile of its algorithm; None if it was not.

        The default tile is always measured, since others are compared with it.
        """
        if kernel is None or choice.key == self.default.key:
            return None
        first = self._kernels.get(self._kernel_of(choice, kernel.fingerprint))
        if first is None or first.key == choice.key:
            return None
        return Outcome(EQUAL, f"its kernel is that of {first.algorithm} with the tile {first.tile.as_dict()}, which was measured")

    @property
    def best(self) -> tuple[Choice, float] | None:
        """The best correct candidate so far of the algorithms asked for, and its cost; None if there is none."""
        good = [(choice, cost) for choice, cost in self.tried if math.isfinite(cost) and choice.algorithm in self.names]
        return min(good, key=lambda item: item[1], default=None)

    @property
    def stalled(self) -> bool:
        """Whether the last `patience` trials of this session gained less than 1 %. Kernels that were measured before are no trials."""
        costs = [cost for choice, cost in self.tried if choice.key not in self.equals]
        if self.patience is None or len(costs) < self._trials_before + self.patience or len(costs) < self.patience + BATCH:
            return False
        return min(costs[-self.patience :]) > 0.99 * min(costs[: -self.patience])

    @property
    def met(self) -> bool:
        """Whether the default tile was tried."""
        return any(choice.key == self.default.key for choice, _ in self.tried)

    def next_batch(self, pending: Sequence[Choice] = ()) -> list[Choice]:
        """The candidates to try next; empty when the session is over.

        The default tile is tried first. If the log holds other trials but not this one, it is tried whatever their number. It is none of
        `trials` where its algorithm was not asked for. So are hints that were faster than all trials that the log holds: else a layer
        whose fastest kernels have changed would keep a slower one. A candidate whose kernel was measured before is no trial, but no more
        than `trials` of them are built.

        Args:
            pending: candidates of earlier batches that are not measured yet.
        """
        begun = [choice for choice, _ in self.tried] + list(pending)
        known = {choice.key for choice in begun}
        lacking = [choice for choice in (self.default, *self._faster_before()) if choice.key not in known]
        left = self.trials + self._free - sum(choice.algorithm in self.names for choice in (*begun, *lacking))
        if left <= 0 or self.stalled:
            return lacking
        tried = [*self.tried, *((choice, math.inf) for choice in (*pending, *lacking))]
        return [*lacking, *self.search.propose(tried, min(batch_size(self.backend) - len(lacking), left))]

    @property
    def _free(self) -> int:
        """Candidates that are no trials, since their kernels were measured before."""
        return min(len(self.equals), self.trials)

    def _faster_before(self) -> list[Choice]:
        """Hints, other than the default tile, whose records are faster than the best trial, of a session that resumes others."""
        if not self.resumed or self.best is None:
            return []
        return [choice for choice, cost in self.hints if cost < self.best[1] and choice.key != self.default.key]

    def record(self, choice: Choice, outcome: Outcome, kernel: Kernel | None, *, again: bool = False) -> Record:
        """Stores an outcome in memory and in the log; `again` marks a second measurement of the same candidate.

        An undecided one goes into no log, so that the next session tries the candidate again, and changes nothing that is known of it.

        Raises:
            MachineError: `MOST_UNDECIDED` outcomes in a row are undecided.
        """
        algorithm, schedule = methods.split(choice.algorithm)
        record = Record(
            conv=str(self.conv), algorithm=algorithm, schedule=schedule, tile=choice.tile.as_dict(), outcome=outcome.outcome,
            message=outcome.message,
            samples_s=tuple(outcome.samples_s), error=outcome.error,
            tolerance=tolerance(self.conv, self.backend.accuracy(choice.tile)),
            extra_bytes=kernel.extra_bytes if kernel else None, device=self.backend.name, threads=self.backend.threads,
            target=self.backend.target, tvm=tvm.__version__, im2win=__version__,
            fingerprint=kernel.fingerprint if kernel else NO_KERNEL, generator=code_digest(self.backend.target, choice.algorithm),
            rivals=self._beside(choice), seed=self.seed,
            trial=next((i for i, (c, _) in enumerate(self.tried) if c.key == choice.key), len(self.tried)), date=utc_now(),
        )  # fmt: skip
        self._undecided = self._undecided + 1 if outcome.undecided else 0
        if self._undecided >= MOST_UNDECIDED:
            raise MachineError(f"{MOST_UNDECIDED} candidates in a row failed, and none is to blame; {outcome.message}")
        if outcome.undecided:
            self.outcomes["undecided"] = self.outcomes.get("undecided", 0) + (not again)
            self.tried += [] if again else [(choice, math.inf)]
            return record
        self.log.append(record)
        self._note_kernel(choice, record)
        self.seconds[choice.key] = record.seconds
        self.outcomes[outcome.outcome] = self.outcomes.get(outcome.outcome, 0) + (not again)
        if again:
            self.tried = [(c, record.cost if c.key == choice.key else cost) for c, cost in self.tried]
        else:
            self.tried.append((choice, record.cost))
        return record

    def progress(self, algorithm: str = "", phase: str = "measuring") -> Progress:
        """The current `Progress`."""
        elapsed, new = time.monotonic() - self.started, len(self.tried) - self.resumed
        best_s = self.seconds[self.best[0].key] if self.best else None
        trial = len(self.tried) - self._free
        left = elapsed / new * (self.trials - trial) if new else None
        return Progress(
            self.conv, algorithm, trial, self.trials, best_s, self.seconds.get(self.default.key), elapsed, left, phase
        )
