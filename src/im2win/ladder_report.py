"""From a measured ladder (ablation.py) to what people read: gains from rung to rung, their table and their plot."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from im2win import markdown
from im2win.problem import Conv2d
from im2win.results import Result, Row, geometric_mean
from im2win.schedules.ladder import RUNGS

SUITE = "ladder-"  # starts the suite's name in a ladder's result


def rates(row: Row) -> dict[str, float]:
    """GFLOPS of each rung that was timed on a layer, in the run's order."""
    flops = Conv2d.parse(row.conv).flops
    return {name: flops / spread.median / 1e6 for name, spread in row.spread.items()}


def gains(result: Result) -> list[tuple[str, float, float, float, float]]:
    """For each rung after the first: name, mean gain over the rung before, and mean, least and most of its gain over the first.

    Means are geometric, over the layers on which all three were timed.
    """
    speeds = [rates(row) for row in result.layers]
    names = list(dict.fromkeys(name for row in result.layers for name in _order(row)))
    found = []
    for before, name in itertools.pairwise(names):
        rows = [row for row in speeds if {names[0], before, name} <= row.keys()]
        step, total = [row[name] / row[before] for row in rows], [row[name] / row[names[0]] for row in rows]
        mean, whole = geometric_mean(step), geometric_mean(total)
        if mean is not None and whole is not None:
            found.append((name, mean, whole, min(total), max(total)))
    return found


def _order(row: Row) -> list[str]:
    """The rungs of a row, lowest first, those that failed included."""
    known = [name for name in RUNGS if name in row.spread or name in row.peers_failed]
    return known + [name for name in row.spread if name not in RUNGS]


def table(result: Result) -> str:
    """A markdown table, a line a rung, and under it where and with what it was measured."""
    lines = []
    for name, step, total, least, most in gains(result):
        rung = RUNGS.get(name)
        facts = [rung.title, rung.source] if rung else ["", ""]
        lines.append([f"`{name}`", *facts, f"{step:.2f}x", f"{total:.1f}x", f"{least:.1f}x to {most:.1f}x"])
    batch = "the model's batch" if result.batch is None else f"batch {result.batch}"
    version = result.versions.get("apache-tvm", "unknown")
    where = f"{result.brand}, {result.threads} threads where parallel (`{result.device}`); apache-tvm {version}; {result.date[:10]}"
    columns = ["rung", "what changes", "source", "over the rung before", "over the first", "by layer"]
    what = f"{result.suite}, {result.dtype}, {batch}; geometric means over {len(result.layers)} layers"
    return f"{markdown.table(columns, lines, words=3)}\n\n{what}; {where}."


def plot(result: Result, path: Path) -> Path:
    """Draws GFLOPS over rungs: a thin line a layer, a thick one for their geometric mean, the FMA peak dashed; returns the PNG's path.

    Needs matplotlib (the `bench` extra).
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in result.layers for name in rates(row)))
    figure = Figure(figsize=(max(7.0, 1.15 * len(names)), 4.6), dpi=144, layout="constrained")
    axes: Any = figure.subplots()
    for row in result.layers:
        found = rates(row)
        places = [place for place, name in enumerate(names) if name in found]
        axes.plot(places, [found[names[place]] for place in places], color="#56B4E9", linewidth=0.9, marker="o", markersize=2.5, zorder=2)
        if places:
            axes.annotate(row.layer, (places[-1], found[names[places[-1]]]), (4, 0), textcoords="offset points", va="center", fontsize=6)
    means = [geometric_mean(found[name] for found in map(rates, result.layers) if name in found) for name in names]
    axes.plot(range(len(names)), means, color="#0072B2", linewidth=2.2, marker="o", label="geometric mean", zorder=3)
    peak = result.ceilings["fma_gflops"]
    axes.axhline(peak, color="#444444", linewidth=1, linestyle="--", label=f"FMA peak, {result.threads} threads: {peak:.0f}", zorder=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), [f"{name}\n{RUNGS[name].source}" if name in RUNGS else name for name in names], fontsize=7)
    axes.set_ylabel("GFLOPS (higher is better)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    batch = "" if result.batch is None else f", batch {result.batch}"
    axes.set_title(f"{result.suite}, {result.dtype}{batch}: {result.brand}", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
