"""Report of the study of launch overlap (benchmarks/gpu/launch_overlap.py): small layers' kernels with and without it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.spec.methods import shown
from im2win.studies.entries import OVERLAP_KINDS, OVERLAPPING, SEPARATE

Study = Mapping[str, Any]


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each layer, then the facts of the run."""
    return "\n\n".join(f"{_layers(study)}\n\n{_caption(study)}" for study in studies)


def speedup(samples: Mapping[str, Sequence[float]]) -> float:
    """The median time without overlap over that with it."""
    return statistics.median(samples[SEPARATE]) / statistics.median(samples[OVERLAPPING])


def _layers(study: Study) -> str:
    rows, columns = [], dict[str, list[float]]()
    for one in study["layers"]:
        cells = [one["layer"], shown(one["algorithm"]), one["tile"].get("tma_boxes") or "-"]
        for kind in OVERLAP_KINDS:
            samples = one["samples_s"][kind]
            columns.setdefault(kind, []).append(speedup(samples))
            cells += [f"{statistics.median(samples[SEPARATE]) * 1e6:.1f}", f"{columns[kind][-1]:.2f}"]
        rows.append(cells)
    means = [cell for kind in OVERLAP_KINDS for cell in ("", f"{statistics.geometric_mean(columns[kind]):.2f}" if kind in columns else "-")]
    rows.append(["geometric mean", "", "", *means])
    heads = ["layer", "method", "TMA boxes", *(cell for kind in OVERLAP_KINDS for cell in (f"{kind}, us", "speedup"))]
    return markdown.table(heads, rows, words=3)


def _caption(study: Study) -> str:
    named = ("apache-tvm", "torch", "cuda")
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in named)
    return (
        "The time of a call without launch overlap, and how many times as fast it is with it; "
        f"{study['brand']} (`{study['device']}`); {libraries}; {study['date'][:10]}. "
        "stream: calls that follow one another; graph: the same in a CUDA graph; alone: one call between two events, after the "
        "level-2 cache was overwritten. Outputs of chains of calls are equal bit for bit."
        + "".join(f" {layer} failed: {why}." for layer, why in study["failed"].items())
    )
