"""Compiles the GPU kernels of a study on all CPUs, before the first one is measured or while others are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from im2win.builder.build import cuda_manifest, looked_up
from im2win.codegen import cuda as cuda_codegen
from im2win.common.messages import brief
from im2win.common.worker_pool import JobQueue, Worker, WorkerError, in_order, serve
from im2win.device.gpu import Gpu
from im2win.registry import cuda_lowering
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.runtime.cuda import CudaOp
from im2win.runtime.manifest import Manifest
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.build_worker import RankJob, rank

if TYPE_CHECKING:
    from im2win.runtime.cuda import CudaOp

BUILD_S = 180.0

Name = TypeVar("Name", bound=Hashable)


class Recipe(Protocol):
    """How one kernel is generated; a plain value that can be sent to another process."""

    def compile(self, path: Path) -> Manifest:
        """Compiles into the library `path`.

        Raises:
            TileError: the kernel cannot be generated for the problem; other exceptions are the compiler's.
        """


class BuildError(RuntimeError):
    """A kernel that could not be compiled. The message says why."""


@dataclass(frozen=True)
class Library:
    """A compiled kernel and its manifest."""

    path: Path
    manifest: Manifest


def load(library: Library | str) -> CudaOp:
    """The operator in a library.

    Raises:
        BuildError: the kernel was not compiled, with the reason.
    """
    if isinstance(library, str):
        raise BuildError(library)
    return CudaOp(library.manifest, library.path)


@dataclass(frozen=True)
class TileRecipe:
    """A kernel of one algorithm of the registry, or of the best one ("auto"), with the analytic model's tile.

    Attributes:
        recorded: use the tile of a tuning record instead, if one applies; records in the folder `logs` precede those that ship.
        tile: use this tile of the named algorithm.
        overlap: whether its launches overlap; None: as the analytic model says (`registry.cuda_lowering.overlaps`).
    """

    conv: Conv2d
    algorithm: str
    gpu: Gpu
    accuracy: Accuracy = "float32"
    recorded: bool = False
    tile: Any = None
    logs: Path | None = None
    overlap: bool | None = None

    def compile(self, path: Path) -> Manifest:
        """Compiles into the library `path`."""

        tier = ""
        if self.tile is not None:
            name, tile = self.algorithm, self.tile
        elif self.recorded:
            name, tile, tier = looked_up(self.conv, self.gpu, self.logs, self.algorithm, self.accuracy)
        else:
            name, tile = default_tile(self.conv, self.algorithm, self.gpu, self.accuracy)
        backend = backend_for(self.gpu, self.accuracy)
        row = schedule_of(name)
        cuda_codegen.compile_module(cuda_lowering.lower(self.conv, row, tile, self.gpu, self.overlap), self.gpu).export(path)
        made, pack = backend.workspace_bytes(self.conv, row, tile), backend.pack(self.conv, row, tile)
        return cuda_manifest(self.conv, name, tile.as_dict(), pack, self.gpu, threads=tile.threads, made=made, tuned=tier == "exact")


@dataclass(frozen=True)
class Job:
    """Compile a recipe's kernel into the library `path`."""

    recipe: Recipe
    path: Path


def build(job: Job) -> Manifest | str:
    """The manifest of the compiled kernel, or the reason why it was not compiled."""
    try:
        return job.recipe.compile(job.path)
    except Exception as error:
        return brief(error)


def handle(job: Job | RankJob) -> Manifest | str | list[tuple[float, Any]]:
    """Runs a job of either kind."""
    return rank(job) if isinstance(job, RankJob) else build(job)


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    serve(handle, job_fd, result_fd)


class Begun(Generic[Name]):
    """Recipes that are being compiled in the background, in the order in which they were given."""

    def __init__(self, jobs: Mapping[Name, Job], queue: JobQueue) -> None:
        self._futures: dict[Name, tuple[Job, Future[Any]]] = {name: (job, queue.submit(job)) for name, job in jobs.items()}

    def __getitem__(self, name: Name) -> Library | str:
        """The library of a recipe, or the reason why there is none. It waits until the recipe is compiled."""
        job, future = self._futures[name]
        return _library(job, future.result())


def _library(job: Job, answer: Manifest | str | WorkerError) -> Library | str:
    """What a job's answer means."""
    failed = f"building: {answer}" if isinstance(answer, WorkerError) else answer
    return failed if isinstance(failed, str) else Library(job.path, failed)


class Builders:
    """A pool of processes that compile. It serves several sets of recipes, since starting a process takes seconds.

    Args:
        processes: number of processes; None: one less than there are CPUs.
    """

    def __init__(self, processes: int | None = None) -> None:
        count = processes or max(1, (os.cpu_count() or 1) - 1)
        self._workers = [Worker(__name__, {"OMP_NUM_THREADS": "1"}) for _ in range(count)]

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *reason: object) -> None:
        for worker in self._workers:
            worker.close()

    def build_all(self, recipes: Mapping[Name, Recipe], folder: Path) -> dict[Name, Library | str]:
        """Compiles every recipe into a library in `folder`. A recipe that failed has the reason in its place."""
        jobs = _jobs(recipes, folder)
        answers = in_order(self._workers, list(jobs.values()), BUILD_S)
        return {name: _library(job, answer) for (name, job), answer in zip(jobs.items(), answers, strict=True)}

    def ranked(self, jobs: Sequence[RankJob]) -> list[list[tuple[float, Any]]]:
        """The tiles of each job's algorithm with the model's estimates, best first. This process repeats what a worker fails at."""
        answers = in_order(self._workers, jobs, BUILD_S)
        return [rank(job) if isinstance(answer, WorkerError) else answer for job, answer in zip(jobs, answers, strict=True)]

    @contextlib.contextmanager
    def begun(self, recipes: Mapping[Name, Recipe], folder: Path) -> Generator[Begun[Name]]:
        """As `build_all`, in the background. What is not compiled at the end of the context is dropped.

        The times of a GPU's kernels are taken by the GPU, so that they may be measured meanwhile.
        """
        queue = JobQueue(self._workers, BUILD_S)
        try:
            yield Begun(_jobs(recipes, folder), queue)
        finally:
            queue.close()


def _jobs(recipes: Mapping[Name, Recipe], folder: Path) -> dict[Name, Job]:
    return {name: Job(recipe, folder / f"{number}.so") for number, (name, recipe) in enumerate(recipes.items())}


def build_all(recipes: Mapping[Name, Recipe], folder: Path, processes: int | None = None) -> dict[Name, Library | str]:
    """Compiles recipes with a temporary pool; see `Builders`."""
    with Builders(processes) as builders:
        return builders.build_all(recipes, folder)
