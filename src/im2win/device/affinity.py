"""Keeps the calling thread off the CPUs of TVM's own pool, which can double the speed of a measurement of TVM as a peer.

TVM binds its pool's workers to CPUs, but not the thread that calls a kernel, which computes too. If the caller happens to run on a worker's
CPU, the scheduler may leave it there for the life of the process: both then share one CPU while another one is idle.
"""

from __future__ import annotations

import os
from pathlib import Path


def leave_bound_cpus() -> None:
    """Moves the calling thread to CPUs that no other thread of this process is bound to. Call it after a first kernel has run."""
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
