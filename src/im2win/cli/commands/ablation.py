"""`im2win ablation`: the im2win papers' ablation ladders of CPU or GPU schedules, every rung timed on the same layers in one run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.markup import escape

from im2win.cli.commands import options, outputs, tables, workload
from im2win.studies.entries import LADDER_TRANSFORM as TRANSFORM
from im2win.studies.entries import last_rung

if TYPE_CHECKING:
    from collections.abc import Callable

    from im2win.bench.results import Result, Row
    from im2win.reports.ladder import Rungs

AnyRung = TypeVar("AnyRung")

GPU_BATCHES = {"papers12": 128}  # the batch of a suite's source on a GPU; on a CPU the suite's own batch takes milliseconds
SECONDS = {"cpu": 10.0, "cuda": 1.0}


def ablation(
    what: options.What = "papers12",
    batch: options.Batch = None,
    layers: options.Layers = None,
    rungs: Annotated[str | None, typer.Option(metavar="A,B", help="Only these rungs, by name.")] = None,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(help="Most samples of a rung on a layer.")] = 15,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time for a rung's samples on a layer; slow rungs get fewer. 10 on a CPU, 1 on a GPU if not said."),
    ] = None,
    target: options.Target = "cpu",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result here.", callback=outputs.file)] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the ladder here, as PNG.", callback=outputs.file)] = None,
) -> None:
    """Time the im2win papers' ladder of schedules, rung by rung, from the plain loops to the production schedule."""
    from im2win.registry.backends import check_target

    check_target(target)
    if target == "cuda" and threads is not None:
        raise typer.BadParameter("`--threads` is for target cpu; a GPU's kernels choose their own.")
    wanted, measure, where = _on_gpu(rungs) if target == "cuda" else _on_cpu(rungs, threads)
    batch = GPU_BATCHES.get(what) if target == "cuda" and batch is None else batch
    chosen, skipped = workload.read(what, batch, layers)
    console = tables.console()
    for line in skipped:
        console.print(f"skipped: {escape(line)}", soft_wrap=True)
    from im2win.reports.ladder import plot as draw

    def report(done: int, total: int, row: Row) -> None:
        console.print(tables.table(f"{done}/{total} {escape(row.layer)}  {row.conv}", COLUMNS, _rows(row, wanted), left=3))
        console.print()

    suite = Path(what).stem if what.endswith((".onnx", ".jsonl")) else what
    seconds = SECONDS[target] if seconds is None else seconds
    result = measure(chosen, rounds=rounds, seconds=seconds, suite=suite, progress=report)
    console.print(where.format(brand=result.brand, threads=result.threads), soft_wrap=True)
    if json is not None:
        console.print(f"Written to {result.save(json)}.", soft_wrap=True)
    if plot is not None:
        console.print(f"Drawn to {draw(result, plot)}.", soft_wrap=True)


def _on_cpu(names: str | None, threads: int | None) -> tuple[Rungs, Callable[..., Result], str]:
    """The requested rungs, the function that measures them, and a closing line."""
    from im2win.schedules.studies.cpu_ladder import RUNGS
    from im2win.studies import ladder as ablation

    wanted = _wanted(names, RUNGS)
    closing = "{brand}, {threads} threads where parallel; gains are over the rung before and over the first"
    return wanted, partial(ablation.run, rungs=wanted, threads=threads), closing


def _on_gpu(names: str | None) -> tuple[Rungs, Callable[..., Result], str]:
    """As `_on_cpu`, for a GPU."""
    from im2win.schedules.studies.cuda_ladder import RUNGS, WITHOUT
    from im2win.studies import cuda_ladder as cuda_ablation

    wanted = _wanted(names, {**RUNGS, **WITHOUT})
    closing = "{brand}; gains are over the rung before and over the first, without a technique over Alg. 9"
    return wanted, partial(cuda_ablation.run, rungs=wanted), closing


def _wanted(names: str | None, rungs: dict[str, AnyRung]) -> dict[str, AnyRung]:
    if names is None:
        return rungs
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen or not set(chosen) <= rungs.keys():
        raise workload.WorkloadError(f"`--rungs` (={names!r}) must name rungs of the ladder: {', '.join(rungs)}.")
    return {name: rung for name, rung in rungs.items() if name in chosen}


COLUMNS = ("rung", "what changes", "source", "ms", "samples", "GFLOPS", "gain", "in all")


def _rows(row: Row, rungs: Rungs) -> list[list[str]]:
    """One line for each rung, in the ladder's order; a failed rung has its reason in place of numbers."""
    from im2win.reports.ladder import ALGORITHM_9, rates
    from im2win.schedules.studies.cuda_ladder import WITHOUT

    ladder = {name: rung for name, rung in rungs.items() if name not in WITHOUT}
    failed = {**row.peers_failed, **({last_rung(list(rungs), ladder): row.failed} if row.failed else {})}
    speeds = rates(row)
    lines: list[list[str]] = []
    first = before = 0.0
    for name, rung in rungs.items():
        if name not in speeds:
            lines.append([name, rung.title, escape(failed.get(name, "not timed"))])
            continue
        speed, spread = speeds[name], row.spread[name]
        if name in WITHOUT:
            gains = [f"{speed / speeds[ALGORITHM_9]:.2f}x" if ALGORITHM_9 in speeds else "-", ""]
        else:
            first, before = first or speed, before or speed
            gains = [f"{speed / before:.2f}x", f"{speed / first:.1f}x"]
            before = speed
        lines.append([name, rung.title, rung.source, f"{spread.median:.3f}", str(spread.samples), f"{speed:.1f}", *gains])
    if TRANSFORM in row.spread:
        spread = row.spread[TRANSFORM]
        lines.append([TRANSFORM, "the im2win transform alone", "thesis Alg. 2", f"{spread.median:.3f}", str(spread.samples), "", "", ""])
    return lines
