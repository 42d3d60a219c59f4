"""The process of one subject: it serves requests of `im2win.bench.harness.Worker` over a pipe."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from im2win.bench.peers.subject import Subject, Tensors, Trial
from im2win.device.affinity import leave_bound_cpus
from im2win.spec.conv2d import Conv2d

ATTEMPTS = 3  # samples that are tried until one had its CPUs to itself
_CPUS = os.sched_getaffinity(0)


def _prepare(subject: Subject, conv: Conv2d, seed: int, threads: int, path: Path) -> tuple[Trial, tuple[Any, ...]]:
    os.sched_setaffinity(0, _CPUS)  # new threads inherit the affinity
    trial = subject.prepare(conv, Tensors.random(conv, seed), threads)
    trial.call()
    leave_bound_cpus()
    output = trial.read()
    np.save(path, output.astype(np.float32) if output.dtype.name == "bfloat16" else output)  # numpy's files know no bfloat16
    return trial, (trial.algorithm, trial.tuned, trial.extra_bytes, trial.tile, trial.tier)


def _warm(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Runs calls for `seconds`. Returns the seconds of the fastest call, and the mean number of CPUs in use."""
    start_cpu, begin = time.process_time(), time.perf_counter()
    fastest, end = float("inf"), begin + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now >= end:
            return fastest, (time.process_time() - start_cpu) / (now - begin)


def _sample(call: Callable[[], object], settle: float, calls: int, least_cpus: float) -> float:
    """Seconds per call over `calls` calls, repeated until the process had `least_cpus` CPUs."""
    seconds: list[float] = []
    for _ in range(ATTEMPTS):
        _warm(call, settle)
        start_cpu, start = time.process_time(), time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - start
        seconds.append(elapsed / calls)
        if time.process_time() - start_cpu >= least_cpus * elapsed:
            return seconds[-1]
    return min(seconds)


def serve(pipe: Connection[Any, Any]) -> None:
    """Answers requests until the pipe closes: (True, answer), or (False, message) for an exception of the subject."""
    trial: Trial | None = None
    while True:
        try:
            request, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any
            if request == "prepare":
                trial = None  # frees the last layer's memory before the next one's is allocated
                trial, answer = _prepare(*arguments)
            else:
                assert trial is not None, "a layer must be prepared first"
                answer = _warm(trial.call, *arguments) if request == "warm" else _sample(trial.call, *arguments)
        except Exception as error:  # any exception of a library is the subject's outcome
            pipe.send((False, f"{type(error).__name__}: {error}".strip()[:500]))
        else:
            pipe.send((True, answer))


def main() -> None:
    """Serves the pipe whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped worker must not outlive its parent
    os.dup2(2, 1)  # output of libraries goes to stderr
    serve(Connection(int(sys.argv[1])))
