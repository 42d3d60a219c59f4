"""Looks up and compiles the convolutions of a model.

Those that the cache has are not compiled (`kept_kernels`). Many others are compiled in worker processes, since most of the work is Python
code.
"""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from im2win.builder.build import looked_up
from im2win.common.progress import Reporter
from im2win.common.quantities import counted
from im2win.common.worker_pool import Worker, WorkerError, compiles_only, serve
from im2win.export.c_abi.cpu import compiled, lowered
from im2win.frontends.models import kept_kernels
from im2win.frontends.models.kept_kernels import Built, Job
from im2win.frontends.models.program import tensors_of

_ALONE, _FEW = 8, 4  # at most so many convolutions, or on fewer CPUs, starting worker processes takes longer than it saves
_PATIENCE_S = 600.0


def build(job: Job) -> Built:
    """Runs a job."""
    name, tile, tier = looked_up(job.conv, job.machine, job.logs, accuracy=job.accuracy)
    if (kept := kept_kernels.held(job, name, tile, tier)) is not None:
        return kept
    module = lowered(job.conv, name, tile, job.machine, job.symbol)
    executable, demand = compiled(module, job.machine)
    executable.mod.write_to_file(str(job.path), "o")
    return Built(job.symbol, job.path, name, tile, tier, tensors_of(module[job.symbol]), (demand.serial, demand.task))


def _guarded(job: Job) -> Built | str:
    """Runs a job; a failure is returned as text."""
    try:
        return build(job)
    except Exception as error:
        return f"{job.conv}: {error}"


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    compiles_only()
    serve(_guarded, job_fd, result_fd)


def build_all(jobs: Sequence[Job], workers: int, reporter: Reporter | None = None) -> list[Built]:
    """The results of all jobs: from the cache, or else compiled, in `workers` processes if there are enough of them.

    Args:
        reporter: is told how many are done.

    Raises:
        ValueError: a job failed.
        RuntimeError: a worker process died.
    """
    found = dict(zip(jobs, kept_kernels.find(jobs), strict=True))
    missing = [job for job, built in found.items() if built is None]
    note = f"building {counted(len(missing), 'kernel')}"
    if missing and reporter is not None:
        reporter.step(0, note, total=len(missing))
    each = in_processes if len(missing) > _ALONE and workers >= _FEW else in_threads
    done: list[tuple[Job, Built]] = []
    try:
        for job, one in zip(missing, each(missing, workers), strict=True):
            kept_kernels.store(job, one)
            done.append((job, one))
            if reporter is not None:
                reporter.step(len(done), note)
    finally:  # where one fails, the next call compiles the others no more
        kept_kernels.keep(done)
    made = {**found, **dict(done)}
    return [built for job in jobs if (built := made[job]) is not None]


def in_threads(jobs: Sequence[Job], workers: int) -> Iterator[Built]:
    """Runs all jobs in this process; see `build_all`."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(build, jobs)


def in_processes(jobs: Sequence[Job], workers: int) -> Iterator[Built]:
    """Runs all jobs in `workers` processes; see `build_all`."""
    environment = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with ExitStack() as stack:
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(min(workers, len(jobs))):
            idle.put(stack.enter_context(Worker("im2win.frontends.models.convolutions", environment, torch=False)))

        def one(job: Job) -> Built:
            worker = idle.get()
            try:
                built = worker.call(job, _PATIENCE_S)
            except WorkerError as error:
                raise RuntimeError(f"compiling {job.conv}: {error}") from None
            finally:
                idle.put(worker)
            if isinstance(built, str):
                raise ValueError(built)
            assert isinstance(built, Built)
            return built

        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(one, jobs)
