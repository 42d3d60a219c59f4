"""Report of the study of TVM's CUDA schedules (studies/scheduled.py): layers against peers, algorithms, and what each rule gains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import shown
from im2win.studies.entries import FIRST_SCHEDULED as FIRST
from im2win.studies.entries import HAND_BUILT, RULES

BOTH, PLAIN = "both", "plain"
GEMM = "cudnn_gemm"  # im2col and cuBLAS

Study = Mapping[str, Any]
Times = Mapping[str, float]


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each layer, then what rules gain, then the other algorithms."""
    return "\n\n".join(f"{_layers(study)}\n\n{_rules(study)}\n\n{_algorithms(study)}\n\n{_caption(study)}" for study in studies)


def narrow_table(studies: Sequence[Study]) -> str:
    """Markdown for every device, of kernels on tensor cores: a line for each layer, a column for each element type and layout."""
    return "\n\n".join(f"{_narrow_layers(study)}\n\n{_narrow_caption(study)}" for study in studies)


def _narrow_layers(study: Study) -> str:
    """Milliseconds of the best of the timed tiles, and how much faster the hand-built kernel is."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for key, subjects in itertools.groupby(study["entries"], key=lambda entry: (entry["layer"], entry["conv"])):
        ms = {entry["subject"]: entry["ms"] for entry in subjects if entry["ms"] is not None}
        ours = min((value for name, value in ms.items() if name.startswith(FIRST)), default=None)
        if ours is not None and HAND_BUILT in ms:
            conv = Conv2d.parse(key[1])
            found.setdefault(key[0], {})[f"{conv.dtype} {conv.layout}"] = ours, ours / ms[HAND_BUILT]
    kinds = list(dict.fromkeys(kind for one in found.values() for kind in one))
    cells = {layer: {kind: f"{ms:.3f} ({slower:.1f})" for kind, (ms, slower) in one.items()} for layer, one in found.items()}
    rows = [[layer, *(one.get(kind, "-") for kind in kinds)] for layer, one in cells.items()]
    means = [geometric_mean([one[kind][1] for one in found.values() if kind in one]) for kind in kinds]
    return markdown.table(["layer", *kinds], [*rows, ["geometric mean", *(f"({mean:.1f})" for mean in means)]], words=1)


def _narrow_caption(study: Study) -> str:
    return (
        f"TVM's schedules on tensor cores, papers12, batch 128, {study['brand']}, untuned; ms of the best of {study['tiles']} tiles that "
        f"the model ranks first; in brackets how many times as long that takes as the hand-built kernel. {study['date'][:10]}."
    )


def times(study: Study) -> dict[str, dict[str, float]]:
    """Milliseconds by layer and subject, of subjects that were timed."""
    found: dict[str, dict[str, float]] = {}
    for entry in study["entries"]:
        if entry["ms"] is not None:
            found.setdefault(entry["layer"], {})[entry["subject"]] = entry["ms"]
    return found


def peer(layer: Times) -> tuple[str, float] | None:
    """The fastest peer, by name."""
    peers = [(name, ms) for name, ms in layer.items() if name.startswith(("torch_", "cudnn_"))]
    return min(peers, key=lambda pair: pair[1], default=None)


def geometric_mean(ratios: Sequence[float]) -> float:
    """NaN without ratios."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _layers(study: Study) -> str:
    """Times and ratios: against all peers, those that take as many products, cuDNN's im2col and product, and the hand-built kernel."""
    rows, columns = [], dict[str, list[float]]()
    for name, layer in times(study).items():
        ours, best, direct = layer.get(BOTH), peer(layer), peer({one: ms for one, ms in layer.items() if _takes_as_many(one)})
        others = {"all": best and best[1], "direct": direct and direct[1], "gemm": layer.get(GEMM), "hand": layer.get(HAND_BUILT)}
        ratios = {one: ms / ours for one, ms in others.items() if ms and ours}
        for one, ratio in ratios.items():
            columns.setdefault(one, []).append(ratio)
        shown_ratios = [f"{ratios[one]:.2f}" if one in ratios else "-" for one in others]
        rows.append([name, _ms(ours), _ms(others["hand"]), shown(best[0]) if best else "-", *shown_ratios])
    means = [f"{geometric_mean(columns.get(one, [])):.2f}" for one in ("all", "direct", "gemm", "hand")]
    rows.append(["geometric mean", "", "", "", *means])
    heads = ["layer", "TVM's schedule ms", "hand-built ms", "fastest peer", "its ratio", "direct sums", "im2col and product", "hand-built"]
    return markdown.table(heads, rows, words=1)


def _takes_as_many(name: str) -> bool:
    """Whether a peer is known to take as many products as direct sums: cuDNN's algorithms by name, but for Winograd's and FFT."""
    return name.startswith("cudnn_") and "winograd" not in name and "fft" not in name


def _rules(study: Study) -> str:
    """How much faster the same tile is with each form's rules than without any."""
    names = [name for name in RULES if name != PLAIN]
    gains: dict[str, list[float]] = {name: [] for name in names}
    rows = []
    for layer, found in times(study).items():
        cells = []
        for name in names:
            gain = found[PLAIN] / found[name] if PLAIN in found and name in found else None
            gains[name] += [gain] if gain else []
            cells.append("-" if gain is None else f"{gain:.2f}x")
        rows.append([layer, _ms(found.get(PLAIN)), *cells])
    rows.append(["geometric mean", "", *(f"{geometric_mean(gains[name]):.2f}x" for name in names)])
    return markdown.table(["layer", "without rules ms", *(RULES[name].replace("+", " and ") for name in names)], rows, words=1)


def _algorithms(study: Study) -> str:
    """Times of every algorithm's schedule, with the tile that is best for direct convolution."""
    found = times(study)
    keys = sorted({name for layer in found.values() for name in layer if name.endswith("/scheduled")})
    rows = [[layer, _ms(one.get(BOTH)), *(_ms(one.get(key)) for key in keys)] for layer, one in found.items()]
    return markdown.table(["layer", "direct ms", *(f"{key.partition('/')[0]} ms" for key in keys)], rows, words=1)


def _caption(study: Study) -> str:
    named = ("apache-tvm", "torch", "cuda", "cudnn")
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in named)
    return (
        f"float32 with IEEE products on CUDA cores; {study['brand']} (`{study['device']}`); {libraries}; {study['date'][:10]}. The best of "
        f"the model's first {study['tiles']} tiles of direct convolution; the hand-built kernel has its default tile. Peers: PyTorch "
        "in both layouts and cuDNN's algorithms by name, without TF32. Ratios: their time over ours, above 1 we win; direct sums: the "
        "fastest of cuDNN's algorithms without Winograd's and FFT."
    )
