"""Report of the study of algorithms on a CPU (studies/algorithms.py): times, memory, and the ratios that the source papers state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from im2win.bench.results import geometric_mean
from im2win.common import markdown
from im2win.common.markdown import ms, number
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import shown
from im2win.studies.entries import COMPARED, LIBRARY_GEMM

FIRST, LAST = "NCHW", "NHWC"
IM2WIN = "im2win"  # the faster one of its schedules
STORED = ("im2win/fused", "im2win/stored")
RATIOS = {
    "im2win over im2col": (f"im2col/tiled {FIRST}", f"{IM2WIN} {FIRST}"),
    "over im2col and library product": (f"{LIBRARY_GEMM} {FIRST}", f"{IM2WIN} {FIRST}"),
    "over direct": (f"direct/tiled {FIRST}", f"{IM2WIN} {FIRST}"),
    "MCFA over MEC": (f"mec/tiled {FIRST}", f"mcfa/tiled {FIRST}"),
    "im2win, NHWC over NCHW": (f"{IM2WIN} {FIRST}", f"{IM2WIN} {LAST}"),
}
"""By title: the subject whose time is divided, and the one by whose."""

Study = Mapping[str, Any]


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: times in both layouts, ratios, memory."""
    return "\n\n".join(
        "\n\n".join([_times(study, FIRST), _times(study, LAST), _ratios(study), _memory(study), _caption(study)]) for study in studies
    )


def ratios(study: Study) -> dict[str, list[float]]:
    """The ratios of `RATIOS`, of all layers on which both subjects were timed."""
    found: dict[str, list[float]] = {title: [] for title in RATIOS}
    for entry in study["entries"]:
        for title, ratio in _of_entry(entry).items():
            found[title].append(ratio)
    return found


def _medians(entry: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of an entry's subjects."""
    return {name: float(spread["median"]) for name, spread in entry["times"].items()}


def _of_entry(entry: Mapping[str, Any]) -> dict[str, float]:
    known = _medians(entry)
    for layout in (FIRST, LAST):
        if both := [known[f"{name} {layout}"] for name in STORED if f"{name} {layout}" in known]:
            known[f"{IM2WIN} {layout}"] = min(both)
    return {title: known[upper] / known[lower] for title, (upper, lower) in RATIOS.items() if upper in known and lower in known}


def _titles(subjects: Sequence[str]) -> list[str]:
    return [name if name == LIBRARY_GEMM else shown(name) for name in subjects]


def _times(study: Study, layout: str) -> str:
    subjects = [*COMPARED, *([LIBRARY_GEMM] if layout == FIRST else [])]
    rows = []
    for entry in study["entries"]:
        found = _medians(entry)
        rows.append([entry["layer"], *(ms(found.get(f"{name} {layout}")) for name in subjects)])
    return markdown.table([f"layer, {layout}, ms", *_titles(subjects)], rows)


def _ratios(study: Study) -> str:
    rows = []
    for entry in study["entries"]:
        found = _of_entry(entry)
        rows.append([entry["layer"], *(number(found.get(title), 2) for title in RATIOS)])
    rows.append(["geometric mean", *(number(geometric_mean(found), 2) for found in ratios(study).values())])
    return markdown.table(["layer, times faster", *RATIOS], rows)


def _memory(study: Study) -> str:
    """What is allocated beside input, filter and output, with the sum of these tensors."""
    subjects = [*COMPARED, LIBRARY_GEMM]
    rows = []
    for entry in study["entries"]:
        sizes = [entry["extra_bytes"].get(f"{name} {FIRST}") for name in subjects]
        mebibytes = [None if size is None else size / 2**20 for size in [Conv2d.parse(entry["conv"]).bytes_moved, *sizes]]
        rows.append([entry["layer"], *(number(size, 2) for size in mebibytes)])
    return markdown.table([f"layer, {FIRST}, MiB", "tensors", *_titles(subjects)], rows)


def _caption(study: Study) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in ("apache-tvm", "torch"))
    images = f"{study['batch']} image{'s' if study['batch'] > 1 else ''}"
    tiers = sorted({tier for entry in study["entries"] for tier in entry["tiers"].values()})
    return (
        f"float32, {images}, {study['brand']} (`{study['device']}`), threads: {study['threads']}; {libraries}; {study['date'][:10]}. "
        f"Ratios of im2win take the faster one of its two schedules. Tiers of the look-up: {', '.join(tiers)}."
    )
