"""`im2win ablation`: the thesis' ladder of CPU schedules, every rung timed on the same layers in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from im2win.commands import options, tables, workload

if TYPE_CHECKING:
    from im2win.results import Row
    from im2win.schedules.ladder import Rung


def ablation(
    what: options.What = "papers12",
    batch: options.Batch = None,
    layers: options.Layers = None,
    rungs: Annotated[str | None, typer.Option(metavar="A,B", help="Only these rungs, by name.")] = None,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(help="Most samples of a rung on a layer.")] = 15,
    seconds: Annotated[float, typer.Option(help="Time for a rung's samples on a layer; slow rungs get fewer samples.")] = 10.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result here.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the ladder here, as PNG.")] = None,
) -> None:
    """Time the thesis' ladder of schedules, from seven plain loops to the production schedule, rung by rung."""
    chosen, skipped = workload.read(what, batch, layers)
    console = tables.console()
    for line in skipped:
        console.print(f"skipped: {escape(line)}", soft_wrap=True)
    from im2win import ablation as ladder
    from im2win.ladder_report import plot as draw

    def report(done: int, total: int, row: Row) -> None:
        console.print(tables.table(f"{done}/{total} {escape(row.layer)}  {row.conv}", COLUMNS, _rows(row, wanted), left=3))
        console.print()

    wanted = _wanted(rungs)
    suite = Path(what).stem if what.endswith(".onnx") else what
    result = ladder.run(chosen, wanted, threads=threads, rounds=rounds, seconds=seconds, suite=suite, progress=report)
    where = f"{result.brand}, {result.threads} threads where parallel"
    console.print(f"{where}; gains are over the rung before and over the first", soft_wrap=True)
    if json is not None:
        console.print(f"Written to {result.save(json)}.", soft_wrap=True)
    if plot is not None:
        console.print(f"Drawn to {draw(result, plot)}.", soft_wrap=True)


def _wanted(names: str | None) -> dict[str, Rung]:
    from im2win.schedules.ladder import RUNGS

    if names is None:
        return RUNGS
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen or not set(chosen) <= RUNGS.keys():
        raise workload.WorkloadError(f"`--rungs` (={names!r}) must name rungs of the ladder: {', '.join(RUNGS)}.")
    return {name: rung for name, rung in RUNGS.items() if name in chosen}


COLUMNS = ("rung", "what changes", "source", "ms", "samples", "GFLOPS", "gain", "in all")


def _rows(row: Row, rungs: dict[str, Rung]) -> list[list[str]]:
    """A line a rung, in the ladder's order; a rung that failed has its reason in place of numbers."""
    from im2win.ladder_report import rates

    failed = {**row.peers_failed, **({next(reversed(rungs)): row.failed} if row.failed else {})}
    speeds = rates(row)
    lines: list[list[str]] = []
    first = before = 0.0
    for name, rung in rungs.items():
        if name not in speeds:
            lines.append([name, rung.title, escape(failed.get(name, "not timed"))])
            continue
        speed, spread = speeds[name], row.spread[name]
        first, before = first or speed, before or speed
        time, gain, total = f"{spread.median:.3f}", f"{speed / before:.2f}x", f"{speed / first:.1f}x"
        lines.append([name, rung.title, rung.source, time, str(spread.samples), f"{speed:.1f}", gain, total])
        before = speed
    return lines
