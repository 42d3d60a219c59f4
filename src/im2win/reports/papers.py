"""The table of the source papers' numbers beside im2win's, where a committed result or a formula answers the same question."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from im2win.bench.memory_result import MemoryResult
from im2win.bench.results import Result, geometric_mean
from im2win.common import markdown
from im2win.common.markdown import number
from im2win.compute import im2col, im2win
from im2win.reports import algorithms
from im2win.reports.winograd_tc import CUDNN_WINOGRAD
from im2win.spec.suites import suite
from im2win.studies.entries import ALGORITHMS, FUSED, WINOGRAD_TC

COLUMNS = ["question", "source", "theirs", "ours"]
THESIS, GPU_PAPER = "im2win, arXiv 2306.14320", "im2win on GPU, arXiv 2306.14316"
_NOTHING = "not measured"
_ON_CPU = {
    "over im2col and library product": (
        "im2win over im2col on a CPU, speed, 12 layers", "im2win, arXiv 2306.14320", "2.2 to 5.8",
    ),
    "over direct": ("im2win over direct convolution on a CPU", "im2win, arXiv 2306.14320", "3.8 to 7.1"),
    "im2win, NHWC over NCHW": ("im2win with channels last over channels first, CPU", "layouts, arXiv 2408.00278", "11 to 355 % faster"),
    "MCFA over MEC": ("MCFA over MEC, speed", "Fang and Chen 2019", "20.57 % faster"),
}  # fmt: skip
"""Questions, sources and their numbers, by title of `algorithms.RATIOS`."""


def table(results: Mapping[str, Result], studies: Iterable[Mapping[str, Any]], memory: Iterable[MemoryResult]) -> str:
    """One row for each claim: the question, the source, its number and im2win's."""
    rows = [
        ["im2win tensor over im2col matrix, bytes", THESIS, "about 0.30", _tensors()],
        ["speed over cuDNN, float32, 12 layers, 128 images", GPU_PAPER, "1.1 on average, up to 1.8 (RTX 3090)",
         _over_cudnn(results.values())],
        ["MCFA's memory below im2col's", "Fang and Chen 2019", "61.25 %", _parts(memory)],
        *(
            [f"PKF-Shmem-16 over cuDNN's Winograd, float16, 64 channels, {_images(batch)}", "partial kernel fusion, section 4",
             theirs, _fused(studies, batch)]
            for batch, theirs in ((1, "9.99 to 13.69 (RTX 2080 Ti)"), (16, "–"))  # noqa: RUF001
        ),
        *([question, source, theirs, _compared(studies, title)] for title, (question, source, theirs) in _ON_CPU.items()),
    ]  # fmt: skip
    return markdown.table(COLUMNS, rows, words=len(COLUMNS))


def _compared(studies: Iterable[Mapping[str, Any]], title: str) -> str:
    """A ratio of the study of algorithms, over the layers of all devices that measured it, the newest first."""
    found = sorted((one for one in studies if one.get("study") == ALGORITHMS), key=lambda one: str(one["date"]))
    if not found or not (ratios := algorithms.ratios(found[-1])[title]):
        return _NOTHING
    return f"{number(geometric_mean(ratios), 2)} on average, {min(ratios):.2f} to {max(ratios):.2f} ({found[-1]['brand']})"


def _images(batch: int) -> str:
    return "1 image" if batch == 1 else f"{batch} images"


def _tensors() -> str:
    """The ratio by formula, which does not depend on the batch."""
    shares = [im2win.transform_bytes(layer.conv) / im2col.transform_bytes(layer.conv) for layer in suite("papers12")]
    return f"{number(geometric_mean(shares), 2)} by formula ({min(shares):.2f} to {max(shares):.2f})"


def _over_cudnn(results: Iterable[Result]) -> str:
    found = next((one for one in results if "cuda" in one.versions and (one.suite, one.dtype) == ("papers12", "float32")), None)
    if found is None:
        return _NOTHING
    ratios = [row.ratio for row in found.layers if row.ratio is not None]
    return f"{number(geometric_mean(ratios), 2)} on average, {min(ratios):.2f} to {max(ratios):.2f} ({found.brand})"


def _parts(memory: Iterable[MemoryResult]) -> str:
    found = next(iter(memory), None)
    if found is None:
        return _NOTHING
    both = [row.formula_bytes for row in found.layers if {"mcfa/tiled", "im2col/tiled"} <= row.formula_bytes.keys()]
    saved = [100 * (1 - one["mcfa/tiled"] / one["im2col/tiled"]) for one in both]
    return f"{statistics.mean(saved):.0f} % on average, {min(saved):.0f} to {max(saved):.0f} % ({len(both)} layers, {found.brand})"


def _fused(studies: Iterable[Mapping[str, Any]], batch: int) -> str:
    found = next((one for one in studies if one.get("study") == WINOGRAD_TC), None)
    if found is None:
        return _NOTHING
    entries = [one for one in found["entries"] if one["ms"] and one["batch"] == batch]
    gains = []
    for size in sorted({one["size"] for one in entries}):
        peer = _least(one for one in entries if one["size"] == size and one["form"] in CUDNN_WINOGRAD)
        ours = _least(one for one in entries if (one["size"], one["form"], one["layout"]) == (size, FUSED[0], "NCHW"))
        gains += [peer / ours] if peer and ours else []
    return f"{min(gains):.2f} to {max(gains):.2f} ({found['brand']}, NCHW)" if gains else _NOTHING


def _least(entries: Iterable[Mapping[str, Any]]) -> float | None:
    times: Sequence[float] = [one["ms"] for one in entries]
    return min(times, default=None)
