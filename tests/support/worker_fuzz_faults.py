"""Process that stands for `fuzz_worker`: some of its kernels are wrong, end the process, or never end. It notes every index that it runs.

The environment variable FAULTS is JSON: {"3": "wrong", "5": "crash", "6": "hang", "7": "slow"}; what it does not name is right at once.
RAN names the file of the indices.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from fuzz_jobs import Answer, Job

from im2win.common.worker_pool import serve


def handle(job: Job) -> Answer:
    with open(os.environ["RAN"], "a") as file:
        file.write(f"{job.index}\n")
    fault = json.loads(os.environ.get("FAULTS", "{}")).get(str(job.index), "")
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault in ("hang", "slow"):
        time.sleep(1000 if fault == "hang" else 0.2)
    return _with_a_lost_term(job) if fault == "wrong" else Answer("equal")


def _with_a_lost_term(job: Job) -> Answer:
    """The answer of the true process where kernels are called without their last input channel."""
    import fuzz_cases
    import fuzz_worker

    built = fuzz_cases.build_tile

    def lossy(*arguments: Any) -> Any:
        op = built(*arguments)

        def call(data: Any, filter: Any, *others: Any) -> Any:
            filter = filter.copy()
            filter[:, -1] = 0
            return op(data, filter, *others)

        return call

    fuzz_cases.build_tile = lossy  # type: ignore[assignment]
    try:
        return fuzz_worker.handle(job)
    finally:
        fuzz_cases.build_tile = built


def ran() -> list[int]:
    """The indices that processes ran, in order."""
    path = Path(os.environ["RAN"])
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def main(job_fd: int, result_fd: int) -> None:
    serve(handle, job_fd, result_fd)
