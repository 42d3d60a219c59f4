"""`im2win tune`: searches the schedules of every layer and keeps the records in the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from im2win.cli.commands import options, tables, workload
from im2win.common.progress import reporting
from im2win.common.quantities import counted
from im2win.records.record import utc_now
from im2win.spec import methods
from im2win.spec.accuracy import checked_accuracy

if TYPE_CHECKING:
    from im2win.common.progress import Reporter
    from im2win.records.record import Record
    from im2win.spec.conv2d import Conv2d
    from im2win.spec.suites import Layer

Results = dict["Conv2d", "Record | Exception"]


def tune(
    what: options.What,
    batch: options.Batch = None,
    layers: options.Layers = None,
    trials: Annotated[int, typer.Option(help="Candidates measured for each layer.")] = 64,
    algorithm: options.Algorithm = "auto",
    logs: options.WrittenLogs = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same candidates.")] = 0,
    threads: options.Threads = None,
    target: options.Target = "cpu",
    dtype: options.Dtype = None,
    out_dtype: options.OutDtype = None,
    layout: options.Layout = None,
    accuracy: options.Accuracy = "float32",
    tracker: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure on the workers of TVM's RPC tracker (see `im2win worker`), not here.")
    ] = None,
    key: options.Key = "im2win",
    device: Annotated[str | None, typer.Option(help="Of the workers' device models this one, such as nvidia-h200.")] = None,
    secret_file: options.SecretFile = None,
    json: options.Json = False,
) -> None:
    """Search for the fastest correct schedule of each layer. Ctrl-C stops the search; the same command resumes it.

    The records are found later by every verb and function without being told, if they are in your own folder (`im2win device` shows it).
    """
    settings: dict[str, Any] = {"algorithm": algorithm, "trials": trials, "logs": logs, "seed": seed, "threads": threads}
    settings["accuracy"] = checked_accuracy(accuracy)
    fleet: dict[str, Any] = {"tracker": tracker, "key": key, "model": device, "secret_file": secret_file} if tracker is not None else {}
    began = utc_now()
    with reporting("tuning") as reporter:
        reporter.step(note="reading the layers")
        chosen, skipped = workload.read(what, batch, layers, dtype, layout, out_dtype=out_dtype, deployed=True)
        if not json:
            for line in skipped:
                reporter.line(f"skipped: {line}")
        results, interrupted = tune_layers(chosen, target, reporter, settings | fleet, lines=not json)
        failures = [result for result in results.values() if isinstance(result, Exception)]
        if failures and len(failures) == len({layer.conv for layer in chosen}):
            raise failures[0]
    if json:
        tables.print_json({"target": target, **_facts(settings), "interrupted": interrupted} | _outcome(chosen, results, skipped, began))
    else:
        _say_what_was_there(results, trials, began)
        _farewell(what, settings, interrupted)
    if interrupted or failures:
        raise typer.Exit(130 if interrupted else 1)


def tune_layers(
    layers: list[Layer], target: str, reporter: Reporter, settings: dict[str, Any], *, lines: bool = True
) -> tuple[Results, bool]:
    """Tunes the layers, with a line on stdout for each. Returns the results, and whether the user interrupted it, which leaves out some."""
    reporter.step(note="loading the compiler")
    from im2win.tuner.layers import tune_layers as tune_all

    width = max((len(layer.name) for layer in layers), default=0)
    results: Results = {}

    def finished(conv: Conv2d, result: Record | Exception) -> None:
        results[conv] = result
        for layer in layers:
            if lines and layer.conv == conv:
                reporter.line(f"{layer.name:{width}}  {_line(conv, result)}")

    names = {layer.conv: layer.name for layer in layers}
    try:
        tune_all([layer.conv for layer in layers], target, reporter=reporter, names=names, finished=finished, **settings)
    except KeyboardInterrupt:
        return results, True
    return results, False


def _line(conv: Conv2d, result: Record | Exception) -> str:
    if isinstance(result, Exception):
        return f"not tuned: {result}"
    speed = tables.gflops(conv.flops, result.seconds)
    return f"{tables.milliseconds(result.seconds):>9} ms  {speed:>6} GFLOPS  {methods.shown(result.method)}"


def _tuned_before(result: Record | Exception | None, began: str) -> bool:
    """Whether a layer had all its trials before the run: what a run measures, it measures again at the end."""
    return result is not None and not isinstance(result, Exception) and result.date < began


def _say_what_was_there(results: Results, trials: int, began: str) -> None:
    """Says for how many layers nothing was measured, so that nobody takes their times for new ones."""
    if before := sum(_tuned_before(result, began) for result in results.values()):
        typer.echo(
            f"{before} of {counted(len(results), 'layer')} had {counted(trials, 'trial')} before: nothing was measured for "
            f"{'it' if before == 1 else 'them'}, and --trials {2 * trials} goes on."
        )


def _farewell(what: str, settings: dict[str, Any], interrupted: bool) -> None:
    """Says where the records are and what to do next."""
    from im2win.records.folders import folder_to_write

    folder = folder_to_write(settings["logs"])
    if interrupted:
        typer.echo(f"Stopped. Everything measured so far is in {folder}; the same command goes on from there.")
        return
    told = f" --logs {settings['logs']}" if settings["logs"] is not None else ""
    if what.endswith(".onnx"):
        typer.echo(f"Records are in {folder}; `im2win compile {what}{told} --out FILE.so` makes one library of the model.")
    else:
        typer.echo(f"Records are in {folder}; `im2win build {what}{told} --out DIR` makes libraries of them.")


def _facts(settings: dict[str, Any]) -> dict[str, Any]:
    from im2win.records.folders import folder_to_write

    return {**settings, "logs": str(folder_to_write(settings["logs"]))}


def _outcome(layers: list[Layer], results: Results, skipped: list[str], began: str) -> dict[str, Any]:
    """The JSON value of the layers."""
    return {"layers": [_row(layer, results.get(layer.conv), began) for layer in layers], "skipped": skipped}


def _row(layer: Layer, result: Record | Exception | None, began: str) -> dict[str, Any]:
    head: dict[str, Any] = {"layer": layer.name, "conv": str(layer.conv), "count": layer.count, "flops": layer.conv.flops}
    if result is None or isinstance(result, Exception):
        return {**head, "failed": "interrupted" if result is None else str(result)}
    chosen = {"algorithm": result.algorithm, "schedule": result.schedule, "tile": result.tile}
    facts = {"best_s": result.seconds, "extra_bytes": result.extra_bytes, "device": result.device}
    return {**head, **chosen, **facts, "tuned_before": _tuned_before(result, began), "failed": None}
