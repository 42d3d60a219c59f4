"""Figures of an HTML page that no other report draws: the course of a search."""

from __future__ import annotations

from typing import Any

from im2win.reports.page.svg import label
from im2win.reports.page.tuned import TunedLayer, best_so_far
from im2win.spec.methods import shown

# Okabe and Ito's colours, which colour-blind readers can distinguish, without the line's.
COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
OTHER, BEST, INK = "#999999", "#0072B2", "#444444"
NAMED = len(COLOURS)  # most methods with a colour and a name
WIDE = 4.0  # times above the best that are drawn; slower candidates are at the upper edge


def drawable(layer: TunedLayer) -> bool:
    """Whether there are times to draw."""
    return bool(layer.best) and any(trial.seconds is not None for trial in layer.trials)


def search(layer: TunedLayer) -> Any:
    """The figure of a search: a dot for each candidate in its method's colour, a line for the best so far, marks for failures.

    A star is the last record of the best candidate, which finals measure again. Candidates more than `WIDE` times slower than the best
    are triangles at the upper edge. The layer must be `drawable`.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.9, 3.1), layout="constrained")
    axes: Any = figure.subplots()
    times = [trial.seconds for trial in layer.trials if trial.seconds is not None]
    final = layer.best[0].seconds or min(times)
    top, least = max(min(WIDE * min(times), max(times)), final), min([*times, final])
    unit, scale = _unit(least)
    axes.set_ylim((least - 0.12 * (top - least or least)) * scale, (top + 0.12 * (top - least or least)) * scale)
    axes.set_xlim(0.5 - 0.02 * len(layer.trials), len(layer.trials) + 0.5 + 0.02 * len(layer.trials))
    _candidates(axes, layer, top, scale)
    course = best_so_far(layer.trials)
    numbers, bests = [number for number, _ in course], [seconds * scale for _, seconds in course]
    axes.step(numbers, bests, where="post", color=BEST, linewidth=1.8, zorder=4, label="best so far")
    axes.plot([len(layer.trials)], [final * scale], "*", color=BEST, markersize=10, zorder=5, clip_on=False, label="best, at the end")
    if layer.default_s is not None and layer.default_s <= top:
        axes.axhline(layer.default_s * scale, color=INK, linewidth=0.9, linestyle="--", zorder=1, label="default tile")
    failed = [number for number, trial in enumerate(layer.trials, 1) if trial.seconds is None]
    if failed:
        axes.plot(failed, [0.03] * len(failed), "x", color=INK, markersize=4, transform=axes.get_xaxis_transform(), label="failed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel(f"{unit} a call (lower is better)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, handlelength=1.3, columnspacing=1.2)
    return figure


def _unit(seconds: float) -> tuple[str, float]:
    """The unit of a time axis and how many of it a second has."""
    return ("ms", 1e3) if seconds >= 1e-4 else ("µs", 1e6)


def _candidates(axes: Any, layer: TunedLayer, top: float, scale: float) -> None:
    """Dots of the timed candidates, those of the fastest methods by name."""
    named = [record.method for record in layer.best[:NAMED]]
    for method in [*named, None]:
        of_method = [
            (number, trial.seconds) for number, trial in enumerate(layer.trials, 1)
            if trial.seconds is not None and (trial.method == method if method else trial.method not in named)
        ]  # fmt: skip
        colour = COLOURS[named.index(method)] if method else OTHER
        within = [(number, seconds * scale) for number, seconds in of_method if seconds <= top]
        beyond = [(number, top * scale) for number, seconds in of_method if seconds > top]
        name: str | None = label(shown(method)) if method else "others"
        for shape, pairs in (("o", within), ("^", beyond)):
            if pairs:
                axes.plot(*zip(*pairs, strict=True), shape, color=colour, markersize=4.5, alpha=0.85, zorder=3, label=name)
                name = None
