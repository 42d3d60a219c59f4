"""Report of the study of untuned choices (benchmarks/untuned.py)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.spec.conv2d import Conv2d

FAR = 1.5  # an outlier takes so many times the tuned time
KINDS = ("all", "depthwise", "grouped", "1x1", "3x3", "others")


def kind(conv: Conv2d) -> str:
    """The kind of layer that a row of the table sums up."""
    if conv.groups > 1:
        return "depthwise" if conv.groups == conv.in_channels else "grouped"
    return {(1, 1): "1x1", (3, 3): "3x3"}.get(conv.kernel, "others")


def speed(row: Mapping[str, Any]) -> float | None:
    """The speed of the default over that of the best tuned kernel; None where a session failed."""
    times = [row.get(name, {}).get("ms") for name in ("default", "tuned")]
    return None if None in times else times[1] / times[0]


def table(studies: Sequence[Mapping[str, Any]]) -> str:
    """One row for each file and kind of layer: number of layers, geometric mean and least speed, and the layers that are far off."""
    columns = ["layers", "device", "kind", "slowest of these", "number", "speed untuned / tuned", "least", f"more than {FAR}x off"]
    rows = []
    for study in studies:
        found = [(Conv2d.parse(row["conv"]), share) for row in study["rows"] if (share := speed(row)) is not None]
        for name in KINDS:
            some = [(share, str(conv)) for conv, share in found if name in ("all", kind(conv))]
            if some:
                shares = [share for share, _ in some]
                rows.append([
                    study["layers_from"], study["device"], name, min(some)[1], str(len(some)),
                    f"{math.exp(statistics.fmean(map(math.log, shares))):.2f}", f"{min(shares):.2f}",
                    str(sum(share < 1 / FAR for share in shares)),
                ])  # fmt: skip
    return markdown.table(columns, rows, words=4)
