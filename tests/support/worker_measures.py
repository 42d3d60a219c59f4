"""A runner's `main` for tests of fleets: a candidate's library is a text that says what measuring it does, and no kernel runs.

"ok SECONDS", "wrong", "crash", "hang", "sleep SECONDS" (then ok), or "unplug TIMES FILE" (the worker is killed so often, which the file
counts; then ok). The environment variable BEHAVIOUR makes the worker itself "lie" (its
outputs are not the problem's), "accuse" (every candidate is wrong) or answer with "rubbish" (what is no outcome).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from im2win.common.worker_pool import serve
from im2win.numerics.reference import random_tensors, reference
from im2win.tuner.runners.cpu import Outcome, RunJob, probed


def output(job: RunJob) -> Any:
    """The problem's output in float64."""
    tensors = random_tensors(job.conv, job.seed)
    given = {name: tensors[name] for name in ("bias", "residual") if name in tensors}
    return reference(job.conv, tensors["data"], tensors["filter"], **given)


def handle(job: RunJob) -> Any:
    behaviour = os.environ.get("BEHAVIOUR", "")
    if behaviour == "rubbish":
        return [Outcome("splendid", samples_s=[-1.0])]
    outcomes = []
    for candidate in job.candidates:
        word, *rest = candidate.path.read_text().split()
        if word == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if word == "unplug" and (count := Path(rest[1])).stat().st_size < int(rest[0]):
            with count.open("a") as file:
                file.write(".")
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        if word in ("hang", "sleep"):
            time.sleep(600 if word == "hang" else float(rest[0]))
        if word == "wrong" or behaviour == "accuse":
            outcomes.append(Outcome("wrong", "9 elements are NaN"))
            continue
        values = probed(output(job), job.conv, job.probe)
        values = np.roll(values, 1) if behaviour == "lie" else values
        outcomes.append(Outcome("ok", error=0.0, samples_s=[float(rest[0]) if word == "ok" else 1e-3] * 3, probed=values))
    return outcomes


def main(job_fd: int, result_fd: int) -> None:
    serve(handle, job_fd, result_fd)
