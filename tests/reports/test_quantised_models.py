"""The table of quantised models: ratios over ONNX Runtime and over float32, means, and what failed."""

from __future__ import annotations

from typing import Any

from im2win.common.markdown import number
from im2win.reports.deploy import quantised_table


def row(model: str, ours: float | None, theirs: float, floats: tuple[float, float], failed: str | None = None) -> dict[str, Any]:
    names = ("ours float32", "onnxruntime float32")
    spread = {name: {"median": value, "p10": value, "p90": value, "samples": 1} for name, value in zip(names, floats, strict=True)}
    return {
        "model": model, "activations": "uint8", "ours_ms": ours, "peers": {"onnxruntime": theirs}, "spread": spread, "failed": failed,
        "peers_failed": {},
    }  # fmt: skip


def test_table() -> None:
    rows = [row("a", 2.0, 4.0, (8.0, 9.0)), row("b", 1.0, 0.5, (1.0, 2.0)), row("c", None, 1.0, (1.0, 1.0), "no kernel")]
    study = {
        "study": "quantised-models", "models": rows, "device": "d", "brand": "CPU", "threads": 2, "batch": 1, "versions": {},
        "date": "2026-01-01", "commit": "",
    }  # fmt: skip
    lines = quantised_table([study]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[2] == ["a", "uint8", "2.000", "4.000", "8.000", "9.000", "2.00", "4.00"]
    assert cells[3][-2:] == ["0.50", "1.00"]
    assert cells[4][2] == cells[4][-1] == cells[4][-2] == number(None, 2)
    assert [cell.strip("*") for cell in cells[5]][-2:] == ["1.00", "2.00"]
    assert "Failed: c, ours: no kernel" in lines
