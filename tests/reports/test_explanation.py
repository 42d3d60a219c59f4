"""Why a layer gets its kernel: tiers, times, roofs, runner-up and what was refused, for devices of every kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tvm
from recorded import TODAY, beside_default, fill, ok

from im2win.bench.ceilings import Ceilings
from im2win.cli.commands.explain import lines
from im2win.device.cpu import Machine
from im2win.device.gpu import H200
from im2win.numerics.tolerance import tolerance
from im2win.records.log import Log
from im2win.registry.backends import Device, backend_for
from im2win.registry.schedules import schedule_of
from im2win.reports.explanation import CAUSES, TIERS, explain
from im2win.spec.conv2d import Conv2d

HALF = Conv2d.parse("n4-c64x28x28-k64x3x3-p1-float16-NHWC")
SMALL = Conv2d.parse("n1-c16x12x12-k32x3x3-p1")
NOBODYS = SMALL.with_(dtype="int8", activation="silu")  # sums of integers have no such activation
CPU = Machine("Some CPU", "znver4", "avx512f", 2, 16, 32, 32 << 10, 1 << 20, 32 << 20)
PEAKS = Ceilings(fma_gflops=100.0, copy_gbs=20.0)


def records(conv: Conv2d, device: Device, method: str, seconds: float, slower: float = 2.0) -> list[Any]:
    """The record of a schedule's second tile, and of the default tile beside it."""
    backend = backend_for(device)
    tile = backend.ranked(conv, schedule_of(method))[1][1].as_dict()
    facts = {"algorithm": method, "device": backend.name, "target": backend.target, "threads": backend.threads, "tvm": tvm.__version__}
    facts |= {"generator": TODAY, "error": 0.0, "tolerance": tolerance(conv), "date": "2026-01-31T12:00:00+00:00"}
    return beside_default(ok(seconds, conv, tile=tile, **facts), device, slower=slower)


def test_without_records_the_model_answers(tmp_path: Path) -> None:
    one = explain(HALF, H200, tmp_path)
    assert one.tier == "default" and one.date is None and one.chosen == one.default and one.chosen.measured_s is None
    assert one.runner_up is not None and one.runner_up.algorithm != one.chosen.algorithm
    assert one.chosen.expected_s is not None and one.runner_up.expected_s is not None and one.chosen.expected_s <= one.runner_up.expected_s
    assert sum(one.causes.values()) == pytest.approx(1) and set(one.causes) <= set(CAUSES)
    assert list(one.causes.values()) == sorted(one.causes.values(), reverse=True)
    said = "\n".join(lines(one))
    assert f"  chosen by: {TIERS['default']}" in said and "  default tile: " not in said and "not able: direct / depthwise" in said


def test_roofs_of_a_gpu() -> None:
    """Each of 132 multiprocessors multiplies and adds 2048 pairs of halves a cycle, at up to 1.98 GHz; a copy has 4.2 TB/s."""
    one = explain(Conv2d.parse("n32-c256x28x28-k256x3x3-p1-float16-NHWC"), H200)
    assert one.roofs["arithmetic"] == pytest.approx(32 * 28 * 28 * 256 * 256 * 9 / (132 * 2048 * 1.98e9), rel=0.02)
    assert one.roofs["memory"] == pytest.approx((2 * 32 * 28 * 28 * 256 + 256 * 256 * 9) * 2 / 4.2e12)
    assert one.bound == "arithmetic" and one.share is not None and 0.2 < one.share < 1.2


def test_a_record_is_dated_and_its_rivals_are_named(tmp_path: Path) -> None:
    fill(Log(tmp_path), *records(HALF, H200, "implicit_gemm/tiled", 1e-6))
    one = explain(HALF, H200, tmp_path)
    assert (one.tier, one.chosen.algorithm, one.chosen.measured_s, one.date) == (
        "exact", "implicit_gemm/tiled", 1e-6, "2026-01-31T12:00:00+00:00",
    )  # fmt: skip
    assert one.default.measured_s == pytest.approx(2e-6)
    said = "\n".join(lines(one))
    assert "kernel: implicit_gemm / tiled, measured 0.001 ms" in said and "2.00x the time" in said
    assert "chosen by: a tuning record of this layer on this device, of 2026-01-31" in said
    other = explain(HALF.with_(bias=True), H200, tmp_path)
    assert other.tier == "other epilogue" and other.chosen.measured_s is None


def test_a_refused_record_says_why(tmp_path: Path) -> None:
    fill(Log(tmp_path), *records(HALF, H200, "implicit_gemm/tiled", 1e-6, slower=0.5))
    one = explain(HALF, H200, tmp_path)
    assert one.chosen.algorithm == one.default.algorithm
    fill(Log(tmp_path / "old"), *(dataclasses.replace(record, tvm="0.1") for record in records(SMALL, CPU, "direct/tiled", 1e-6)))
    one = explain(SMALL, CPU, tmp_path / "old")
    [reason] = [reason for reason in one.refused if reason.startswith("recorded with TVM 0.1")]
    assert one.refused[reason] == 2 and f"  2 records refused: {reason}" in lines(one)


def test_a_cpu_has_roofs_where_its_ceilings_are_known(tmp_path: Path) -> None:
    assert explain(SMALL, CPU, tmp_path).roofs == {}
    one = explain(Conv2d.parse("n1-c64x24x24-k64x5x5-p2"), CPU, tmp_path, "exact", PEAKS)
    assert one.roofs == {"arithmetic": pytest.approx(64 * 64 * 25 * 24 * 24 * 2 / 100e9), "memory": pytest.approx(one.roofs["memory"])}
    assert one.bound == "arithmetic" and one.share is None and one.chosen.expected_s is None
    fast = explain(Conv2d.parse("n1-c64x56x56-k64x3x3-p1"), CPU, tmp_path, ceilings=PEAKS)
    assert fast.chosen.algorithm == "winograd/tiled" and list(fast.roofs) == ["memory"], "it takes fewer products"


def test_the_command(command: Any, tmp_path: Path) -> None:
    done = command("explain", HALF, "--device", "nvidia-h200", "--logs", tmp_path)
    assert done.status == 0 and f"{HALF} on NVIDIA H200 (nvidia-h200" in done.out and "roof: " in done.out
    done = command("explain", SMALL, "--json", "--logs", tmp_path)
    values = json.loads(done.out)
    assert done.status == 0 and values["schema"] == 1 and values["skipped"] == []
    [one] = values["layers"]
    assert one["conv"] == str(SMALL) and one["bound"] in one["roofs"] and one["tier"] in TIERS
    assert set(one["chosen"]) == {"algorithm", "tile", "measured_s", "expected_s"}
    lines = [json.dumps({"schema": 1, "conv": str(conv), "count": 1, "target": "cpu"}) for conv in (NOBODYS, SMALL)]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    done = command("explain", tmp_path / "two.jsonl", "--logs", tmp_path)
    assert done.status == 0 and f"skipped: {NOBODYS}: no algorithm computes" in done.out and f"{SMALL} on " in done.out
    done = command("explain", NOBODYS)
    assert done.status == 2 and "no algorithm computes" in done.err
    done = command("explain", SMALL, "--device", "abacus-1t")
    assert done.status == 2 and "`--device` (=abacus-1t) must have shipped records" in done.err
