"""Report of the study of the learned model (studies/learned_model.py): how near the best each arm is after so many trials, and costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from im2win.common import markdown
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import shown
from im2win.studies.entries import ANALYTIC, LEARNED_MODEL, NO_MODEL, OTHER_LAYERS, RANDOM, SCRATCH, SMALL_BATCHES

LEAST = 8  # trials of the first column
NOISE = 0.01  # share of the speed; smaller differences count as none
FOLDER = "../benchmarks/studies"  # as a text in `docs` sees it

Study = Mapping[str, Any]
# Okabe and Ito's colours, which colour-blind readers can distinguish.
_COLOURS = {RANDOM: "#999999", ANALYTIC: "#E69F00", NO_MODEL: "#CC79A7", SCRATCH: "#56B4E9", OTHER_LAYERS: "#0072B2"}


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: arms over trials, what the model adds, the curves, the layers with their seconds, and a caption."""
    parts = (_arms, _added, _figure, _layers, _caption)
    return "\n\n".join(part(study) for study in studies for part in parts)


def names(study: Study) -> list[str]:
    """The arms of a study."""
    return list(study["layers"][0]["arms"])


def means(study: Study, arm: str) -> list[list[float] | None]:
    """At each checkpoint, for each seed the geometric mean over layers; None where the arm has run out of candidates on a layer."""
    curves = [layer["arms"][arm]["curves"] for layer in study["layers"]]
    found: list[list[float] | None] = []
    for at in range(len(study["checkpoints"])):
        by_seed = [[one[seed][at] for one in curves] for seed in range(study["seeds"])]
        found.append(None if any(value is None for values in by_seed for value in values) else [_mean(values) for values in by_seed])
    return found


def _mean(values: Sequence[float]) -> float:
    """The geometric mean; 0 where nothing right was found on a layer."""
    return math.exp(statistics.fmean(map(math.log, values))) if min(values) > 0 else 0.0


def _arms(study: Study) -> str:
    kept = [at for at, trials in enumerate(study["checkpoints"]) if trials >= LEAST]
    rows = []
    for arm in names(study):
        found = means(study, arm)
        proposing = statistics.fmean(layer["arms"][arm]["proposing_s"] for layer in study["layers"])
        rows.append([arm, *(_spread(found[at]) for at in kept), markdown.number(proposing, 1)])
    columns = ["arm, best so far after", *(f"{study['checkpoints'][at]} trials" for at in kept), "model, CPU s"]
    return markdown.table(columns, rows)


def against(study: Study, arm: str, at: int) -> list[float] | None:
    """Of each layer and seed, an arm's speed at a checkpoint over that of the search without a model; None where one has run out."""
    without = NO_MODEL + (SMALL_BATCHES if arm.endswith(SMALL_BATCHES) else "")
    ratios = []
    for layer in study["layers"]:
        for mine, its in zip(layer["arms"][arm]["curves"], layer["arms"][without]["curves"], strict=True):
            if mine[at] is None or its[at] is None:
                return None
            ratios += [mine[at] / its[at]] if mine[at] and its[at] else []
    return ratios


def _added(study: Study) -> str:
    """What the model adds to the search: geometric mean over layers and seeds, and in how many of these pairs it gains or loses."""
    kept = [at for at, trials in enumerate(study["checkpoints"]) if trials > LEAST]
    rows = []
    for arm in names(study):
        if arm.removesuffix(SMALL_BATCHES) in (SCRATCH, OTHER_LAYERS):
            rows.append([arm, *(_gains(against(study, arm, at)) for at in kept)])
    return markdown.table(["over the search without a model", *(f"{study['checkpoints'][at]} trials" for at in kept)], rows)


def _gains(ratios: Sequence[float] | None) -> str:
    if not ratios:
        return markdown.number(None, 2)
    more, less = sum(ratio > 1 + NOISE for ratio in ratios), sum(ratio < 1 - NOISE for ratio in ratios)
    return f"{_mean(ratios):.3f} (+{more}, -{less} of {len(ratios)})"


def _spread(values: Sequence[float] | None) -> str:
    """The median of the seeds, with the least and the largest where they differ."""
    if values is None:
        return markdown.number(None, 2)
    middle, least, most = (f"{value:.3f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def _figure(study: Study) -> str:
    return f"![Best so far over trials, {study['brand']}]({FOLDER}/{study['device']}/{LEARNED_MODEL}.png)"


def _layers(study: Study) -> str:
    rows = []
    for layer in study["layers"]:
        best, seconds = layer["best"], layer["measuring_s"]
        rows.append([
            layer["layer"], shown(best["algorithm"]), str(layer["space"]), str(layer["measured"]), str(layer["failed"]), str(best["place"]),
            markdown.ms(best["ms"]), markdown.number(layer["default"], 2), markdown.number(layer["ranking_s"], 1), f"{seconds:.0f}",
            markdown.number(seconds / layer["measured"], 2),
        ])  # fmt: skip
    columns = [
        "layer", "best algorithm", "candidates", "measured", "failed", "best is number", "best ms", "default tile", "ranking s",
        "measuring s", "s a candidate",
    ]  # fmt: skip
    return markdown.table(columns, rows, words=2)


def _caption(study: Study) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in ("apache-tvm", "xgboost", "cuda"))
    convs = [Conv2d.parse(layer["conv"]) for layer in study["layers"]]
    types = ", ".join(sorted({f"{conv.types} {conv.layout}, batch {conv.batch}" for conv in convs}))
    sizes = sorted({(layer["top"], layer["uniform"]) for layer in study["layers"]})
    pools = "; ".join(f"the first {top} by estimate and {uniform} drawn" for top, uniform in sizes)
    ahead = f", proposed when {study['ahead']} or more candidates before are not measured" if study["ahead"] else ""
    small = f"; arms with{SMALL_BATCHES.removeprefix(',')} propose each when all before are measured" if study["ahead"] else ""
    return (
        f"{types}; {study['brand']} (`{study['device']}`), threads: {study['threads']}; {libraries}; {study['date'][:10]}. Speed of the "
        f"best so far over that of the pool's best, 1 where that is found: geometric mean of {len(convs)} layers, median of "
        f"{study['seeds']} seeds, in brackets the least and the largest seed. Pools: {pools}. Batches of {study['batch']}{ahead}{small}. "
        f"Over the search without a model: geometric mean of layers and seeds; in brackets in how many of them the model is more than "
        f"{100 * NOISE:g} % faster, and slower. Default tile: its speed over the best's. Best is number: its place in the whole space by "
        "estimate."
    )


def plot(study: Study, path: Path) -> Path:
    """Best so far over trials, a line for each arm and a band from the least seed to the largest. Returns the PNG's path.

    Needs matplotlib (the `bench` extra).
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(7.2, 4.4), dpi=144, layout="constrained")
    axes: Any = figure.subplots()
    for arm in names(study):
        known = [(trials, made) for trials, made in zip(study["checkpoints"], means(study, arm), strict=True) if made is not None]
        if not known:
            continue
        trials = [count for count, _ in known]
        base, dashed = arm.removesuffix(SMALL_BATCHES), arm.endswith(SMALL_BATCHES)
        middle = [statistics.median(made) for _, made in known]
        style: Any = {"color": _COLOURS[base], "linestyle": "--" if dashed else "-"}
        axes.plot(trials, middle, marker="o", markersize=3, linewidth=1.6, label=arm, zorder=3, **style)
        if not dashed:
            least, most = [min(made) for _, made in known], [max(made) for _, made in known]
            axes.fill_between(trials, least, most, color=_COLOURS[base], alpha=0.18, linewidth=0, zorder=2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(study["checkpoints"]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(None, 1.01)
    axes.set_xlabel("trials")
    axes.set_ylabel("speed of the best so far over the pool's best")
    axes.grid(color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{len(study['layers'])} layers, {study['brand']}", fontsize=10, loc="left")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
