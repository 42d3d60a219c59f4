"""The study of algorithms on a CPU: what is timed, what fails, its table, and its rows beside the papers' numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from im2win.bench.cpu import Ours
from im2win.bench.peers.subject import PeerError, Tensors
from im2win.reports import algorithms as report
from im2win.reports import papers
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies import algorithms
from im2win.studies.entries import COMPARED, LIBRARY_GEMM

SMALL = Conv2d.parse("n2-c4x9x11-k8x3x3-s2x1-p1")


def test_im2col_with_a_library_product_is_a_convolution() -> None:
    pytest.importorskip("torch")
    tensors = Tensors.random(SMALL)
    trial = algorithms.LibraryGemm().prepare(SMALL, tensors, 1)
    trial.call()
    np.testing.assert_allclose(trial.read(), tensors.expected(SMALL), rtol=0, atol=1e-4)
    assert trial.extra_bytes == 4 * 2 * 5 * 11 * 4 * 9
    for other in (SMALL.with_(layout="NHWC"), SMALL.with_(padding=(1, 1, 0, 1)), Conv2d.parse("n1-c4x6x6-k4x3x3-g2")):
        with pytest.raises(PeerError, match="unfold takes float32 in NCHW"):
            algorithms.LibraryGemm().prepare(other, Tensors.random(other), 1)


def test_subjects_are_all_algorithms_in_both_layouts() -> None:
    found = [(one.name, layout) for one, layout in algorithms.subjects()]
    assert found == [*((name, layout) for layout in ("NCHW", "NHWC") for name in COMPARED), (LIBRARY_GEMM, "NCHW")]


@pytest.mark.parametrize(
    ("layers", "rounds", "message"),
    [
        ([], 1, "must name one at least"), ([SMALL], 0, r"`rounds` \(=0\)"),
        ([SMALL, SMALL.with_(batch=3)], 1, r"batches are \[2, 3\]"), ([SMALL.with_(bias=True)], 1, "without an epilogue"),
    ],
)  # fmt: skip
def test_refusals(layers: list[Conv2d], rounds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithms.run([Layer("a", conv) for conv in layers], rounds=rounds)


@pytest.mark.slow
def test_it_times_what_is_right_and_says_what_is_not() -> None:
    field = [(Ours(algorithm="mec/tiled", tuned=False, name="mec/tiled"), "NHWC"), (algorithms.LibraryGemm(), "NHWC")]
    study = algorithms.run([Layer("a", SMALL)], threads=1, rounds=2, seconds_warmup=0.05, field=field)
    (entry,) = study["entries"]
    assert entry["times"]["mec/tiled NHWC"]["samples"] == 2 and entry["tiers"] == {"mec/tiled NHWC": "default"}
    assert "unfold takes" in entry["failed"][f"{LIBRARY_GEMM} NHWC"]
    assert entry["extra_bytes"]["mec/tiled NHWC"] > 0 and study["batch"] == 2


def entry(name: str, **medians: float) -> dict[str, Any]:
    times = {key.replace("_", "/", 1).replace("__", " "): value for key, value in medians.items()}
    return {
        "layer": name, "conv": str(SMALL), "times": {key: {"median": value} for key, value in times.items()}, "failed": {},
        "extra_bytes": {"mec/tiled NCHW": 2**20}, "tiers": {"mec/tiled NCHW": "exact"},
    }  # fmt: skip


def test_table_and_papers() -> None:
    first = entry("a", im2win_fused__NCHW=2.0, im2win_stored__NCHW=1.0, im2win_fused__NHWC=0.5, im2col_tiled__NCHW=3.0)
    first["times"][f"{LIBRARY_GEMM} NCHW"] = {"median": 4.0}
    second = entry("b", im2win_fused__NCHW=1.0, direct_tiled__NCHW=2.0, mec_tiled__NCHW=3.0, mcfa_tiled__NCHW=2.0)
    study = {
        "study": "algorithms", "device": "d", "brand": "CPU", "threads": 2, "batch": 1, "versions": {"torch": "2"}, "date": "2026-01-01",
        "entries": [first, second],
    }  # fmt: skip
    assert report.ratios(study) == {
        "im2win over im2col": [3.0], "over im2col and library product": [4.0], "over direct": [2.0], "MCFA over MEC": [1.5],
        "im2win, NHWC over NCHW": [2.0],
    }  # fmt: skip
    text = report.table([study])
    assert text.count("geometric mean") == 1 and "torch 2; 2026-01-01" in text and "| a | " in text
    rows = papers.table({}, [study], [])
    assert "4.00 on average, 4.00 to 4.00 (CPU)" in rows and "1.50 on average" in rows
