"""`im2win tune`: search the schedules of every layer, keep what was found in the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from im2win.commands import options, tables, workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.progress import Progress, TaskID

    from im2win.suites import Layer


def tune(
    what: options.What,
    batch: options.Batch = None,
    layers: options.Layers = None,
    trials: Annotated[int, typer.Option(help="Candidates measured for each layer.")] = 64,
    algorithm: options.Algorithm = "auto",
    logs: options.Logs = options.DEFAULT_LOGS,
    seed: Annotated[int, typer.Option(help="The same seed gives the same candidates.")] = 0,
    threads: options.Threads = None,
    target: options.Target = "cpu",
    dtype: options.Dtype = None,
    layout: options.Layout = None,
    accuracy: options.Accuracy = "float32",
) -> None:
    """Search the fastest correct schedule of each layer. Ctrl-C stops; the same command goes on where it stopped."""
    chosen, skipped = workload.read(what, batch, layers, dtype, layout)
    console = tables.console()
    for line in skipped:
        console.print(f"skipped: {escape(line)}")
    settings = {"target": target, "algorithm": algorithm, "trials": trials, "logs": str(logs), "seed": seed, "threads": threads}
    settings["accuracy"] = accuracy
    if not tune_layers(chosen, console, settings):
        console.print(f"Stopped. Everything measured so far is in {logs}; the same command goes on from there.")
        raise typer.Exit(130)
    console.print(f"Records are in {logs}; `im2win build {what} --logs {logs} --out DIR` makes libraries of them.")


def tune_layers(layers: list[Layer], console: Console, settings: dict[str, Any]) -> bool:
    """Tune the layers one after another with live progress and a line for each; False if the user stopped it."""
    import im2win
    from im2win.backends import device_for
    from im2win.tuner import Crew

    width = max(len(layer.name) for layer in layers)
    with Crew(device_for(settings["target"], settings["threads"])) as crew, _progress(console) as progress:
        for number, layer in enumerate(layers, 1):
            task = progress.add_task(f"{number}/{len(layers)} {escape(layer.name)}", total=settings["trials"], note="")
            try:
                record = im2win.tune(layer.conv, **settings, progress=_reporter(progress, task), crew=crew)
            except KeyboardInterrupt:
                return False
            progress.remove_task(task)
            speed = tables.gflops(layer.conv.flops, record.seconds)
            console.print(
                f"{escape(layer.name):{width}}  {tables.milliseconds(record.seconds):>9} ms  {speed:>6} GFLOPS  {record.algorithm}",
                soft_wrap=True,
            )
    return True


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _reporter(progress: Progress, task: TaskID) -> Callable[[Any], None]:
    """The callback that `im2win.tune` calls after every trial: algorithm, best time, gain over the default tile, time left."""

    def report(state: Any) -> None:
        parts = [str(state.algorithm)]
        if state.best_s:
            parts.append(f"best {tables.milliseconds(state.best_s)} ms")
            if state.default_s:
                parts.append(f"{state.default_s / state.best_s:.2f}x default")
        if state.seconds_left is not None:
            parts.append(f"{tables.duration(state.seconds_left)} left")
        progress.update(task, completed=state.trial, total=state.trials, note=", ".join(parts))

    return report
