"""Fills tables between markers in Markdown documents, and draws plots, from committed results.

A table stands between ``<!-- table:NAME -->`` and ``<!-- /table -->``. NAME is a result's path under the results folder without its suffix
(``device/papers12-float32-b8``), ``summary`` for one row for each result, or a study (studies.py), whose files lie in the folder `studies`
beside the results. With ``table?:`` the result may be missing: the text between the markers then stays. Tables of device memory
(``device/memory-...``) have their own kind of results. ``winograd-float16`` and ``winograd-int8`` are computed. ``papers`` shows the source
papers' numbers beside im2win's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.memory_result import PREFIX, MemoryResult
from im2win.bench.results import WINOGRAD, Result, Row, arithmetic_roofs, mean_at_roof, roofline_fraction, summarise
from im2win.common.markdown import Table, ms, number
from im2win.reports import ladder as ladder_report
from im2win.reports import learned_model as learned_report
from im2win.reports import memory as memory_report
from im2win.reports import papers as papers_report
from im2win.reports import roofline, studies
from im2win.reports import winograd_error as winograd_report
from im2win.reports import winograd_tc as fused_report
from im2win.reports import zoo as zoo_report
from im2win.reports.memory import mebibytes
from im2win.reports.subjects import COLOURS, TITLES, gathered, subjects
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import shown
from im2win.studies.entries import LADDER, LEARNED_MODEL, WINOGRAD_TC, ZOO

_SHOWN_VERSIONS = ("apache-tvm", "torch", "onnxruntime", "openvino", "cuda", "cudnn")
UNTUNED, MEMORY, TRANSFORM = "untuned ratio", "peak memory", "ours: transform ms"
WORKSPACE, PEER_WORKSPACE = "ours: workspace MiB", "best peer's workspace MiB"
# Columns that appear only if a result has values for them.
_OPTIONAL: dict[str, Callable[[Row], float | None]] = {
    TRANSFORM: lambda row: row.transform_ms,
    WORKSPACE: lambda row: row.extra_bytes if row.peers_extra_bytes else None,
    PEER_WORKSPACE: lambda row: row.peers_extra_bytes.get(row.best_peer or ""),
    UNTUNED: lambda row: row.untuned_ratio,
    MEMORY: lambda row: None if row.peak_bytes is None else row.peak_bytes / Conv2d.parse(row.conv).bytes_moved,
}
_OF_ROOF = "Roofline: of the highest of these ceilings, by the direct form's operations; none for Winograd's form, which takes fewer."
_MARKER = re.compile(r"(<!-- table(?P<optional>\??):(?P<name>\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)


class ReportError(ValueError):
    """A marker without a result. The message names it."""


def load_all(folder: Path) -> dict[str, Result]:
    """Every result of times under `folder`, by its path without suffix, sorted.

    A GPU's ceilings are the highest of its results: measuring an upper bound may fall short of it.
    """
    paths = [path for path in sorted(folder.rglob("*.json")) if not path.name.startswith(PREFIX)]
    found = {path.relative_to(folder).with_suffix("").as_posix(): Result.load(path) for path in paths}
    highest: dict[str, dict[str, float]] = {}
    for one in filter(_on_gpu, found.values()):
        known = highest.setdefault(one.device, {})
        known |= {name: max(value, known.get(name, value)) for name, value in one.ceilings.items()}
    return {
        name: replace(one, ceilings={ceiling: highest[one.device][ceiling] for ceiling in one.ceilings}) if _on_gpu(one) else one
        for name, one in found.items()
    }


def refresh(readme: Path, folder: Path) -> bool:
    """Fills every marked table of `readme` from the results under `folder`. Returns whether the text changed.

    Raises:
        ReportError: a marker names a result that does not exist.
        ResultError: a file under `folder` is not a result.
        StudyError: a file among the studies is not a study.
    """
    text = readme.read_text(encoding="utf-8")
    filled = fill(text, load_all(folder), studies.load_all(folder), memory_report.load_all(folder))
    if filled != text:
        readme.write_text(filled, encoding="utf-8")
    return filled != text


def fill(
    text: str,
    results: Mapping[str, Result],
    found: Sequence[studies.Study] = (),
    memory: Mapping[str, MemoryResult] | None = None,
) -> str:
    """`text` with each marked table replaced by the table of its result."""

    tables: dict[str, Callable[[], str]] = {"summary": partial(summary_table, results), **studies.tables(found)}
    tables["papers"] = partial(papers_report.table, results, found, list((memory or {}).values()))
    tables["winograd-float16"] = winograd_report.half_table
    tables["winograd-int8"] = winograd_report.quantised_table
    tables |= {name: partial(memory_report.tables, measured) for name, measured in (memory or {}).items()}

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in tables and name not in results:
            if match["optional"]:
                return match[0]
            raise ReportError(f"table marker {name!r} must name a result: {', '.join(results) or 'there are none'}.")
        body = tables[name]() if name in tables else _table(results[name])
        return f"{match[1]}{body}\n{match[4]}"

    return _MARKER.sub(replaced, text)


def is_ladder(result: Result) -> bool:
    """Whether a result is that of an ablation ladder, whose subjects are rungs."""
    return result.suite.startswith(LADDER)


def _table(result: Result) -> str:
    return (ladder_report.table if is_ladder(result) else layer_table)(result)


def _roofs(result: Result) -> dict[str, float]:
    """The arithmetic ceilings of the result's element type and accuracy, GFLOPS, by name."""
    return arithmetic_roofs(result.dtype, result.accuracy, result.ceilings)


def _on_gpu(result: Result) -> bool:
    return "cuda" in result.versions


def _machine(result: Result) -> str:
    return result.brand if _on_gpu(result) else f"{result.brand}, {result.threads} threads"


def layer_table(result: Result) -> str:
    """The table of `layer_rows` and its caption as Markdown."""
    return f"{layer_rows(result).markdown()}\n\n{caption(gathered(result))}"


def layer_rows(result: Result) -> Table:
    """One row for each layer with the best peer's time in bold, their sum and geometric mean."""
    result = gathered(result)
    names = subjects(result)
    optional = [title for title, value in _OPTIONAL.items() if any(value(row) is not None for row in result.layers)]
    columns = ["layer", "algorithm", "ours ms", "GFLOPS", "% of roofline", *(f"{TITLES.get(name, name)} ms" for name in names), "ratio"]
    rows = [_cells(result, row, names) + [_optional(title, row) for title in optional] for row in result.layers]
    facts = summarise(result)
    totals = [ms(facts["totals_ms"].get(name)) for name in names]
    rows.append(["sum", "", ms(facts["total_ms"]), "", "", *totals, number(facts["total_ratio"], 2), *[""] * len(optional)])
    means = {UNTUNED: facts["untuned_geomean_ratio"]}
    blank = [""] * (3 + len(names))
    rows.append(["geometric mean", "", *blank, number(facts["geomean_ratio"], 2), *(_mean(means.get(title)) for title in optional)])
    return Table([*columns, *optional], rows, words=2)


def _optional(title: str, row: Row) -> str:
    value = _OPTIONAL[title](row)
    if title in (WORKSPACE, PEER_WORKSPACE):
        return mebibytes(None if value is None else int(value))
    return ms(value) if title == TRANSFORM else number(value, 2)


def _mean(value: float | None) -> str:
    return "" if value is None else number(value, 2)


def _cells(result: Result, row: Row, names: Sequence[str]) -> list[str]:
    algorithm = shown(row.algorithm) if row.tuned or not row.algorithm else f"{shown(row.algorithm)} (untuned)"
    of_roof = roofline_fraction(row, result.accuracy, result.ceilings)
    fraction = None if of_roof is None else 100 * of_roof
    times = ["failed" if name in row.peers_failed else ms(row.peers.get(name)) for name in names]
    bold = [f"**{text}**" if name == row.best_peer else text for name, text in zip(names, times, strict=True)]
    ours = "failed" if row.failed else ms(row.ours_ms)
    return [row.layer, algorithm, ours, number(row.gflops, 0), number(fraction, 0), *bold, number(row.ratio, 2)]


def caption(result: Result) -> str:
    """Where, when and with what a result was measured."""
    memory = any(row.peak_bytes is not None for row in result.layers)
    roofs = " and ".join(f"{peak:.0f} GFLOPS ({name})" for name, peak in _roofs(result).items())
    peers = ", ".join(f"{name} {version}" for name, version in result.versions.items() if name in _SHOWN_VERSIONS)
    batch = "the model's batch" if result.batch is None else f"batch {result.batch}"
    winograd = any(row.algorithm.startswith(WINOGRAD) for row in result.layers)
    others = any(not row.algorithm.startswith(WINOGRAD) for row in result.layers if row.ratio is not None)
    at_roof = number(mean_at_roof(result), 2)
    return (
        f"{result.suite}, {result.dtype}, {batch}; {_machine(result)} (`{result.device}`); "
        f"measured ceilings {roofs}, {result.ceilings['copy_gbs']:.1f} GB/s; {peers}; {result.date[:10]}. "
        "Ratio: best peer's time over ours, above 1 we win. Sums count every layer as often as it occurs."
        + (f" {_OF_ROOF}" if len(_roofs(result)) > 1 or winograd else "")
        + (f" With all others at their roofline the geometric mean would be {at_roof}." if winograd and others else "")
        + (" Peak memory: of a process that runs the layer, over its input, filters and output." if memory else "")
    )


def summary_table(results: Mapping[str, Result]) -> str:
    """The table of `summary_rows` as Markdown."""
    return summary_rows(results).markdown()


def summary_rows(results: Mapping[str, Result]) -> Table:
    """One row for each result: geometric mean and smallest ratio, also of untuned kernels, and the sum over layers with their counts."""
    columns = ["suite", "batch", "device", "layers", "ratio, mean", "ratio, least", "untuned, mean", "ratio of sums"]
    rows = []
    for result in results.values():
        if is_ladder(result):
            continue
        facts = summarise(result)
        least = number(facts["min_ratio"], 2) + (f" ({facts['min_layer']})" if facts["min_layer"] else "")
        untuned, sums = (number(facts[name], 2) for name in ("untuned_geomean_ratio", "total_ratio"))
        batch = "–" if result.batch is None else str(result.batch)  # noqa: RUF001
        mean = number(facts["geomean_ratio"], 2)
        rows.append([f"{result.suite} {result.dtype}", batch, result.device, str(facts["layers"]), mean, least, untuned, sums])
    return Table(columns, rows)


def plot(result: Result, path: Path) -> Path:
    """Grouped bars of GFLOPS, a group for each layer and a bar for each subject, with the arithmetic peaks as lines.

    Returns the PNG's path.

    Needs matplotlib (the `bench` extra).
    """
    from matplotlib.figure import Figure

    result = gathered(result)
    names = ["ours", *(["untuned"] if any(row.untuned_ms for row in result.layers) else []), *subjects(result)]
    width = 0.84 / len(names)
    inches = max(1.35 * len(names) + 1.0, 7.0, 0.16 * len(names) * len(result.layers) + 2.5)
    figure = Figure(figsize=(inches, 4.2), dpi=144, layout="constrained")
    axes: Any = figure.subplots()
    for index, name in enumerate(names):
        heights = [_rate(row, name) for row in result.layers]
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(heights))]
        label = {"ours": "im2win", "untuned": "im2win, untuned"}.get(name, TITLES.get(name, name))
        axes.bar(places, heights, width * 0.94, label=label, color=COLOURS.get(name, "#999999"), zorder=2)
    roofs, paper = _roofs(result), {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    for name, peak in roofs.items():
        axes.axhline(peak, color="#444444", linewidth=1, linestyle="--", zorder=1)
        text = f"{'product' if name.endswith('16 products') or name.startswith('int8') else name} peak {peak:.0f}"
        place: Any = ("axes fraction", "data")
        axes.annotate(text, (0.995, peak), xycoords=place, va="bottom", ha="right", fontsize=8, color="#444444", bbox=paper)
    axes.set_xticks(range(len(result.layers)), [row.layer for row in result.layers])
    axes.tick_params(axis="x", labelrotation=0 if max(map(len, (row.layer for row in result.layers))) < 8 else 45, length=0)
    axes.set_xlim(-0.6, len(result.layers) - 0.4)
    axes.set_ylim(0, max(*roofs.values(), axes.dataLim.ymax) * 1.09)
    axes.set_ylabel("GFLOPS (higher is better)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    batch = "" if result.batch is None else f", batch {result.batch}"
    axes.set_title(f"{result.suite}, {result.dtype}{batch} – {_machine(result)}", fontsize=10, loc="left")  # noqa: RUF001
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False, fontsize=8.5, handlelength=1.2, columnspacing=1.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path


def plot_all(folder: Path) -> list[Path]:
    """Draws a PNG beside every result under `folder`, and a roofline for GPU results. Returns their paths."""
    paths = []
    for name, result in load_all(folder).items():
        paths.append((ladder_report.plot if is_ladder(result) else plot)(result, folder / f"{name}.png"))
        if _on_gpu(result):
            paths.append(roofline.plot(result, folder / f"{name}-roofline.png"))
    for study in studies.load_all(folder):
        if study.get("study") == WINOGRAD_TC:
            path = folder.parent / "studies" / study["device"] / f"{WINOGRAD_TC}.png"
            paths.append(fused_report.plot(study, path))
        if study.get("study") == LEARNED_MODEL:
            path = folder.parent / "studies" / study["device"] / f"{LEARNED_MODEL}.png"
            paths.append(learned_report.plot(study, path))
        if study.get("study") == ZOO:
            name = f"zoo-{study['dtype']}-b{study['batch']}.png"
            paths.append(zoo_report.plot(study, folder.parent / "studies" / study["device"] / name))
    return paths


def _rate(row: Row, name: str) -> float:
    time = {"ours": row.ours_ms, "untuned": row.untuned_ms, **row.peers}.get(name)
    return Conv2d.parse(row.conv).flops / time / 1e6 if time else 0.0
