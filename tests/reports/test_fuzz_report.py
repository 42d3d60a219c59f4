"""The tables of random kernels and of kernels with mistakes."""

from __future__ import annotations

from typing import Any

from im2win.reports import tables

FACTS: dict[str, Any] = {"device": "some-cpu-2t", "brand": "Some CPU", "date": "2026-01-31T12:00:00+00:00", "seed": 3}
VERSIONS = {"apache-tvm": "0.27.0", "python": "3.11.7"}
CAMPAIGN: dict[str, Any] = {
    "study": "fuzz", **FACTS, "versions": VERSIONS, "target": "cpu", "gpu": "", "count": 200, "peak_bytes": 500 << 20, "cpu_s": 90.0,
    "outcomes": {"close": 90, "equal": 100, "refused": 9, "wrong": 1}, "failures": [{"index": 17, "kind": "wrong", "message": "9 differ"}],
}  # fmt: skip


def test_campaigns() -> None:
    emulated = {**CAMPAIGN, "target": "cuda", "gpu": "nvidia-h200", "count": 50, "outcomes": {"equal": 50}, "failures": []}
    filled = tables.fill("<!-- table?:fuzz -->\n<!-- /table -->", {}, [emulated, CAMPAIGN])
    first, second = [line for line in filled.splitlines() if "some-cpu-2t" in line]
    assert first == "| CPU | `some-cpu-2t` | 200 | 100 | 90 | 9 | 1 | 500 | 0.45 |"
    assert second == "| CUDA, emulated, for nvidia-h200 | `some-cpu-2t` | 50 | 50 | 0 | 0 | 0 | 500 | 1.80 |"
    assert "CPU, case 17: wrong." in filled
    assert filled.count("Some CPU; apache-tvm 0.27.0, Python 3.11.7; seed 3; 2026-01-31.") == 1, "the same of both"


def test_mistakes() -> None:
    kinds = {"axes swapped": {"caught": 7, "equivalent": 2}, "index stale": {"caught": 3, "missed": 1}}
    found = {"injected": 11, "caught": 10, "equivalent": 2, "refused": 0, "kinds": kinds}
    study = {"study": "broken-kernels", **FACTS, "targets": {"cpu": found}}
    filled = tables.fill("<!-- table?:broken-kernels -->\n<!-- /table -->", {}, [study])
    assert "| cpu | axes swapped | 7 | 7 | 2 |" in filled and "| cpu | index stale | 4 | 3 | 0 |" in filled
    assert "| cpu | **all** | 11 | 10 | 2 |" in filled and "`some-cpu-2t`; 2026-01-31." in filled


def test_without_a_study_the_text_stays() -> None:
    text = "<!-- table?:fuzz -->\nnothing yet\n<!-- /table -->"
    assert tables.fill(text, {}) == text
