"""The worker processes of tuning: what they put in order, build and measure for a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from im2win.common.worker_pool import Worker, WorkerError, in_order
from im2win.registry.backends import Device, Tile, backend_for
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.build_worker import RankJob, rank

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
