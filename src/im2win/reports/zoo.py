"""Reports of the zoo (benchmarks/zoo.py): a table, a summary, and a plot of each network's time against the better PyTorch layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from im2win.common import markdown

OURS, LAYOUTS = ("ours", "ours_nhwc"), ("torch_nchw", "torch_nhwc")  # each in both layouts; the better one counts
_TITLES = {
    "ours": "im2win",
    "ours_nhwc": "im2win channels-last",
    "torch_nchw": "PyTorch",
    "torch_nhwc": "PyTorch channels-last",
    "torch_compile": "torch.compile",
    "onnxruntime": "ONNX Runtime",
}

Study = Mapping[str, Any]
Row = Mapping[str, Any]


def _ms(row: Row, name: str) -> float | None:
    time = row["subjects"].get(name, {}).get("median")
    return None if time is None else float(time)


def _best(row: Row, names: Sequence[str]) -> tuple[float, str] | None:
    """The least time of these subjects, and whose it is."""
    return min(((time, name) for name in names if (time := _ms(row, name)) is not None), default=None)


def ratio(row: Row, names: Sequence[str] = OURS) -> float | None:
    """Time of the better PyTorch layout over the best of the subjects'; None if either is missing."""
    theirs, best = _best(row, LAYOUTS), _best(row, names)
    return theirs[0] / best[0] if theirs and best else None


def table(studies: Sequence[Study]) -> str:
    """One table for each file: a line for each network and mode, and what failed below it."""
    return "\n\n".join(_one(study) for study in studies)


def _one(study: Study) -> str:
    names = [name for name in _TITLES if any(name in row["subjects"] for row in study["rows"])]
    rows, reasons = [], dict[str, None]()
    for row in study["rows"]:
        failed = {name: one["failed"] for name, one in row["subjects"].items() if "failed" in one}
        cells = ["failed" if name in failed else markdown.ms(_ms(row, name)) for name in names]
        reasons |= dict.fromkeys(f"{row['network']}, {row['mode']}, {_TITLES[name]}: {_line(why)}" for name, why in failed.items())
        best = _best(row, OURS)
        facts = row["groups"].get(best[1]) if best else None
        share = f"{facts['ours']}/{facts['layers']}" if facts else "-"
        rows.append([row["network"], row["mode"], share, *cells, markdown.number(ratio(row), 2)])
    text = markdown.table(["network", "mode", "layers ours", *(f"{_TITLES[name]} ms" for name in names), "ratio"], rows, words=2)
    failures = "\n\nFailed:\n\n" + "\n".join(f"- {reason}" for reason in reasons) if reasons else ""
    return f"{text}\n\n{_caption(study)}{failures}"


def _line(text: str) -> str:
    return " ".join(text.split())[:160]


def _caption(study: Study) -> str:
    references = "; ".join(dict.fromkeys(row.get("reference", study.get("reference", "PyTorch eager")) for row in study["rows"]))
    return (
        f"{study['dtype']}, batch {study['batch']}; {study['brand']} (`{study['device']}`); {study['date'][:10]}. Outputs within "
        f"{study['tolerance']:g} of {references}. Ratio: the better PyTorch layout's time over that of our better layout, above 1 we win."
    )


def summary(studies: Sequence[Study]) -> str:
    """A line for each file and mode: how many networks ran, geometric mean and least ratio, and how many are not slower."""
    rows = []
    for study in studies:
        for mode in dict.fromkeys(row["mode"] for row in study["rows"]):
            here = [row for row in study["rows"] if row["mode"] == mode]
            known = {row["network"]: value for row in here if (value := ratio(row)) is not None}
            mean = math.exp(sum(map(math.log, known.values())) / len(known)) if known else None
            least = min(known, key=lambda name: known[name]) if known else None
            worst = "-" if least is None else f"{known[least]:.2f} ({least})"
            fine = sum(value >= 0.97 for value in known.values())  # 3 % is the noise of such a run
            facts = [study["device"], study["dtype"], str(study["batch"]), mode, f"{len(known)}/{len(here)}"]
            rows.append([*facts, markdown.number(mean, 2), worst, str(fine)])
    columns = ["device", "type", "batch", "mode", "networks", "ratio, mean", "ratio, least", "not slower (3 %)"]
    return markdown.table(columns, rows, words=1)


def plot(study: Study, path: Path) -> Path:
    """Ratios over the better PyTorch layout, a line for each network, best first, on a log axis. Returns the PNG's path.

    Needs matplotlib (the `bench` extra).
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

    modes = list(dict.fromkeys(row["mode"] for row in study["rows"]))
    rows = sorted(study["rows"], key=lambda row: (modes.index(row["mode"]), ratio(row) or 0.0))
    figure = Figure(figsize=(8, 1.6 + 0.2 * len(rows)), dpi=144, layout="constrained")
    axes: Any = figure.subplots()
    marks = {OURS: ("o", "#0072B2"), ("torch_compile",): ("s", "#E69F00"), ("onnxruntime",): ("^", "#009E73")}
    for names, (marker, colour) in marks.items():
        points = [(value, place) for place, row in enumerate(rows) if (value := ratio(row, names)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, label=_TITLES[names[0]], markersize=5, zorder=2)
    axes.axvline(1, color="#444444", linewidth=1, zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10]))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(rows)), [row["network"] + (f" ({row['mode']})" if len(modes) > 1 else "") for row in rows], fontsize=8)
    axes.set_xlabel("time of the better PyTorch layout over the subject's (higher is better)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{study['dtype']}, batch {study['batch']}, {study['brand']}", fontsize=10, loc="left")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
