"""The worker pool of tuning: processes that rank, build and measure candidates for a session."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from im2win.codegen.llvm import ToolchainError
from im2win.common.worker_pool import Worker, WorkerError, in_order
from im2win.device.cpu import usable_cpus
from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Tile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.build_worker import RankJob, rank
from im2win.tuner.fleet.fleet import Fleet

RANK_S = 300.0  # time limit in seconds for ranking one algorithm's tiles

Ranking = Mapping[str, list[tuple[float, Tile]]]
"""By algorithm: its tiles with the model's estimates, best first."""


def check_cuda_runtime() -> None:
    """Raises ToolchainError where TVM could not load what makes machine code of CUDA part of a library, since there is no driver library.

    TVM then writes libraries that hold the source instead, without a word, and their fingerprints are those of no kernel.
    """
    import tvm  # noqa: F401 - registers the function if it can
    import tvm_ffi

    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        raise ToolchainError(
            "building kernels for a GPU needs the library of NVIDIA's driver (libcuda.so.1) on this machine, though no GPU: install the "
            "driver, or run the tuner on a machine that has it."
        )


class Pool:
    """A worker pool for one device: processes that build, and one that measures. Several sessions can use a pool one after the other.

    Args:
        place: index of the measurement slot, one of the device's `measurement_slots()`: on a machine with several GPUs, which GPU measures.
        share: number of pools that share the CPUs (`pools` starts one for every measurement slot).
        fleet: the workers that measure in place of a process here; `device` is theirs. This machine builds alone.

    Raises:
        ToolchainError: the machine lacks a tool or a library that building or measuring for the device needs.
    """

    def __init__(self, device: Device, place: int = 0, share: int = 1, fleet: Fleet | None = None) -> None:
        backend = backend_for(device)
        backend.check_tools()
        if backend.target == "cuda":
            check_cuda_runtime()
        self.fleet = fleet
        on_gpu = backend.target == "cuda"
        if fleet is not None:
            builders = max(1, usable_cpus())
            self.builders = [Worker("im2win.tuner.build_worker", {"OMP_NUM_THREADS": "1"}, torch=on_gpu) for _ in range(builders)]
            self.runner: Worker | Fleet = fleet
            return
        builders = max(1, backend.workers // share)
        self.builders = [Worker("im2win.tuner.build_worker", {"OMP_NUM_THREADS": "1"}, torch=on_gpu) for _ in range(builders)]
        self.runner = Worker(backend.runner, backend.measurement_slots()[place], torch=on_gpu)

    def ranked(
        self, conv: Conv2d, names: Sequence[str], device: Device, accuracy: Accuracy, report: Callable[[int], None] = lambda count: None
    ) -> Ranking:
        """The ranked tiles of each algorithm.

        Worker processes rank the algorithms in parallel; this process repeats what a worker fails at. `report` is called with the number of
        algorithms that are ranked.
        """
        jobs = [RankJob(conv, name, device, accuracy) for name in names]
        ranking: dict[str, list[tuple[float, Tile]]] = {}
        report(0)
        for job, answer in zip(jobs, in_order(self.builders, jobs, RANK_S), strict=True):
            ranking[job.algorithm] = rank(job) if isinstance(answer, WorkerError) else answer
            report(len(ranking))
        return ranking

    def ranked_together(self, problems: Sequence[tuple[Conv2d, Sequence[str]]], device: Device, accuracy: Accuracy) -> list[Ranking]:
        """As `ranked`, of several problems, each with its algorithms, so that no process waits for the last algorithm of one of them."""
        jobs = [RankJob(conv, name, device, accuracy) for conv, names in problems for name in names]
        answers = zip(jobs, in_order(self.builders, jobs, RANK_S), strict=True)
        found = ((job, rank(job) if isinstance(answer, WorkerError) else answer) for job, answer in answers)
        return [{job.algorithm: tiles for job, tiles in itertools.islice(found, len(names))} for _, names in problems]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *reason: object) -> None:
        for worker in self.builders:
            worker.close()
        if isinstance(self.runner, Worker):  # a fleet serves other sessions, too
            self.runner.close()


@contextlib.contextmanager
def pools(device: Device, most: int, fleet: Fleet | None = None) -> Iterator[list[Pool]]:
    """A worker pool for every measurement slot of the device, at most `most` of them, so that several GPUs measure at the same time.

    A fleet is one pool: its workers share the candidates of one session.

    Raises:
        ToolchainError: as `Pool`.
    """
    if fleet is not None:
        with Pool(device, fleet=fleet) as pool:
            yield [pool]
        return
    count = min(len(backend_for(device).measurement_slots()), most)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Pool(device, place, count)) for place in range(count)]
