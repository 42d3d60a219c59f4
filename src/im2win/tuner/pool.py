"""The worker processes of tuning: what they put in order, build and measure for a session."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from im2win.common.worker_pool import Worker, WorkerError, in_order
from im2win.numerics.reference import Accuracy
from im2win.registry.algorithms import ALGORITHMS
from im2win.registry.backends import Device, Kernel, Tile, backend_for
from im2win.spec.conv2d import Conv2d
from im2win.tuner.build_worker import BuildJob, Built, RankJob, rank
from im2win.tuner.cost_model import Choice
from im2win.tuner.runners.cpu import Candidate, Outcome, RunJob

if TYPE_CHECKING:
    from im2win.tuner.session import Session

BUILD_S, RUN_S = 60.0, 30.0  # limits of one candidate, in seconds; running also gets the time its check and samples need
RANK_S = 300.0  # of putting one algorithm's tiles in order

Ranking = Mapping[str, list[tuple[float, Tile]]]
"""By algorithm: its tiles with the model's estimates, best first."""


class Crew:
    """The worker processes that build and measure on one device; sessions may follow one another on the same.

    Args:
        place: which of the places where this device's kernels can be measured.
        share: crews that share the CPUs (`crews` has one for every place).

    Raises:
        ToolchainError: the machine lacks what building or measuring for the device needs.
    """

    def __init__(self, device: Device, place: int = 0, share: int = 1) -> None:
        backend = backend_for(device)
        backend.check_tools()
        builders = max(1, backend.workers // share)
        on_gpu = backend.target == "cuda"
        self.builders = [Worker("im2win.tuner.build_worker", {"OMP_NUM_THREADS": "1"}, torch=on_gpu) for _ in range(builders)]
        self.runner = Worker(backend.runner, backend.places()[place])

    def ranked(self, conv: Conv2d, names: Sequence[str], device: Device, accuracy: Accuracy) -> Ranking:
        """The spaces of algorithms in order, each by a process of its own as far as there are any; what one fails at is done here."""
        jobs = [RankJob(conv, name, device, accuracy) for name in names]
        answers = list(in_order(self.builders, jobs, RANK_S))
        return {job.algorithm: rank(job) if isinstance(one, WorkerError) else one for job, one in zip(jobs, answers, strict=True)}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *reason: object) -> None:
        for worker in (*self.builders, self.runner):
            worker.close()


@contextlib.contextmanager
def crews(device: Device, most: int) -> Iterator[list[Crew]]:
    """A crew for every place where this device's kernels can be measured, `most` at most: several GPUs measure at the same time.

    Raises:
        ToolchainError: as `Crew`.
    """
    count = min(len(backend_for(device).places()), most)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Crew(device, place, count)) for place in range(count)]


class Measurement:
    """A session's work for its crew, and the folder of its libraries."""

    def __init__(self, session: Session, crew: Crew) -> None:
        self.session, self.builders, self.runner = session, crew.builders, crew.runner
        self.folder = tempfile.TemporaryDirectory(prefix="im2win-tune-")
        self.libraries: dict[Any, Path] = {}
        self.kernels: dict[Any, Kernel | None] = {}
        self._serial = 0

    def close(self) -> None:
        """Removes the libraries."""
        self.folder.cleanup()

    def _job(self, choice: Choice) -> BuildJob:
        self._serial += 1
        path = self.libraries[choice.key] = Path(self.folder.name) / f"{self._serial}.so"
        return BuildJob(self.session.conv, choice.algorithm, choice.tile, self.session.device, path)

    def _failed(self, choice: Choice, built: Built | WorkerError) -> Outcome | None:
        """The outcome of a build, if it failed."""
        if isinstance(built, WorkerError):
            built = Built("timeout" if built.kind == "timeout" else "build_error", f"building: {built}")
        self.kernels[choice.key] = built.kernel
        return Outcome(built.outcome, built.message) if built.outcome != "ok" else None

    def each_built(self, batch: list[Choice]) -> Iterator[tuple[Choice, Outcome | None]]:
        """Candidates in order as they are built, with the outcome of those that failed.

        A GPU measures while the CPUs build the rest. Where the CPU measures, everything is built before anything is handed out.
        """
        answers = in_order(self.builders, [self._job(choice) for choice in batch], BUILD_S)
        pairs = ((choice, self._failed(choice, built)) for choice, built in zip(batch, answers, strict=True))
        yield from pairs if self.session.backend.target == "cuda" else list(pairs)

    def _how(self, choice: Choice) -> tuple[Any, Accuracy, int]:
        """What the measuring process must know of a candidate: how filters are packed, its accuracy, bytes of a tensor made first."""
        backend, row = self.session.backend, ALGORITHMS[choice.algorithm]
        made = row.cuda.made_bytes(self.session.conv, choice.tile) if backend.target == "cuda" and row.cuda else 0
        return backend.pack(self.session.conv, choice.tile), backend.accuracy(choice.tile), made

    def run(self, choices: list[Choice], **how: Any) -> list[Outcome]:
        """Checks and times built candidates in the measuring process."""
        session = self.session
        job = RunJob(
            session.conv, tuple(Candidate(self.libraries[c.key], *self._how(c)) for c in choices), session.seed, **how
        )
        slowest = max((s for _, s in session.tried if math.isfinite(s)), default=session.conv.flops / 1e9)
        limit = RUN_S * len(choices) + 60 * slowest + session.conv.flops / 2e9  # the reference runs on numpy in float64
        try:
            outcomes: list[Outcome] = self.runner.call(job, limit)
        except WorkerError as error:
            return [Outcome(error.kind, f"running: {error}")] * len(choices)
        return outcomes
