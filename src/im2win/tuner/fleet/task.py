"""A job in a fleet's queue, and what it gives."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from im2win.common.worker_pool import WorkerError
from im2win.tuner.runners.cpu import Outcome, RunJob


@dataclass
class Answer:
    """What a job gave: its outcomes, or how its process failed, and the worker that ran it."""

    result: list[Outcome] | WorkerError
    worker: str

    def outcomes(self) -> list[Outcome]:
        """The outcomes.

        Raises:
            WorkerError: the job's process failed.
        """
        if isinstance(self.result, WorkerError):
            raise self.result
        return self.result

    @property
    def verdict(self) -> bool:
        """Whether it speaks against a candidate."""
        return isinstance(self.result, WorkerError) or any(one.outcome != "ok" for one in self.result)

    @property
    def why(self) -> str:
        """The first verdict, in words."""
        if isinstance(self.result, WorkerError):
            return f"{self.result.kind}: {self.result}"
        return next((f"{one.outcome}: {one.message}" for one in self.result if one.outcome != "ok"), "ok")


@dataclass(eq=False)
class Task:
    job: RunJob
    limit_s: float
    only: str | None = None  # the one worker that may run it
    future: Future[Answer] = field(default_factory=Future)
    avoid: set[str] = field(default_factory=set)  # workers that should not run it, if there are others
    deaths: set[str] = field(default_factory=set)  # workers that were lost with it
    by_chance: int = 0  # workers that the fleet had lost by chance when the first of them was
    verdict: Answer | None = None  # against a candidate, for a second worker to confirm
