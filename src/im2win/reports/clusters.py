"""Reports of the cluster study (studies/clusters.py): the gain of thread-block clusters by family of tiles."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.studies.entries import ROWS, STAYS, TAPS

FAMILIES = {TAPS: "tiles of taps", ROWS: "tiles of rows", STAYS: "blocks that stay"}
SIZES = (2, 4)  # thread blocks of a cluster
WORTH = 1.03  # a gain that exceeds the spread of a measurement

Entry = Mapping[str, Any]


def table(studies: Sequence[Mapping[str, Any]]) -> str:
    """Markdown for every device: one line for each family, the reasons for missing times, and where and with what it was measured."""
    return "\n\n".join("\n\n".join([_families(one["entries"]), *_failures(one["entries"]), _caption(one)]) for one in studies)


def gains(entries: Sequence[Entry], family: str, size: int) -> dict[str, float]:
    """By problem, the time without clusters over the time in clusters of this size, each the better of both numbers of stages."""
    here = [entry for entry in entries if entry["family"] == family and entry["ms"] is not None]
    alone, shared = (_fastest(entry for entry in here if entry["cluster"] == blocks) for blocks in (1, size))
    return {conv: alone[conv] / ms for conv, ms in shared.items() if conv in alone}


def _fastest(entries: Iterable[Entry]) -> dict[str, float]:
    """Milliseconds by problem."""
    found: dict[str, float] = {}
    for entry in entries:
        found[entry["conv"]] = min(entry["ms"], found.get(entry["conv"], entry["ms"]))
    return found


def _families(entries: Sequence[Entry]) -> str:
    rows = []
    for family, title in FAMILIES.items():
        problems = {entry["conv"] for entry in entries if entry["family"] == family}
        if problems:
            cells = [cell for size in SIZES for cell in _gain(gains(entries, family, size))]
            rows.append([title, str(len(problems)), *cells])
    gain = ("measured", "gain, geometric mean", "best", f"more than {100 * (WORTH - 1):.0f} %")
    columns = ["tiles", "problems", *(f"clusters of {size}: {what}" for size in SIZES for what in gain)]
    return markdown.table(columns, rows)


def _gain(found: Mapping[str, float]) -> list[str]:
    if not found:
        return ["0", *[markdown.number(None, 2)] * 2, "0"]
    best = max(found, key=lambda conv: found[conv])
    mean, worth = statistics.geometric_mean(found.values()), sum(gain > WORTH for gain in found.values())
    return [str(len(found)), f"{mean:.2f}", f"{found[best]:.2f} ({best})", str(worth)]


def _failures(entries: Sequence[Entry]) -> list[str]:
    """Reasons why tiles have no time, with the number of tiles."""
    reasons = Counter(" ".join(entry["failed"].split()) for entry in entries if entry["failed"])
    lines = [f"{reason} ({count} tiles)" if count > 1 else reason for reason, count in reasons.items()]
    return ["Failed: " + "; ".join(lines)] if lines else []


def _caption(study: Mapping[str, Any]) -> str:
    shown = ("apache-tvm", "torch", "cuda")
    libraries = ", ".join(f"{name} {version}" for name, version in study["versions"].items() if name in shown)
    return (
        f"{study['brand']} (`{study['device']}`); {libraries}; {study['date'][:10]}. Problems: those with a recorded tile that may be in "
        "clusters. Gain: the time of blocks alone over that of blocks in clusters, each the better of the recorded tile's stages and one "
        "more; above 1 clusters win. Behind the best its problem."
    )
