"""Runs TVM's default searches of many layers at once.

One after the other, most CPUs would wait most of the time for the last candidate to compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win.common.messages import brief
from im2win.common.worker_pool import Worker, WorkerError, in_order, serve
from im2win.device.cpu import usable_cpus
from im2win.registry.backends import Device
from im2win.spec.conv2d import Conv2d

SEARCH_S = 1800.0  # seconds for one layer
_BUSY = 2  # threads or compiling processes for each CPU, because layers end at different times


@dataclass(frozen=True)
class Job:
    """Put a layer's search into the cache."""

    conv: Conv2d
    trials: int
    device: Device
    cache: Path
    cpus: int


def find(job: Job) -> float | str:
    """Seconds per call of the best candidate, or the reason why there is none."""
    from im2win.bench.peers.tvm_default import search

    try:
        return search(job.conv, job.trials, job.device, job.cache, job.cpus)
    except Exception as error:
        return brief(error)


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    serve(find, job_fd, result_fd)


def search_all(
    convs: Iterable[Conv2d], trials: int, device: Device, cache: Path, *, note: Callable[[str], Any] | None = None,
    processes: int | None = None, limit_s: float = SEARCH_S,
) -> dict[Conv2d, str]:
    """Searches in parallel for those layers that TVM supports and the cache lacks. Candidates are measured one at a time.

    A layer is in the cache as soon as its search ends, so that an interrupted run continues with the others.

    Args:
        trials: candidates for each layer.
        cache: see `im2win.bench.peers.cpu.TvmDefault`.
        note: called with a line of text when searches begin, and for every layer.
        processes: searches at a time; None: as many as CPUs may be used.
        limit_s: seconds that the results of the others may wait for a layer's search, which is then ended.

    Returns:
        The reasons why searches failed, by layer.
    """
    from im2win.bench.peers.tvm_default import lacks, refused

    say = note or (lambda text: None)
    wanted = [conv for conv in dict.fromkeys(convs) if refused(conv) is None and lacks(conv, trials, device, cache)]
    if not wanted:
        return {}
    cache.mkdir(parents=True, exist_ok=True)
    cpus = usable_cpus()
    count = min(len(wanted), processes or cpus)
    share = min(cpus, -(-_BUSY * cpus // count))
    jobs = [Job(conv, trials, device, cache, share) for conv in wanted]
    workers = [Worker(__name__, torch=False) for _ in range(count)]
    say(f"tvm: searching {len(wanted)} layers, {trials} trials each, {count} at a time")
    began, failed = time.monotonic(), dict[Conv2d, str]()
    try:
        for done, (conv, answer) in enumerate(zip(wanted, in_order(workers, jobs, limit_s), strict=True), 1):
            if isinstance(answer, (WorkerError, str)):
                failed[conv] = f"tvm: searching: {answer}"
            result = f"failed: {answer}" if conv in failed else f"best candidate {1e3 * answer:.3f} ms"
            say(f"tvm: {done}/{len(wanted)} {conv}: {result}, after {time.monotonic() - began:.0f} s")
    finally:
        for worker in workers:
            worker.close()
    return failed
