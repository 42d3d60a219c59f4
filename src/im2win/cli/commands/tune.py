"""`im2win tune`: searches the schedules of every layer and keeps the records in the logs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.markup import escape

import im2win
from im2win.cli.commands import options, tables, workload
from im2win.spec import methods

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from im2win.spec.suites import Layer
    from im2win.tuner import Pool

Job = TypeVar("Job")


def tune(
    what: options.What,
    batch: options.Batch = None,
    layers: options.Layers = None,
    trials: Annotated[int, typer.Option(help="Candidates measured for each layer.")] = 64,
    algorithm: options.Algorithm = "auto",
    logs: options.WrittenLogs = options.DEFAULT_LOGS,
    seed: Annotated[int, typer.Option(help="The same seed gives the same candidates.")] = 0,
    threads: options.Threads = None,
    target: options.Target = "cpu",
    dtype: options.Dtype = None,
    out_dtype: options.OutDtype = None,
    layout: options.Layout = None,
    accuracy: options.Accuracy = "float32",
) -> None:
    """Search for the fastest correct schedule of each layer. Ctrl-C stops the search; the same command resumes it."""
    chosen, skipped = workload.read(what, batch, layers, dtype, layout, out_dtype=out_dtype, deployed=True)
    console = tables.console()
    for line in skipped:
        console.print(f"skipped: {escape(line)}")
    settings = {"target": target, "algorithm": algorithm, "trials": trials, "logs": str(logs), "seed": seed, "threads": threads}
    settings["accuracy"] = accuracy
    if not tune_layers(chosen, console, settings):
        console.print(f"Stopped. Everything measured so far is in {logs}; the same command goes on from there.")
        raise typer.Exit(130)
    if what.endswith(".onnx"):
        console.print(f"Records are in {logs}; `im2win compile {what} --logs {logs} --out FILE.so` makes one library of the model.")
        return
    console.print(f"Records are in {logs}; `im2win build {what} --logs {logs} --out DIR` makes libraries of them.")


def tune_layers(layers: list[Layer], console: Console, settings: dict[str, Any]) -> bool:
    """Tunes the layers with live progress and a line for each, one after another on each device. False if the user interrupted it."""
    from im2win.registry.backends import device_for
    from im2win.tuner import pools

    width = max(len(layer.name) for layer in layers)
    with pools(device_for(settings["target"], settings["threads"]), len(layers)) as idle, _progress(console) as progress:

        def one(numbered: tuple[int, Layer], pool: Pool, stop: threading.Event) -> None:
            number, layer = numbered
            task = progress.add_task(f"{number}/{len(layers)} {escape(layer.name)}", total=settings["trials"], note="")
            record = im2win.tune(layer.conv, **settings, progress=_reporter(progress, task, stop), pool=pool)
            progress.remove_task(task)
            speed = tables.gflops(layer.conv.flops, record.seconds)
            console.print(
                f"{escape(layer.name):{width}}  {tables.milliseconds(record.seconds):>9} ms  {speed:>6} GFLOPS  "
                f"{methods.shown(record.method)}",
                soft_wrap=True,
            )

        try:
            shared_out(list(enumerate(layers, 1)), idle, one)
        except KeyboardInterrupt:
            return False
    return True


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


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _reporter(progress: Progress, task: TaskID, stop: threading.Event) -> Callable[[Any], None]:
    """The callback of `im2win.tune` after every trial, which shows algorithm, best time, gain over the default tile, and time left."""

    def report(state: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        parts = [methods.shown(state.algorithm)]
        if state.best_s:
            parts.append(f"best {tables.milliseconds(state.best_s)} ms")
            if state.default_s:
                parts.append(f"{state.default_s / state.best_s:.2f}x default")
        if state.seconds_left is not None:
            parts.append(f"{tables.duration(state.seconds_left)} left")
        progress.update(task, completed=state.trial, total=state.trials, note=", ".join(parts))

    return report
