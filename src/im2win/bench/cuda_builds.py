"""Compiles the GPU kernels of a study on all CPUs before the first one is measured."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from im2win.builder.build import cuda_manifest, looked_up
from im2win.codegen import cuda as cuda_codegen
from im2win.common.messages import brief
from im2win.common.worker_pool import Worker, WorkerError, in_order, serve
from im2win.device.gpu import Gpu
from im2win.registry import cuda_lowering
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.runtime.cuda import CudaOp
from im2win.runtime.manifest import Manifest
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

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


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    serve(build, job_fd, result_fd)


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
        jobs = [Job(recipe, folder / f"{number}.so") for number, recipe in enumerate(recipes.values())]
        built = dict[Name, Library | str]()
        for name, job, answer in zip(recipes, jobs, in_order(self._workers, jobs, BUILD_S), strict=True):
            failed = f"building: {answer}" if isinstance(answer, WorkerError) else answer
            built[name] = failed if isinstance(failed, str) else Library(job.path, failed)
        return built


def build_all(recipes: Mapping[Name, Recipe], folder: Path, processes: int | None = None) -> dict[Name, Library | str]:
    """Compiles recipes with a temporary pool; see `Builders`."""
    with Builders(processes) as builders:
        return builders.build_all(recipes, folder)
