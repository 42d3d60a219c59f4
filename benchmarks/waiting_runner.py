"""A runner's `main` for `fleet.py --wait`: measuring a candidate is a wait of WAIT_S seconds, after which its outputs are right.

Its time is drawn by the library's bytes, the same in every process. No kernel runs, so that workers on few CPUs do not disturb each other.
"""

from __future__ import annotations

import functools
import os
import time
import zlib
from typing import Any

from im2win.common.worker_pool import serve
from im2win.numerics.reference import random_tensors, reference
from im2win.spec.conv2d import Conv2d
from im2win.tuner.runners.cpu import Outcome, RunJob, probed


@functools.lru_cache(1)
def output(conv: Conv2d, seed: int) -> Any:
    """The problem's output in float64."""
    tensors = random_tensors(conv, seed)
    given = {name: tensors[name] for name in ("bias", "residual", "scale") if name in tensors}
    return reference(conv, tensors["data"], tensors["filter"], **given)


def handle(job: RunJob) -> list[Outcome]:
    outcomes = []
    for candidate in job.candidates:
        time.sleep(float(os.environ["WAIT_S"]))
        seconds = 1e-3 * (1 + zlib.crc32(candidate.path.read_bytes()) % 1000 / 1000)
        values = probed(output(job.conv, job.seed), job.conv, job.probe)
        outcomes.append(Outcome("ok", error=0.0, samples_s=[seconds] * job.samples, probed=values))
    return outcomes


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    serve(handle, job_fd, result_fd)
