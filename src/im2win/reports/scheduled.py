"""Report of the study of TVM's CUDA schedules (studies/scheduled.py): layers against peers, algorithms, and what each rule gains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.spec.methods import shown
from im2win.studies.entries import HAND_BUILT, RULES

BOTH, PLAIN = "both", "plain"

Study = Mapping[str, Any]
Times = Mapping[str, float]


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each layer, then what rules gain, then the other algorithms."""
    return "\n\n".join(f"{_layers(study)}\n\n{_rules(study)}\n\n{_algorithms(study)}\n\n{_caption(study)}" for study in studies)


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
    rows, against, beside = [], list[float](), list[float]()
    for name, layer in times(study).items():
        ours, best, hand = layer.get(BOTH), peer(layer), layer.get(HAND_BUILT)
        ratios = [best[1] / ours if ours and best else None, hand / ours if ours and hand else None]
        against += [one for one in ratios[:1] if one]
        beside += [one for one in ratios[1:] if one]
        rows.append([
            name, _ms(ours), _ms(hand), shown(best[0]) if best else "-", _ms(best[1] if best else None),
            *("-" if one is None else f"{one:.2f}" for one in ratios),
        ])  # fmt: skip
    rows.append(["geometric mean", "", "", "", "", f"{geometric_mean(against):.2f}", f"{geometric_mean(beside):.2f}"])
    columns = ["layer", "TVM's schedule ms", "hand-built ms", "fastest peer", "its ms", "peer / ours", "hand-built / ours"]
    return markdown.table(columns, rows, words=1)


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
        "in both layouts and cuDNN's algorithms by name, without TF32."
    )
