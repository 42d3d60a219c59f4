"""Report of the study of searches (studies/tvm_search.py): TVM's default MetaSchedule beside ours with as many trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.reports.scheduled import geometric_mean, peer, times
from im2win.spec.methods import shown
from im2win.studies.entries import HAND_BUILT, OURS_BEST, OURS_SEARCHED, TVM_SEARCHED

Study = Mapping[str, Any]

_OURS = (OURS_SEARCHED, HAND_BUILT, OURS_BEST)


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each layer, then the facts of the run."""
    return "\n\n".join(f"{_layers(study)}\n\n{_caption(study)}" for study in studies)


def _layers(study: Study) -> str:
    """Times, and how many times as long TVM's best candidate takes as each of our kernels."""
    rows, columns = [], dict[str, list[float]]()
    counts = {layer: count for one in study["searches"] for layer, count in one["trials"].items()}
    for layer, found in times(study).items():
        best = peer(found)
        ratios = {name: found[TVM_SEARCHED] / found[name] for name in _OURS if TVM_SEARCHED in found and name in found}
        for name, ratio in ratios.items():
            columns.setdefault(name, []).append(ratio)
        cells = [markdown.number(found.get(name), 3) for name in (TVM_SEARCHED, *_OURS)]
        named = [shown(best[0]), markdown.number(best[1], 3)] if best else ["-", "-"]
        shares = [f"{ratios[name]:.2f}" if name in ratios else "-" for name in _OURS]
        rows.append([layer, *cells, str(counts.get(layer, "-")), *named, *shares])
    means = [f"{geometric_mean(columns[name]):.2f}" if name in columns else "-" for name in _OURS]
    rows.append(["geometric mean", *[""] * 7, *means])
    heads = ["layer", "TVM's search ms", "ours, searched ms", "hand-built ms", "best record ms", "our trials", "fastest peer", "its ms",
             "TVM over ours, searched", "over hand-built", "over best"]  # fmt: skip
    return markdown.table(heads, rows, words=1)


def _caption(study: Study) -> str:
    named = ("apache-tvm", "torch", "cuda", "cudnn")
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in named)
    seconds = [sum(one[name] for one in study["searches"]) for name in ("tvm_s", "ours_s")]
    batches = sorted({str(entry["conv"]).partition("-")[0].removeprefix("n") for entry in study["entries"]}, key=int)
    failed = [f"{one['layer']}, {one['subject']}: {one['failed']}" for one in study["entries"]
              if one["ms"] is None and one["subject"] in (TVM_SEARCHED, *_OURS)]  # fmt: skip
    return (
        f"float32 with IEEE products on CUDA cores, {' and '.join(batches)} images; {study['brand']} (`{study['device']}`); {libraries}; "
        f"{study['date'][:10]}. TVM: the best of its default MetaSchedule search in {study['trials']} trials, on the textbook definition. "
        f"Ours, searched: direct / scheduled, at most {study['trials']} trials of a search that ends where it gains nothing more. "
        "Hand-built: the model's choice, without a search; best record: of all kernels of this arithmetic. Ratios: TVM's time over ours, "
        f"above 1 we win. All of TVM's searches took {seconds[0]:.0f} s, ours {seconds[1]:.0f} s."
        + (f" Failed: {'; '.join(failed)}." if failed else "")
    )
