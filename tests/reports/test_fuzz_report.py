"""The tables of random kernels, of kernels with mistakes, and of fleets."""

from __future__ import annotations

from typing import Any

from im2win.bench.source import digests, kernels_of
from im2win.reports import tables

FACTS: dict[str, Any] = {
    "device": "some-cpu-2t", "brand": "Some CPU", "date": "2026-01-31T12:00:00+00:00", "commit": "0123456789ab", "digests": digests("cpu"),
    "versions": {"apache-tvm": "0.27.0", "python": "3.11.7"},
}  # fmt: skip
CAMPAIGN: dict[str, Any] = {
    "study": "fuzz", **FACTS, "seed": 3, "target": "cpu", "gpu": "", "count": 200, "peak_bytes": 500 << 20, "cpu_s": 90.0,
    "outcomes": {"close": 90, "equal": 100, "refused": 9, "wrong": 1}, "failures": [{"index": 17, "kind": "wrong", "message": "9 differ"}],
    "refused": {"no gelu": 5, "no groups": 4},
}  # fmt: skip


def test_campaigns() -> None:
    emulated = {**CAMPAIGN, "target": "cuda", "gpu": "nvidia-h200", "count": 50, "outcomes": {"equal": 50}, "failures": [], "refused": {}}
    filled = tables.fill("<!-- table?:fuzz -->\n<!-- /table -->", {}, [emulated, CAMPAIGN])
    first, second = [line for line in filled.splitlines() if "some-cpu-2t" in line]
    assert first == "| CPU | `some-cpu-2t` | 200 | 100 | 90 | 9 | 1 | 500 | 0.45 |"
    assert second == "| CUDA, emulated, for nvidia-h200 | `some-cpu-2t` | 50 | 50 | 0 | 0 | 0 | 500 | 1.80 |"
    assert "CPU, case 17: wrong." in filled
    assert 'CPU, refused: "no gelu" (5), "no groups" (4).' in filled and "Since then" not in filled
    said = "Seed 3; Some CPU; apache-tvm 0.27.0, Python 3.11.7; commit 0123456789ab; 2026-01-31."
    assert filled.count(said) == 1, "the same of both"


def test_a_campaign_of_other_kernels_says_so() -> None:
    older = {**CAMPAIGN, "digests": {**CAMPAIGN["digests"], "direct/tiled": "0", "direct/none": "0"}}
    filled = tables.fill("<!-- table?:fuzz -->\n<!-- /table -->", {}, [older])
    methods = len(kernels_of(older["digests"]))
    assert f"Since then the source of 2 of {methods} methods' kernels has changed (cpu)." in filled


def test_mistakes() -> None:
    def rows(mistake: str, *outcomes: str) -> list[dict[str, Any]]:
        named = [{"kernel": "layer", "mistake": mistake, "place": place} for place in range(len(outcomes))]
        return [{**row, **({"outcome": one, "why": "so"} if one else {})} for row, one in zip(named, outcomes, strict=True)]

    on_cpu = [*rows("", "ok", "caught"), *rows("axes swapped", *["caught"] * 7, "equivalent", "refused")]
    on_cpu += rows("index stale", "caught", "missed", "")
    studies = [
        {"study": "broken-kernels", "kernels": "cpu", **FACTS, "rows": on_cpu},
        {"study": "broken-kernels", "kernels": "cuda", **FACTS, "rows": rows("no wait", "caught")},
    ]
    filled = tables.fill("<!-- table?:broken-kernels -->\n<!-- /table -->", {}, studies)
    assert "| cpu | axes swapped | 7 | 7 | 0 | 1 | 1 | 0 |" in filled and "| cpu | index stale | 2 | 1 | 1 | 0 | 0 | 1 |" in filled
    assert "| cpu | **all**; without a mistake 1 of 2 pass | 9 | 8 | 1 | 1 | 1 | 1 |" in filled
    assert "| **all** |  | 10 | 9 | 1 | 1 | 1 | 1 |" in filled and "commit 0123456789ab; 2026-01-31." in filled
    assert "cpu, layer: index stale (1) was missed: so." in filled and "cpu, layer: no mistake (1) was caught: so." in filled


def test_a_fleet() -> None:
    sessions = [
        {"workers": count, "trials": trials, "seconds": seconds, "busy": 0.5}
        for count, trials, seconds in ((1, 60, 60.0), (2, 60, 32.0), (4, 80, 20.0))
    ]
    study = {"study": "fleet", **FACTS, "conv": "n1", "workers_on": "some-cpu-2t", "wait_s": 1.0, "cpus": 16, "sessions": sessions}
    filled = tables.fill("<!-- table?:fleet -->\n<!-- /table -->", {}, [study])
    assert "| 1 | 60 | 60.0 | 50 % | 1.00 |" in filled and "| 2 | 60 | 32.0 | 50 % | 1.88 |" in filled
    assert "| 4 | 80 | 20.0 | 50 % | 4.00 |" in filled and "each candidate takes its worker 1 s" in filled
    assert "candidates are measured." in tables.fill("<!-- table?:fleet -->\n<!-- /table -->", {}, [{**study, "wait_s": None}])


def test_without_a_study_the_text_stays() -> None:
    text = "<!-- table?:fuzz -->\nnothing yet\n<!-- /table -->"
    assert tables.fill(text, {}) == text
