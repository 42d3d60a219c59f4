"""`im2win bench`: im2win's kernels and the peers on the same layers in one run."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from im2win.bench.results import SLOWER, Result, slower_choices, summarise
from im2win.cli.commands import options, outputs, tables, workload
from im2win.spec import methods
from im2win.spec.accuracy import checked_accuracy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    from im2win.bench.results import Row
    from im2win.spec.suites import Layer

PEERS = "torch,onnxruntime"
AGAINST = (
    "Peers: torch (both layouts), torch_nchw, torch_nhwc, onnxruntime, openvino, tvm; or none. On a GPU: torch, cudnn (every algorithm by "
    "name; these two are the default), cudnn-graph (in the layer's layout), cudnn-graph_nchw, cudnn-graph_nhwc, inductor (both layouts), "
    "inductor_nchw, inductor_nhwc, tvm; or none."
)
RESUME = "Measure only layers that the file of --json lacks, or that would be timed with other kernels or other peers today."


def bench(
    what: options.What,
    against: Annotated[str, typer.Option(metavar="A,B", help=AGAINST)] = PEERS,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result here.", callback=outputs.file)] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    batch: options.Batch = None,
    layers: options.Layers = None,
    algorithms: Annotated[str, typer.Option(metavar="A,B", help="One run, and one result, for each of these.")] = "auto",
    untuned: Annotated[bool, typer.Option("--untuned", help="Time the default tile in the same run.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Measure the peak memory of our kernel on each layer, too.")] = False,
    logs: options.Logs = None,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 15,
    target: options.Target = "cpu",
    dtype: options.Dtype = None,
    out_dtype: options.OutDtype = None,
    layout: options.Layout = None,
    accuracy: options.Accuracy = "float32",
    plan_seconds: Annotated[float, typer.Option(min=0, help="Seconds to try plans of the peer cudnn-graph, for each layer.")] = 60.0,
    tvm_trials: Annotated[int, typer.Option(min=1, help="Trials that the peer tvm may tune a layer with.")] = 64,
    tvm_cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep what the peer tvm searched here.", callback=outputs.folder)
    ] = None,
) -> None:
    """Time im2win's kernels and other libraries on the same layers, in interleaved rounds, with each output checked."""
    from im2win.registry.backends import check_target

    check_target(target)
    if resume and json is None:
        raise typer.BadParameter("`--resume` needs `--json FILE`, the result of an earlier run.")
    if target == "cuda":
        given = {"threads": threads is not None, "memory": memory}
        for name in (name for name, said in given.items() if said):
            raise typer.BadParameter(f"`--{name}` is for target cpu; a GPU has neither.")
    chosen, skipped = workload.read(what, batch, layers, dtype, layout, out_dtype=out_dtype, deployed=True)
    console = tables.console()
    for line in skipped:
        console.print(f"skipped: {escape(line)}")
    from im2win.bench import cpu as benchmark

    names, peers = _names(algorithms), _peers(against, target)
    how: dict[str, object] = {"batch": batch, "dtype": dtype, "out-dtype": out_dtype, "layout": layout, "threads": threads, "logs": logs}
    how |= {"target": target if target != "cpu" else None, "accuracy": accuracy if accuracy != "float32" else None}
    for name in names:
        path = json if json is None or len(names) == 1 else json.with_name(f"{json.stem}-{name.replace('/', '-')}{json.suffix}")
        keep = None if path is None else partial(_save, path)
        before = Result.load(path) if resume and path is not None and path.exists() else None
        if target == "cuda":
            extra = {"against": peers, "plan_s": plan_seconds, "tvm_trials": tvm_trials, "tvm_cache": tvm_cache}
            result = _on_gpu(chosen, logs, name, accuracy, untuned, rounds, what, console, keep, before, extra)
            _finish(console, result, path, what, how | {"algorithm": name if name != "auto" else None})
            continue
        result = benchmark.run(
            chosen,
            against=peers,
            threads=threads,
            logs=logs,
            algorithm=name,
            accuracy=checked_accuracy(accuracy),
            untuned=untuned,
            rounds=rounds,
            memory=memory,
            tvm_trials=tvm_trials,
            tvm_cache=tvm_cache,
            suite=Path(what).stem if what.endswith((".onnx", ".jsonl")) else what,
            progress=_reporter(console, max(len(layer.name) for layer in chosen)),
            keep=keep,
            before=before,
        )
        _finish(console, result, path, what, how | {"algorithm": name if name != "auto" else None})


def _save(path: Path, result: Result) -> None:
    result.save(path)


def _finish(console: Console, result: Result, path: Path | None, what: str, how: Mapping[str, object]) -> None:
    """Prints the summary, which layers to tune, and where the result is.

    Args:
        what, how: the workload, and the options that `im2win tune` takes as well; None where one was left out.
    """
    _summary(console, result)
    if slower := slower_choices(result.layers):
        names = ",".join(dict.fromkeys(row.layer for row in slower))
        given = [word for name, value in how.items() if value is not None for word in (f"--{name}", str(value))]
        command = shlex.join(["im2win", "tune", what, "--layers", names, *given])
        text = f"{names}: more than {SLOWER - 1:.0%} slower than the default tile; tune them: {command}"
        console.print(escape(text), soft_wrap=True)
    if path is not None:
        console.print(f"Written to {path}.")


def _on_gpu(
    layers: list[Layer], logs: Path | None, algorithm: str, accuracy: str, untuned: bool, rounds: int, what: str, console: Console,
    keep: Callable[[Result], None] | None, before: Result | None, peers: Mapping[str, Any],
) -> Result:
    """Runs the benchmark on the first GPU.

    Args:
        peers: arguments of `im2win.bench.cuda.run` that are about peers.
    """
    from im2win.bench import cuda as cuda_bench

    suite = Path(what).stem if what.endswith((".onnx", ".jsonl")) else what
    return cuda_bench.run(
        layers, logs=logs, algorithm=algorithm, accuracy=checked_accuracy(accuracy), untuned=untuned,
        rounds=rounds, suite=suite, **peers,
        progress=_reporter(console, max(len(layer.name) for layer in layers)), keep=keep, note=_noter(console), before=before,
    )  # fmt: skip


def _names(algorithms: str) -> list[str]:
    from im2win.registry.schedules import schedule_of

    names = [name.strip() for name in algorithms.split(",")]
    for name in names:
        if name != "auto":
            schedule_of(name)  # raises for an unknown name before anything is measured
    return names


def _peers(against: str, target: str) -> list[str]:
    """Names of peers; on a GPU the default is the one there, and others than the GPU's are refused before anything is measured."""
    given = [] if against == "none" else [name.strip() for name in against.split(",")]
    if target != "cuda":
        return given
    from im2win.bench import cuda_peers

    return list(cuda_peers.DEFAULT) if against == PEERS else cuda_peers.expanded(given)


def _noter(console: Console) -> Callable[[str], None]:
    """Prints messages about work that takes long before the first layer is measured."""

    def note(text: str) -> None:
        console.print(escape(text), soft_wrap=True)

    return note


def _reporter(console: Console, width: int) -> Callable[[int, int, Row], None]:
    """Prints a line for each layer as soon as it is measured."""

    def report(done: int, total: int, row: Row) -> None:
        head = f"{done:>{len(str(total))}}/{total} {escape(row.layer):{width}}"
        if row.failed or row.ours_ms is None:
            console.print(f"{head}  failed: {escape(row.failed or 'not timed')}", soft_wrap=True)
            return
        fraction = "   -" if row.roofline_fraction is None else f"{100 * row.roofline_fraction:4.0f}"
        ours = f"{row.ours_ms:9.3f} ms {row.gflops or 0:6.0f} GFLOPS {fraction} % of roofline"
        peer = f"{row.best_peer} {row.peers[row.best_peer]:.3f} ms, ratio {row.ratio:.2f}" if row.best_peer else "no peer"
        how = f"{methods.shown(row.algorithm)}{'' if row.tuned else _untuned(row)}"
        how += f", transform {row.transform_ms:.3f} ms" if row.transform_ms is not None else ""
        how += f", measured on {row.date[:10]}" if row.date else ""
        console.print(f"{head} {ours}  {how}; {peer}", soft_wrap=True)
        for name, chosen in row.peers_chosen.items():
            console.print(f"  {name} {row.peers[name]:.3f} ms: {escape(chosen)}", soft_wrap=True)
        if row.peak_failed:
            console.print(f"  peak memory: {escape(row.peak_failed)}", soft_wrap=True)
        for name, reason in row.peers_failed.items():
            console.print(f"  {name} failed: {escape(reason)}", soft_wrap=True)

    return report


def _untuned(row: Row) -> str:
    """What a row says of a kernel that was chosen by no record of its layer on this device that has met today's default tile."""
    return f" (untuned, {row.tier})" if row.tier not in ("", "default") else " (untuned)"


def _summary(console: Console, result: Result) -> None:
    facts = summarise(result)
    if facts["geomean_ratio"] is None:
        return
    text = f"ratio (best peer / ours): geometric mean {facts['geomean_ratio']:.2f}, least {facts['min_ratio']:.2f} on {facts['min_layer']}"
    if facts["untuned_geomean_ratio"] is not None:
        text += f"; default tile {facts['untuned_geomean_ratio']:.2f}"
    console.print(f"{text}; {result.brand}, {result.threads} threads", soft_wrap=True)
