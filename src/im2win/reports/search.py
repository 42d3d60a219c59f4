"""Report of the study of search length (benchmarks/search_quality.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown

STUDY = "search-quality"  # the study's name in its file


def table(studies: Sequence[Mapping[str, Any]]) -> str:
    """One row for each layer that was searched briefly and thoroughly: the speed of the brief search's kernel over the thorough one's."""
    columns = ["layer", "device", "trials", "ms", "seconds", "trials", "ms", "speed reached"]
    rows = [
        [
            row["conv"], study["device"], str(row["short_trials"]), markdown.ms(row["short_ms"]), f"{row['short_session_s']:.0f}",
            str(row["long_trials"]), markdown.ms(row["long_ms"]), f"{100 * row['short_over_long_speed']:.0f} %",
        ]
        for study in studies for row in study["layers"]
    ]  # fmt: skip
    return markdown.table(columns, rows, words=2)
