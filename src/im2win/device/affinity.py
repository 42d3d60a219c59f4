"""Keeping the calling thread off the CPUs of the pool: half of a measurement's speed hangs on it.

TVM binds its pool's workers to CPUs, not the thread that calls a kernel, which works too. When the caller happens to run on a worker's CPU
the scheduler may leave it there for the life of the process: both then share one CPU while another idles.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def leave_bound_cpus() -> None:
    """Moves the calling thread to CPUs that no other thread of this process is bound to; call it after a first kernel has run."""
    tasks = Path("/proc/self/task")
    if not (hasattr(os, "sched_setaffinity") and tasks.is_dir()):  # Linux only
        return
    bound: set[int] = set()
    for task in tasks.iterdir():
        cpus = os.sched_getaffinity(int(task.name))
        if len(cpus) == 1 and int(task.name) != os.getpid():
            bound |= cpus
    if free := os.sched_getaffinity(0) - bound:
        os.sched_setaffinity(0, free)


@contextlib.contextmanager
def off_bound_cpus() -> Iterator[None]:
    """The same for as long as it lasts: what the process may use is counted by where its calling thread may run."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    leave_bound_cpus()
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)
