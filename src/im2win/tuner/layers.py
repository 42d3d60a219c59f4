"""Tunes many layers in one run: one worker pool for each measurement slot, each distinct problem once, one progress for all."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from im2win.common.locking import LogError
from im2win.common.progress import Reporter
from im2win.records.folders import Logs, folder_to_write
from im2win.records.record import Record
from im2win.registry.backends import device_for
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.pool import Pool, pools
from im2win.tuner.tuning import TuneError, tune

Job = TypeVar("Job")


def tune_layers(
    convs: Iterable[Conv2d],
    target: str = "cpu",
    *,
    trials: int,
    logs: Logs = None,
    threads: int | None = None,
    accuracy: Accuracy = "float32",
    reporter: Reporter | None = None,
) -> dict[Conv2d, Record | Exception]:
    """Tunes every distinct problem, with one run of worker processes for all.

    Several GPUs measure at the same time, a layer each. Trials in the log count and are not repeated, as for `im2win.tune`.

    Args:
        convs: the problems; equal ones are tuned once.
        target, trials, logs, threads, accuracy: as for `im2win.tune`; `trials` are those of a layer.
        reporter: shows the progress, in trials of all layers.

    Returns:
        For each distinct problem the record of its best candidate, or the reason why it has none: a ValueError if no algorithm supports it
        or no tile is legal, a TuneError if no candidate computed a correct result.

    Raises:
        ValueError: a bad argument.
        LogError: the log cannot be written.
        KeyboardInterrupt: the user interrupted the run; everything measured so far is in the log.
    """
    distinct = list(dict.fromkeys(convs))
    folder, device = folder_to_write(logs), device_for(target, threads)
    results: dict[Conv2d, Record | Exception] = {}

    def one(conv: Conv2d, pool: Pool, stop: threading.Event) -> None:
        try:
            results[conv] = tune(conv, target, trials=trials, logs=folder, threads=threads, accuracy=accuracy, pool=pool)
        except LogError:
            raise
        except (ValueError, TuneError) as error:
            results[conv] = error
        if reporter is not None:
            reporter.step(len(results) * trials, str(conv), total=len(distinct) * trials)

    if distinct:
        with pools(device, len(distinct)) as idle:
            shared_out(distinct, idle, one)
    return {conv: results[conv] for conv in distinct}


def shared_out(jobs: Sequence[Job], pools: Sequence[Pool], do: Callable[[Job, Pool, threading.Event], None]) -> None:
    """Runs all jobs, each worker pool one at a time.

    If a job fails or the user interrupts, no other job starts, and the event asks the rest to end.

    Raises:
        BaseException: the first exception of a job, or KeyboardInterrupt.
    """
    stop = threading.Event()
    if len(pools) == 1:
        for job in jobs:
            do(job, pools[0], stop)
        return
    idle: queue.SimpleQueue[Pool] = queue.SimpleQueue()
    for pool in pools:
        idle.put(pool)

    def next_job(job: Job) -> None:
        pool = idle.get()
        try:
            if not stop.is_set():
                do(job, pool, stop)
        except BaseException:
            stop.set()
            raise
        finally:
            idle.put(pool)

    with ThreadPoolExecutor(len(pools)) as threads:
        try:
            futures = [threads.submit(next_job, job) for job in jobs]
            failures = [future.exception() for future in as_completed(futures)]
        except KeyboardInterrupt:
            stop.set()
            raise
    for failure in failures:
        if failure is not None:
            raise failure
