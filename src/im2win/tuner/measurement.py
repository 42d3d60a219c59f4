"""Builds a session's candidates in parallel, in the background, and measures them one at a time, in the processes of a worker pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

from im2win.common.temporary import TemporaryFolder
from im2win.common.worker_pool import JobQueue, WorkerError
from im2win.registry.interface import Kernel
from im2win.registry.schedules import schedule_of
from im2win.spec.accuracy import Accuracy
from im2win.tuner.build_worker import BuildJob, Built, failed_build
from im2win.tuner.cost_model import Choice
from im2win.tuner.fleet.task import Answer
from im2win.tuner.pool import Pool
from im2win.tuner.runners.cpu import Candidate, Outcome, RunJob
from im2win.tuner.runners.tensors import special
from im2win.tuner.session import Session

BUILD_S, RUN_S = 60.0, 30.0  # seconds for one candidate; `run` adds the time that check and samples need
DISAGREED = 1.5  # times of one candidate on two workers that differ by more are not of equal, undisturbed machines
DROPPED = 1.08  # finals go on without a candidate that is so many times slower than the best: noise makes less than that of equal kernels


class Measurement:
    """A session's jobs for its worker pool, and the temporary folder of the compiled libraries."""

    def __init__(self, session: Session, pool: Pool) -> None:
        self.session, self.runner, self.fleet = session, pool.runner, pool.fleet
        self._builds, self._builders = JobQueue(pool.builders, BUILD_S), len(pool.builders)
        self._started: dict[Any, Future[Any]] = {}
        self.folder = TemporaryFolder("tune")
        self.libraries: dict[Any, Path] = {}
        self.kernels: dict[Any, Kernel | None] = {}
        self._serial = 0

    def close(self) -> None:
        """Ends what is still being built, and removes the libraries."""
        self._builds.close()
        self.folder.cleanup()

    def _build_job(self, choice: Choice) -> BuildJob:
        self._serial += 1
        path = self.libraries[choice.key] = Path(self.folder.name) / f"{self._serial}.so"
        return BuildJob(self.session.conv, choice.algorithm, choice.tile, self.session.device, path)

    def _failed(self, choice: Choice, built: Built | WorkerError) -> Outcome | None:
        """The outcome of a failed build; None if the build succeeded."""
        if isinstance(built, WorkerError):
            built = failed_build(built, Path(self.folder.name))
        self.kernels[choice.key] = built.kernel
        return Outcome(built.outcome, built.message, undecided=built.undecided) if built.outcome != "ok" else None

    @property
    def builds_ahead(self) -> bool:
        """Whether candidates are built while others are measured: by a GPU, or by a fleet. A CPU's times would be disturbed."""
        return self.session.backend.target == "cuda" or self.fleet is not None

    @property
    def ahead(self) -> int:
        """How many candidates are built while others are measured: one for each process that builds."""
        return self._builders if self.builds_ahead else 0

    def start(self, batch: list[Choice]) -> None:
        """Begins to build candidates, behind those that were begun before."""
        for choice in batch:
            if choice.key not in self._started:
                self._started[choice.key] = self._builds.submit(self._build_job(choice))

    def each_built(
        self, batch: list[Choice], report: Callable[[int], None] = lambda built: None
    ) -> Iterator[tuple[Choice, Outcome | None]]:
        """Yields candidates in order as they are built, each with its outcome if the build failed.

        A CPU measures nothing before the whole batch is built (`builds_ahead`). `report` is called with the number of candidates that are
        built.
        """
        pairs = self._built(batch, report)
        yield from pairs if self.builds_ahead else list(pairs)

    def _built(self, batch: list[Choice], report: Callable[[int], None]) -> Iterator[tuple[Choice, Outcome | None]]:
        report(0)
        self.start(batch)
        for count, choice in enumerate(batch, 1):
            failed = self._failed(choice, self._started.pop(choice.key).result())
            report(count)
            yield choice, failed

    def _how(self, choice: Choice) -> tuple[Any, Accuracy, int]:
        """What the measuring process must know of a candidate: filter packing, accuracy, and bytes of the workspace of its transform."""
        backend, row = self.session.backend, schedule_of(choice.algorithm)
        conv, tile = self.session.conv, choice.tile
        return backend.pack(conv, row, tile), backend.accuracy(tile), backend.workspace_bytes(conv, row, tile)

    def run_finals(self, choices: list[Choice], samples: int, seconds: float) -> list[Outcome]:
        """As `run`; on a CPU half of the samples are of a new process, which runs those that the first did not drop as far behind.

        Where memory lies differs between processes, which makes a kernel some per cent faster or slower in one of them than in another.
        """
        if self.fleet is not None:
            return self._run_finals_on_two(choices, samples, seconds)
        if self.session.backend.target != "cpu":
            return self.run(choices, samples=samples, seconds=seconds)
        half = {"samples": -(-samples // 2), "seconds": seconds / 2, "drop_above": DROPPED}
        first = self.run(choices, **half)
        kept = [place for place, one in enumerate(first) if len(one.samples_s) >= half["samples"]]
        self.runner.close()
        second = dict(zip(kept, self.run([choices[place] for place in kept], **half) if kept else [], strict=True))
        return [_joined(one, second[place]) if place in second else one for place, one in enumerate(first)]

    def _run_finals_on_two(self, choices: list[Choice], samples: int, seconds: float) -> list[Outcome]:
        """As `run_finals`, with halves of the samples of two workers, if there are two.

        Where their medians of a candidate differ by more than `DISAGREED`, only the slower samples count: one worker is disturbed, or says
        what is not true, and no candidate may win by that.
        """
        half: dict[str, Any] = {"samples": -(-samples // 2), "seconds": seconds / 2, "drop_above": DROPPED}
        parts: list[list[Outcome]] = []
        avoid: tuple[str, ...] = ()
        for _ in range(2):
            answer = self.submit(choices, avoid=avoid, **half).result()
            avoid = (answer.worker,)
            if not isinstance(answer.result, WorkerError):
                parts.append(answer.result)
            elif len(choices) > 1:
                parts.append([self.run([choice], **half)[0] for choice in choices])
            else:
                parts.append([failed(answer.result)])
        return [_agreed(one, other) for one, other in zip(*parts, strict=True)]

    def _job(self, choices: list[Choice], **how: Any) -> tuple[RunJob, float]:
        """A job for the measuring process, and its limit in seconds."""
        session = self.session
        job = RunJob(
            session.conv, tuple(Candidate(self.libraries[c.key], *self._how(c)) for c in choices), session.seed,
            folder=Path(self.folder.name), **how,
        )  # fmt: skip
        slowest = max((s for _, s in session.tried if math.isfinite(s)), default=session.conv.flops / 1e9)
        # candidates of finals run about twenty times each, and up to twenty times while they are checked; the reference is computed by
        # numpy in float64
        reference_s = session.conv.flops / 2e9 * (1 + len(special(session.conv)))
        return job, (RUN_S + 40 * slowest) * len(choices) + 60 * slowest + reference_s

    def run_anew(self, choices: list[Choice], **how: Any) -> list[Outcome]:
        """As `run`, in a new process; of a fleet, in whichever process is free."""
        if self.fleet is None:
            self.runner.close()
        return self.run(choices, **how)

    def submit(self, choices: list[Choice], *, only: str | None = None, avoid: tuple[str, ...] = (), **how: Any) -> Future[Answer]:
        """Queues built candidates, as one job, for the workers of the fleet; arguments as for `Fleet.submit`."""
        assert self.fleet is not None
        return self.fleet.submit(*self._job(choices, **how), only=only, avoid=avoid)

    def run(self, choices: list[Choice], **how: Any) -> list[Outcome]:
        """Checks and times built candidates in the measuring process.

        If it dies with several, each is run alone: only the one that was running is to blame.
        """
        try:
            outcomes: list[Outcome] = self.runner.call(*self._job(choices, **how))
        except WorkerError as error:
            if len(choices) > 1:
                return [self.run([choice], **how)[0] for choice in choices]
            return [failed(error)]
        return outcomes


def failed(error: WorkerError) -> Outcome:
    """The outcome of a candidate whose process failed."""
    return Outcome(error.kind, f"running: {error}", undecided=error.killed)


def _agreed(first: Outcome, second: Outcome) -> Outcome:
    """One outcome of those of two workers: joined where their times are about the same, else the slower one."""
    if first.outcome == second.outcome == "ok":
        one, other = median(first.samples_s), median(second.samples_s)
        if max(one, other) > DISAGREED * min(one, other):
            return first if one > other else second
    return _joined(first, second)


def _joined(first: Outcome, second: Outcome) -> Outcome:
    """One outcome of two of a candidate: what went wrong in either, or all samples."""
    if first.undecided or second.undecided:
        return second if first.undecided else first
    if first.outcome != "ok" or second.outcome != "ok":
        return first if first.outcome != "ok" else second
    error = max((one.error for one in (first, second) if one.error is not None), default=None)
    return Outcome("ok", first.message, error, [*first.samples_s, *second.samples_s])
