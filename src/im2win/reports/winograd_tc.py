"""Reports of the study of Winograd's form on tensor cores (studies/winograd_tc.py): its tables and its plot."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from im2win.common import markdown
from im2win.studies.entries import FUSED, INT8, INTEGERS, OTHERS, PROTOTYPE, REQUANTISED, REQUANTISED_PEER, SYNCHRONOUS, TVM, WHOLE

CUDNN_WINOGRAD = ("cudnn_winograd", "cudnn_winograd_nonfused")
_OURS = (SYNCHRONOUS, PROTOTYPE, *FUSED, WHOLE, OTHERS, INTEGERS)
_STAGES = {PROTOTYPE: "unfused", "pkf-shmem-16": "PKF-Shmem-16", "pkf-shmem-32": "PKF-Shmem-32", "pkf-llc-16": "PKF-LLC-16",
           "pkf-llc-32": "PKF-LLC-32", WHOLE: "tiled"}  # fmt: skip
_NAMES = {"winograd": "cuDNN Winograd", "cudnn": "cuDNN best", SYNCHRONOUS: "synchronous", **_STAGES, OTHERS: "our best", TVM: "TVM"}
_LINES = {
    "float16": {**_STAGES, OTHERS: "our best", TVM: "TVM"},
    "int8": {
        **{f"{INTEGERS}-{form}": name for form, name in _STAGES.items() if form != WHOLE},
        INTEGERS: "our best", REQUANTISED: "our best, int8 to int8",
    },
}
"""What the panels of a type show: labels by form."""
# Okabe and Ito's colours, which colour-blind readers can distinguish.
_COLOURS = {"unfused": "#E69F00", "PKF-Shmem-16": "#0072B2", "PKF-Shmem-32": "#56B4E9", "PKF-LLC-16": "#D55E00", "PKF-LLC-32": "#CC79A7",
            "tiled": "#000000", "our best": "#009E73", "our best, int8 to int8": "#F0E442", "TVM": "#999999"}  # fmt: skip
_RULES = {
    "barriers": (SYNCHRONOUS, (PROTOTYPE,), "a warp's own fragments, and no barrier in the loop, over loads that a thread block shares"),
    "pkf-shmem": (PROTOTYPE, FUSED[:2], "transformed inputs stay in shared memory"),
    "pkf-llc": (PROTOTYPE, FUSED[2:], "transformed inputs pass through the last-level cache, in one kernel with the products"),
}
"""By rule of the reconstructor: the form without it, those with it, and what it does."""

Entry = Mapping[str, Any]


def table(studies: Sequence[Mapping[str, Any]]) -> str:
    """Markdown for every device: one line for each batch and map, the reasons for missing times, and the facts of the run."""
    return "\n\n".join("\n\n".join(_parts(study, study["entries"])) for study in studies)


def _parts(study: Mapping[str, Any], entries: Sequence[Entry]) -> list[str]:
    return [_layers(entries), _rules(entries), *_integers(entries), *_errors(entries), *_failures(entries), _caption(study)]


Problem = tuple[str, int, int]
"""(layout, images, size of the map)"""


def _problem(entry: Entry) -> Problem:
    return entry["layout"], entry["batch"], entry["size"]


def _problems(entries: Sequence[Entry]) -> list[Problem]:
    return sorted({_problem(entry) for entry in entries})


def _times(entries: Sequence[Entry], problem: Problem) -> dict[str, Entry | None]:
    """The fastest time of each form on a problem, and of cuDNN in the problem's layout: its Winograd, channels first only, and all."""
    here = [entry for entry in entries if _problem(entry) == problem]
    found = {form: _fastest(entry for entry in here if entry["form"] == form) for form in (*_OURS, TVM, *INT8, REQUANTISED)}
    found[REQUANTISED_PEER] = _fastest(entry for entry in here if str(entry["form"]).startswith(REQUANTISED_PEER))
    found["winograd"] = _fastest(entry for entry in here if entry["form"] in CUDNN_WINOGRAD)
    torch = f"torch_{problem[0].lower()}"
    found["cudnn"] = _fastest(entry for entry in here if entry["form"] == torch or str(entry["form"]).startswith("cudnn_"))
    return found


def _way(whole: Entry | None) -> str:
    """Whether `winograd/tiled` ran along rows, which is one kernel, or in bands of tiles, which are several launches."""
    tile = whole["tile"] if whole is not None else None
    if not tile:
        return "-"
    return f"rows, F({tile['outputs']})" if tile["rows"] else f"bands, F({tile['outputs']}x{tile['outputs']})"


def _layers(entries: Sequence[Entry]) -> str:
    rows, of_all = [], dict[tuple[str, int], list[list[float]]]()
    searched, scaled = (any(entry["form"] == form for entry in entries) for form in (TVM, REQUANTISED))
    shown = ("winograd", "cudnn", *_OURS, *([REQUANTISED] if scaled else []), *([TVM] if searched else []))
    for problem in _problems(entries):
        found = _times(entries, problem)
        best = _fastest(entry for form in FUSED if (entry := found[form]) is not None)
        pairs = [
            (found["winograd"], best),
            (found[PROTOTYPE], best),
            (found["cudnn"], found[OTHERS]),
            (found[OTHERS], found[INTEGERS]),
            *([(found[OTHERS], found[REQUANTISED]), (found[REQUANTISED_PEER], found[REQUANTISED])] if scaled else []),
        ]
        cells = _cells(entries, problem, {form: found[form] for form in shown})
        cells.insert(shown.index(WHOLE) + 1, _way(found[WHOLE]))
        rows.append([problem[0], str(problem[1]), f"{problem[2]}x{problem[2]}", *cells, *(_ratio(*pair) for pair in pairs)])
        alike = of_all.setdefault(problem[:2], [[] for _ in pairs])
        for ratios, (other, ours) in zip(alike, pairs, strict=True):
            ratios += [other["ms"] / ours["ms"]] if other is not None and ours is not None else []
    for (layout, batch), found_ratios in of_all.items():
        means = [f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-" for ratios in found_ratios]
        rows.append([layout, str(batch), "geometric mean", *[""] * (len(shown) + 1), *means])
    columns = ["layout", "images", "map", "cuDNN Winograd ms", "cuDNN best ms", "synchronous ms", "unfused ms",
               *(f"{_STAGES[form]} ms" for form in FUSED), "tiled ms", "tiled: its form", "our best ms", "our int8 ms",
               *(["our int8 to int8 ms"] if scaled else []), *(["TVM ms"] if searched else []),
               "fused over cuDNN Winograd", "fused over unfused", "our best over cuDNN best", "int8 over float16",
               *(["int8 to int8 over float16", "int8 to int8 over cuDNN"] if scaled else [])]  # fmt: skip
    return markdown.table(columns, rows, words=3)


def _rules(entries: Sequence[Entry]) -> str:
    """The gain of each rule of the reconstructor: the time without it over the time with it."""
    rows = []
    for rule, (without, ways, what) in _RULES.items():
        for group in sorted({problem[:2] for problem in _problems(entries)}):
            gains = []
            for found in (_times(entries, problem) for problem in _problems(entries) if problem[:2] == group):
                before, after = found[without], _fastest(entry for way in ways if (entry := found[way]) is not None)
                gains += [before["ms"] / after["ms"]] if before is not None and after is not None else []
            numbers = [statistics.geometric_mean(gains), min(gains), max(gains)] if gains else [None] * 3
            rows.append([rule, what, group[0], str(group[1]), *(markdown.number(value, 2) for value in numbers)])
    return markdown.table(["rule", "what it does", "layout", "images", "gain, geometric mean", "least", "most"], rows, words=3)


def _integers(entries: Sequence[Entry]) -> list[str]:
    """One line for each problem of Winograd's form in int8, beside exact int8 sums; empty if it was not measured."""
    if not any(entry["form"] in INT8 for entry in entries):
        return []
    rows = []
    for problem in _problems(entries):
        found = _times(entries, problem)
        best = _fastest(entry for form in INT8 if (entry := found[form]) is not None)
        error = "-" if best is None or best["error"] is None else f"{100 * best['error']:.1f} %"
        cells = _cells(entries, problem, {form: found[form] for form in (INTEGERS, *INT8)})
        rows.append([problem[0], str(problem[1]), f"{problem[2]}x{problem[2]}", *cells, _ratio(found[INTEGERS], best), error])
    columns = ["layout", "images", "map", "int8 without Winograd ms", "unfused ms", *(f"{_STAGES[form]} ms" for form in FUSED),
               "best Winograd over without", "its error"]  # fmt: skip
    return ["In int8:", markdown.table(columns, rows, words=3)]


def _errors(entries: Sequence[Entry]) -> list[str]:
    """The largest error of each form in float16, over the maps."""
    rows = []
    for group in sorted({problem[:2] for problem in _problems(entries)}):
        here = [_times(entries, problem) for problem in _problems(entries) if problem[:2] == group]
        cells = []
        for form in _NAMES:
            errors = [one["error"] for found in here if (one := found[form]) is not None and one["error"] is not None]
            cells.append(f"{max(errors):.1e}" if errors else "-")
        rows.append([group[0], str(group[1]), *cells])
    return ["Errors in float16:", markdown.table(["layout", "images", *_NAMES.values()], rows, words=2)]


def _failures(entries: Sequence[Entry]) -> list[str]:
    """Reasons why forms have no time on a problem, with the number of problems.

    Of reasons that differ in numbers only the first is shown.
    """
    reasons: dict[str, str] = {}
    problems: dict[str, set[Any]] = {}
    for problem in _problems(entries):
        for form, entry in _times(entries, problem).items():
            if entry is None and form in (*_OURS, TVM, *INT8, REQUANTISED):
                for one in entries:
                    if one["failed"] and one["form"] == form and _problem(one) == problem:
                        reason = f"{form}: {' '.join(one['failed'].split()).removeprefix(f'{form}: ')}"
                        kind = re.sub(r"\d+", "#", reason.removeprefix(form)) + form
                        reasons.setdefault(kind, reason)
                        problems.setdefault(kind, set()).add(problem)
    lines = [f"{reason} ({len(problems[kind])} problems)" if len(problems[kind]) > 1 else reason for kind, reason in reasons.items()]
    return ["Failed: " + "; ".join(lines) + "."] if lines else []


def _fastest(entries: Iterable[Entry]) -> Entry | None:
    return min((entry for entry in entries if entry["ms"] is not None), key=lambda entry: float(entry["ms"]), default=None)


def _cells(entries: Sequence[Entry], problem: Problem, fastest: Mapping[str, Entry | None]) -> list[str]:
    """Milliseconds of each form; "failed" for a form that was tried without a time, as peers always are."""
    peers = {"cudnn", *(["winograd"] if problem[0] == "NCHW" else [])}
    tried = {*peers, *(entry["form"] for entry in entries if _problem(entry) == problem)}
    none = {form: "failed" if form in tried else "-" for form in fastest}
    return [none[form] if one is None else f"{one['ms']:.4f}" if one["ms"] < 1 else f"{one['ms']:.3f}" for form, one in fastest.items()]


def _ratio(other: Entry | None, ours: Entry | None) -> str:
    return "-" if other is None or ours is None else f"{other['ms'] / ours['ms']:.2f}"


def _caption(study: Mapping[str, Any]) -> str:
    shown = ("apache-tvm", "torch", "cuda", "cudnn")
    trials = "".join(sorted({f", {entry['algorithm']}" for entry in study["entries"] if entry["form"] == TVM and entry.get("algorithm")}))
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in shown)
    return (
        f"64 channels, 64 filters of 3x3, padding 1, float16; {study['brand']} (`{study['device']}`); {libraries}; {study['date'][:10]}. "
        "The number behind PKF is TB_M. cuDNN Winograd: the better of its two algorithms by name, channels first, which is all it has; "
        f"cuDNN best: of all by name, and PyTorch, in the same layout. TVM: the best of its default search{trials}. "
        "Unfused: the prototype in three kernels; tiled: the schedule winograd / tiled, along rows, all stages in one kernel, or in bands "
        "of tiles, several launches; our best: without Winograd's form; "
        "int8: the same problem with int8, sums stored as "
        f"int32{_of_scaled(study)}. Ratios: times of the second over those of the first. Errors: the largest difference from float64 over "
        "the largest output. -: not measured."
    )


def _of_scaled(study: Mapping[str, Any]) -> str:
    if not any(entry["form"] == REQUANTISED for entry in study["entries"]):
        return ""
    return (
        "; int8 to int8: outputs of int8, exact sums times a scale for every channel (cuDNN: the best of its algorithms by name, with int8 "
        "outputs or, where it has none, float32, and one scale for all channels)"
    )


def plot(study: Mapping[str, Any], path: Path) -> Path:
    """Draws times of cuDNN's Winograd over im2win's by map, one line for each form and one row of panels for each type.

    Channels last, which cuDNN's Winograd does not have, the times of the best of cuDNN and PyTorch take its place.

    Returns the PNG's path.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    entries = study["entries"]
    columns = sorted({problem[:2] for problem in _problems(entries)})
    rows = [(dtype, lines) for dtype, lines in _LINES.items() if any(entry["form"] in lines for entry in entries)]
    figure = Figure(figsize=(3.6 * len(columns) + 0.8, 3.4 * len(rows) + 0.7), dpi=144, layout="constrained")
    panels: Any = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True)
    labels: dict[str, Any] = {}
    for (dtype, lines), across in zip(rows, panels, strict=True):
        for axes, (layout, batch) in zip(across, columns, strict=True):
            labels |= _draw(axes, entries, (layout, batch), lines)
            axes.set_title(f"{dtype}, {layout}, {batch} image{'s' if batch > 1 else ''}", fontsize=10)
            axes.set_ylabel("times cuDNN Winograd" if layout == "NCHW" else "times the best of cuDNN and PyTorch", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("map")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path


def _draw(axes: Any, entries: Sequence[Entry], group: tuple[str, int], lines: Mapping[str, str]) -> dict[str, Any]:
    """Draws one panel. Returns its lines by their labels."""
    drawn = {}
    times = {problem[2]: _times(entries, problem) for problem in _problems(entries) if problem[:2] == group}
    for form, label in lines.items():
        points = [(size, found["winograd" if group[0] == "NCHW" else "cudnn"], found[form]) for size, found in times.items()]
        whole = [(size, peer["ms"] / ours["ms"]) for size, peer, ours in points if peer and ours]
        if whole:
            [drawn[label]] = axes.plot(*zip(*whole, strict=True), marker="o", markersize=3, color=_COLOURS[label])
    axes.axhline(1, color="#444444", linewidth=1, linestyle="--")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    return drawn
