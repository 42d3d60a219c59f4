"""Tables, summary and plot of the zoo, from a made-up result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from im2win.reports import zoo
from im2win.reports.tables import fill


def row(network: str, **times: float | str) -> dict[str, Any]:
    subjects = {name: {"failed": time} if isinstance(time, str) else {"median": time, "error": 0.0} for name, time in times.items()}
    return {"network": network, "mode": "eager", "subjects": subjects, "groups": {"ours": {"layers": 4, "ours": 3}}, "seconds": 1.0}


STUDY: dict[str, Any] = {
    "study": "zoo", "device": "mine", "brand": "Mine", "dtype": "float32", "batch": 1, "tolerance": 1e-3, "date": "2026-11-23T00:00:00",
    "rows": [
        row("fast", ours=1.0, torch_nchw=4.0, torch_nhwc=2.0, onnxruntime="no\nexport"),
        row("slow", ours=5.0, ours_nhwc=4.0, torch_nchw=2.0, torch_nhwc=3.0, onnxruntime=1.0),
        row("broken", ours="wrong result", torch_nchw=2.0),
    ],
}  # fmt: skip


def test_the_ratio_is_over_the_better_layout() -> None:
    assert [zoo.ratio(one) for one in STUDY["rows"]] == [2.0, 0.5, None]


def test_tables_between_markers_hold_ratios_and_reasons() -> None:
    text = fill("<!-- table:zoo -->\n<!-- /table -->\n<!-- table:zoo-summary -->\n<!-- /table -->\n", {}, [STUDY])
    assert "2.00" in text and "3/4" in text
    assert "- fast, eager, ONNX Runtime: no export" in text and "- broken, eager, im2win: wrong result" in text
    summary = zoo.summary([STUDY])
    assert "2/3" in summary and "1.00" in summary and "0.50 (slow)" in summary


def test_without_a_file_an_optional_marker_stays() -> None:
    text = "<!-- table?:zoo -->\nas it was\n<!-- /table -->\n"
    assert fill(text, {}) == text


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert zoo.plot(STUDY, tmp_path / "zoo.png").read_bytes().startswith(b"\x89PNG")
