"""Report of the study of fused activations (benchmarks/epilogues.py)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from im2win.bench.results import geometric_mean
from im2win.common import markdown


def table(studies: Sequence[Mapping[str, Any]]) -> str:
    """A row for each activation and device: by how much more time layers take with it, as geometric mean, median and most."""
    columns = ["activation", "device", "costs most in", "layers", "mean", "median", "most", "ms", "ms without"]
    rows = []
    for study in studies:
        good = [row for row in study["layers"] if "cost" in row]
        for name in dict.fromkeys(row["activation"] for row in good):
            of = [row for row in good if row["activation"] == name]
            costs, worst = [row["cost"] for row in of], max(of, key=lambda row: float(row["cost"]))
            mean = geometric_mean([1 + cost for cost in costs]) or 1.0
            shown = [f"{100 * cost:.0f} %" for cost in (mean - 1, statistics.median(costs), worst["cost"])]
            times = markdown.ms(worst["ms"]), markdown.ms(worst["without_ms"])
            rows.append([name, study["device"], worst["conv"], str(len(of)), *shown, *times])
    return markdown.table(columns, rows, words=3)
