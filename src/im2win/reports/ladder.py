"""Reports of a measured ablation ladder (studies/ladder.py, cuda_ladder.py): gains from rung to rung, tables and plots."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from im2win.bench.results import Result, Row, geometric_mean
from im2win.common.markdown import Table
from im2win.schedules.studies import cuda_ladder
from im2win.schedules.studies.cpu_ladder import RUNGS, Rung
from im2win.spec.conv2d import Conv2d
from im2win.studies.entries import LADDER_TRANSFORM as TRANSFORM

ALGORITHM_9 = "prefetch"  # the GPU's rung with all techniques of the im2win papers

Rungs = Mapping[str, Rung | cuda_ladder.CudaRung]


def on_gpu(result: Result) -> bool:
    """Whether a ladder's result was measured on a GPU."""
    return "cuda" in result.versions


def rungs_of(result: Result) -> Rungs:
    """The ladder of a result's device, lowest rung first."""
    return cuda_ladder.RUNGS if on_gpu(result) else RUNGS


def rates(row: Row) -> dict[str, float]:
    """GFLOPS of each timed rung on a layer, in the run's order."""
    flops = Conv2d.parse(row.conv).flops
    return {name: flops / spread.median / 1e6 for name, spread in row.spread.items()}


def gains(result: Result) -> list[tuple[str, float, float, float, float]]:
    """For each rung after the first: its name, the mean gain over the rung before, and mean, least and largest gain over the first.

    Means are geometric, over the layers on which all three were timed.
    """
    speeds = [rates(row) for row in result.layers]
    names = order(result)
    found = []
    for before, name in itertools.pairwise(names):
        rows = [row for row in speeds if {names[0], before, name} <= row.keys()]
        step, total = [row[name] / row[before] for row in rows], [row[name] / row[names[0]] for row in rows]
        mean, whole = geometric_mean(step), geometric_mean(total)
        if mean is not None and whole is not None:
            found.append((name, mean, whole, min(total), max(total)))
    return found


def order(result: Result) -> list[str]:
    """The rungs of a result on any layer, lowest first, including failed ones."""
    rungs = rungs_of(result)
    seen = dict.fromkeys(name for row in result.layers for name in (*row.spread, *row.peers_failed))
    return [name for name in rungs if name in seen] + [name for name in seen if name not in {*rungs, *cuda_ladder.WITHOUT, TRANSFORM}]


def _over(result: Result, names: tuple[str, str]) -> tuple[float, float, float] | None:
    """Mean, least and largest ratio of the first's speed to the second's, on the layers where both were timed."""
    found = [speeds[names[0]] / speeds[names[1]] for speeds in map(rates, result.layers) if set(names) <= speeds.keys()]
    mean = geometric_mean(found)
    return None if mean is None else (mean, min(found), max(found))


def losses(result: Result) -> list[tuple[str, float, float, float]]:
    """For each technique that is removed from Alg.

    9: its name, and mean, least and largest share of the speed that remains (thesis behind arXiv 2306.14316, fig. 4-9).
    """
    found = [(name, _over(result, (name, ALGORITHM_9))) for name in cuda_ladder.WITHOUT]
    return [(name, *numbers) for name, numbers in found if numbers is not None]


def table(result: Result) -> str:
    """The tables and sentences of `tables` and `remarks` as Markdown."""
    return "\n\n".join([*(one.markdown() for one in tables(result)), *remarks(result)])


def tables(result: Result) -> list[Table]:
    """One line for each rung; on a GPU another table with one line for Alg. 9 without each technique."""
    lines, rungs = [], rungs_of(result)
    for name, step, total, least, most in gains(result):
        rung = rungs.get(name)
        facts = [rung.title, rung.source] if rung else ["", ""]
        lines.append([f"`{name}`", *facts, f"{step:.2f}x", f"{total:.1f}x", f"{least:.1f}x to {most:.1f}x"])
    columns = ["rung", "what changes", "source", "over the rung before", "over the first", "by layer"]
    found = [Table(columns, lines, words=3)]
    if left := losses(result):
        rows = [[f"`{name}`", cuda_ladder.WITHOUT[name].title, *_percent(numbers)] for name, *numbers in left]
        found.append(Table(["rung", "Alg. 9", "speed left", "by layer"], rows, words=2))
    return found


def remarks(result: Result) -> list[str]:
    """The transform's share where it was timed, and where and with what the ladder was measured."""
    share = _over(result, (ALGORITHM_9, TRANSFORM))
    of_transform = ["The transform alone takes {} of Alg. 9's time ({}).".format(*_percent(share))] if share else []
    return [*of_transform, _caption(result)]


def _percent(numbers: Iterable[float]) -> list[str]:
    mean, least, most = (f"{100 * number:.0f} %" for number in numbers)
    return [mean, f"{least} to {most}"]


def _caption(result: Result) -> str:
    batch = "the model's batch" if result.batch is None else f"batch {result.batch}"
    version = result.versions.get("apache-tvm", "unknown")
    threads = "" if on_gpu(result) else f", {result.threads} threads where parallel"
    where = f"{result.brand}{threads} (`{result.device}`); apache-tvm {version}; {result.date[:10]}"
    return f"{result.suite}, {result.dtype}, {batch}; geometric means over {len(result.layers)} layers; {where}."


def plot(result: Result, path: Path) -> Path:
    """Draws the ladder as a PNG and returns its path. Needs matplotlib (the `bench` extra)."""
    figure = draw(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path


def draw(result: Result) -> Any:
    """The figure: GFLOPS over rungs, a thin line for each layer, a thick one for their geometric mean, and the FMA peak dashed.

    On a GPU it also has bars of what remains of Alg. 9's speed without each technique.
    """
    from matplotlib.figure import Figure

    left = losses(result)
    names = [name for name in order(result) if any(name in rates(row) for row in result.layers)]
    figure = Figure(figsize=(max(7.0, 1.15 * len(names)) + (7.0 if left else 0.0), 4.6), dpi=144, layout="constrained")
    axes: Any = figure.subplots(1, 2 if left else 1, squeeze=False)[0]
    _plot_rungs(result, names, axes[0])
    if left:
        _plot_losses(result, [name for name, *_ in left], axes[1])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
        one.legend(frameon=False, fontsize=8)
    return figure


def _plot_rungs(result: Result, names: Sequence[str], axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    rungs = rungs_of(result)
    for row in result.layers:
        found = rates(row)
        places = [place for place, name in enumerate(names) if name in found]
        axes.plot(places, [found[names[place]] for place in places], color="#56B4E9", linewidth=0.9, marker="o", markersize=2.5, zorder=2)
        if places:
            axes.annotate(row.layer, (places[-1], found[names[places[-1]]]), (4, 0), textcoords="offset points", va="center", fontsize=6)
    means = [geometric_mean(found[name] for found in map(rates, result.layers) if name in found) for name in names]
    axes.plot(range(len(names)), means, color="#0072B2", linewidth=2.2, marker="o", label="geometric mean", zorder=3)
    peak, threads = result.ceilings["fma_gflops"], "" if on_gpu(result) else f", {result.threads} threads"
    axes.axhline(peak, color="#444444", linewidth=1, linestyle="--", label=f"FMA peak{threads}: {peak:.0f}", zorder=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value:.0f}"))
    sources = {name: rungs[name].source.rpartition("/")[2] for name in names if name in rungs}
    axes.set_xticks(range(len(names)), [f"{name}\n{sources[name]}" if name in sources else name for name in names], fontsize=7)
    axes.set_ylabel("GFLOPS (higher is better)")
    batch = "" if result.batch is None else f", batch {result.batch}"
    axes.set_title(f"{result.suite}, {result.dtype}{batch}: {result.brand}", fontsize=10, loc="left")


def _plot_losses(result: Result, names: Sequence[str], axes: Any) -> None:
    """Bars of the remaining share of Alg. 9's speed, one group for each layer and one bar for each removed technique."""
    colours, width = ("#D55E00", "#E69F00", "#009E73", "#CC79A7"), 0.84 / len(names)
    for index, name in enumerate(names):
        pairs = [(place, found) for place, found in enumerate(map(rates, result.layers)) if {name, ALGORITHM_9} <= found.keys()]
        heights = [found[name] / found[ALGORITHM_9] for _, found in pairs]
        places = [place + (index - (len(names) - 1) / 2) * width for place, _ in pairs]
        axes.bar(places, heights, width * 0.94, label=cuda_ladder.WITHOUT[name].title, color=colours[index % len(colours)], zorder=2)
    axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--", zorder=1)
    axes.set_xticks(range(len(result.layers)), [row.layer for row in result.layers], fontsize=7)
    axes.set_ylabel("speed over Alg. 9's")
    axes.set_title("Alg. 9 with one technique taken out", fontsize=10, loc="left")
