"""Tunes many layers in one run: one worker pool for each measurement slot, each distinct problem once, one progress for all."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from im2win.common.locking import LogError
from im2win.common.progress import Reporter
from im2win.common.quantities import duration, milliseconds
from im2win.records.folders import Logs, folder_to_write
from im2win.records.judge import vouched
from im2win.records.log import Log
from im2win.records.lookup import applies_at_once, search
from im2win.records.record import EQUAL, Record
from im2win.registry.backends import Device, backend_for, device_for
from im2win.registry.schedules import candidates
from im2win.spec import methods
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.fleet.fleet import FleetError, gathered
from im2win.tuner.fleet.tracker import KEY
from im2win.tuner.pool import Pool, pools
from im2win.tuner.session import Progress
from im2win.tuner.tuning import check_arguments, tune

Job = TypeVar("Job")
Finished = Callable[[Conv2d, Record | Exception], object]


class _Run:
    """The results of the layers that are done, and the progress of all as one: their trials, and what the layer does that reported last."""

    def __init__(
        self, reporter: Reporter, convs: Sequence[Conv2d], trials: int, names: Mapping[Conv2d, str], finished: Finished | None
    ) -> None:
        self.results: dict[Conv2d, Record | Exception] = {}
        self._reporter, self._trials, self._names, self._finished = reporter, trials, names, finished
        self._places = {conv: place for place, conv in enumerate(convs, 1)}
        self._done = dict.fromkeys(convs, 0)  # trials of each layer
        self._begun = time.monotonic()
        self._measured = 0
        self._reporter.step(0, "starting", total=trials * len(convs))

    def trial(self, stop: threading.Event, state: Progress) -> None:
        """Shows a layer's state, or ends its session."""
        if stop.is_set():
            raise KeyboardInterrupt
        self._done[state.conv] = max(self._done[state.conv], min(state.trial, self._trials))  # a log may hold more, from before
        self._measured += state.phase == "measuring"
        self._reporter.step(sum(self._done.values()), self._note(state))

    def done(self, conv: Conv2d, result: Record | Exception) -> None:
        """Takes a layer's result. All its trials count as done, though its session may have ended early."""
        self.results[conv] = result
        self._done[conv] = self._trials
        self._reporter.step(sum(self._done.values()))
        if self._finished is not None:
            self._finished(conv, result)

    def _note(self, state: Progress) -> str:
        """The layer, what is being done, its best time so far, the gain over the default tile, and the time that is left for all layers."""
        head = self._names.get(state.conv, str(state.conv))
        if len(self._places) > 1:
            head = f"{head} ({self._places[state.conv]} of {len(self._places)})"
        parts = [f"{head}: {state.phase}{f' {methods.shown(state.algorithm)}' if state.algorithm else ''}"]
        if state.best_s:
            parts.append(f"best {milliseconds(state.best_s)} ms")
            if state.default_s:
                parts.append(f"{state.default_s / state.best_s:.2f}x default")
        if self._measured:
            left = self._trials * len(self._places) - sum(self._done.values())
            parts.append(f"at most {duration((time.monotonic() - self._begun) / self._measured * left)} left")
        return ", ".join(parts)


def tune_layers(
    convs: Iterable[Conv2d],
    target: str = "cpu",
    *,
    trials: int,
    logs: Logs = None,
    threads: int | None = None,
    accuracy: Accuracy = "float32",
    reporter: Reporter | None = None,
    algorithm: str = "auto",
    seed: int = 0,
    names: Mapping[Conv2d, str] | None = None,
    finished: Finished | None = None,
    tracker: str | None = None,
    key: str = KEY,
    model: str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
) -> dict[Conv2d, Record | Exception]:
    """Tunes every distinct problem, with one run of worker processes for all.

    Several GPUs measure at the same time, a layer each. Trials in the log count and are not repeated, as for `im2win.tune`. A layer whose
    trials are all there takes milliseconds.

    Args:
        convs: the problems; equal ones are tuned once.
        target, logs, threads, accuracy, algorithm, seed: as for `im2win.tune`.
        trials: candidates to try for each problem, those in the log included.
        reporter: shows the progress, in trials of all layers.
        names: what the progress calls a problem; its key by default.
        finished: called with each problem and its result, from the thread that tuned it.
        tracker, key, secret_file: as for `im2win.tune`, and `model` as its `device`. The workers share each layer's candidates, one layer
            after the other.

    Returns:
        For each distinct problem the record of its best candidate, or the exception that says why it has none: a ValueError if no algorithm
        supports it or no tile is legal, a TuneError if no candidate computed a correct result.

    Raises:
        ValueError: a bad argument that is not a problem's.
        NoGpuError: target "cuda" without a usable GPU.
        ToolchainError: the machine lacks a tool that building or measuring for the device needs.
        LogError: the log cannot be written.
        TrackerError, FleetError, SecretError: as for `im2win.tune`.
        KeyboardInterrupt: the user interrupted the run; everything measured so far is in the log.
    """
    distinct = list(dict.fromkeys(convs))
    check_arguments(trials=trials, seed=seed, accuracy=accuracy)
    with contextlib.ExitStack() as stack:
        fleet = None
        if tracker is not None:
            fleet = stack.enter_context(gathered(tracker, key, model, target, threads, secret_file))
        device = device_for(target, threads) if fleet is None else fleet.device
        if not distinct:
            return {}
        folder = folder_to_write(logs)
        run = _Run(reporter or Reporter("tuning"), distinct, trials, names or {}, finished)
        for conv in distinct:
            if (record := tuned_before(conv, device, trials, folder, accuracy, algorithm)) is not None:
                run.done(conv, record)
        settings = {"algorithm": algorithm, "trials": trials, "logs": folder, "seed": seed, "threads": threads, "accuracy": accuracy}

        def one(conv: Conv2d, pool: Pool, stop: threading.Event) -> None:
            run.done(conv, _result(conv, target, pool=pool, progress=partial(run.trial, stop), **settings))

        if left := [conv for conv in distinct if conv not in run.results]:
            shared_out(left, stack.enter_context(pools(device, len(left), fleet)), one)
        return {conv: run.results[conv] for conv in distinct}


def _result(conv: Conv2d, target: str, **settings: Any) -> Record | Exception:
    """What tuning a problem gives. Only errors that hold for all problems are raised."""
    try:
        return tune(conv, target, **settings)
    except (LogError, FleetError):
        raise
    except Exception as error:
        return error


def tuned_before(conv: Conv2d, device: Device, trials: int, folder: Path, accuracy: Accuracy, algorithm: str = "auto") -> Record | None:
    """The record of the best candidate, where a folder already holds so many trials that tuning would add none; else None.

    Nothing is ranked, built or emitted for it. A record that has not met today's default tile, only rivals of it, is tuned again: the
    session measures that tile.
    """
    backend, log = backend_for(device, accuracy), Log(folder)
    try:
        names = [row.key for row in candidates(algorithm, conv, backend.target, accuracy)]
    except ValueError:  # no algorithm computes it
        return None
    records = log.read(conv, backend.name)
    here = [record for record in records if (record.threads, record.target) == (backend.threads, backend.target) and record.method in names]
    here = [record for record in here if applies_at_once(record, [log])]
    if len({(record.method, str(record.tile)) for record in here if record.outcome != EQUAL}) < trials:
        return None
    standing = vouched(here[0], records, log, device, accuracy)
    if standing is None or standing.kind != "met":  # to know more takes rankings, which the session makes on all CPUs
        return None
    found = search(conv, device, names, folder, accuracy)
    return found.record if found.tier == "exact" and found.record in records else None


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
