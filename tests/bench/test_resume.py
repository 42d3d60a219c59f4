"""A run goes on from an earlier one: layers that would be timed in the same way are kept, the others are measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from im2win.bench import cpu as bench
from im2win.bench import resume
from im2win.bench.confirmation import Checked
from im2win.bench.results import Result, ResultError, Row
from im2win.bench.source import SOURCE, digests
from im2win.device.cpu import Machine
from im2win.records.emission import emitted
from im2win.registry.ranking import default_tile
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer

CONVS = [Conv2d.parse(f"n1-c8x12x12-k{filters}x1x1") for filters in (16, 24, 32)]
LAYERS = [Layer(f"conv{place}", conv) for place, conv in enumerate(CONVS)]
TODAY = digests("cpu")


def measured(layer: Layer, /, **changes: Any) -> Row:
    """A layer without a record, timed by today's source: its choice is the default tile."""
    name, tile = default_tile(layer.conv, "auto", Machine.host(1))
    values = tile.as_dict()
    row = Row(
        layer.name, str(layer.conv), ours_ms=1.0, untuned_ms=1.0, algorithm=name, tile=values, tier="default", untuned_algorithm=name,
        untuned_tile=values, peers={"torch_nchw": 2.0, "torch_nhwc": 3.0}, best_peer="torch_nchw", ratio=2.0,
    )  # fmt: skip
    return replace(row, **changes)


def result(*rows: Row, **changes: Any) -> Result:
    facts: dict[str, Any] = {
        "suite": "custom", "dtype": "float32", "batch": 1, "device": Machine.host(1).name, "brand": "", "threads": 1,
        "versions": {"im2win": "0", "torch": "2"}, "commit": "", "date": "2026-11-01", "ceilings": {},
    }  # fmt: skip
    return Result(**{**facts, "layers": list(rows), "digests": TODAY, **changes})


def kept(before: Result, peers: tuple[str, ...] = ("torch_nchw", "torch_nhwc"), untuned: bool = True) -> dict[int, Row]:
    return resume.kept(before, result(date="2026-11-02"), LAYERS, Machine.host(1), accuracy="float32", peers=peers, untuned=untuned)


def test_a_kept_layer_says_when_and_by_which_source_it_was_measured() -> None:
    found = kept(result(measured(LAYERS[1])))
    kernel = emitted(CONVS[1], found[1].algorithm, found[1].tile, "cpu")
    assert found == {1: measured(LAYERS[1], date="2026-11-01", source=TODAY[SOURCE], fingerprint=kernel, untuned_fingerprint=kernel)}
    again = kept(result(found[1], date="2026-11-03"))
    assert again == found, "a layer that is kept twice says when it was measured, not when it was kept"


@pytest.mark.parametrize("changes", [
    {"failed": "wrong result", "ours_ms": None},
    {"untuned_ms": None},
    {"peers": {"torch_nchw": 2.0}},
    {"tile": {}},
    {"conv": str(CONVS[2])},
    {"layer": "other"},
])  # fmt: skip
def test_what_is_measured_again(changes: dict[str, Any]) -> None:
    assert kept(result(measured(LAYERS[0], **changes))) == {}


def test_another_kernel_is_measured_again() -> None:
    row = measured(LAYERS[0], fingerprint="cpu:0")
    assert kept(result(row, digests={**TODAY, row.algorithm: "0" * 16})) == {}


def test_a_choice_that_was_slower_than_the_default_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "checked", lambda row, *rest: Checked(row))
    slower = measured(LAYERS[0], untuned_algorithm="other", untuned_ms=0.9)
    assert kept(result(slower)) == {} and set(kept(result(replace(slower, untuned_ms=0.98)))) == {0}


def test_a_peer_that_failed_counts_as_timed_and_one_that_is_not_asked_for_need_not_be() -> None:
    row = measured(LAYERS[0], peers={"torch_nchw": 2.0}, peers_failed={"torch_nhwc": "refused"}, untuned_ms=None)
    assert set(kept(result(row), untuned=False)) == {0} and set(kept(result(row), ("torch_nchw",), untuned=False)) == {0}
    assert kept(result(row, digests={}), untuned=False) == {}, "a file without digests does not say what it timed"


def test_a_run_of_one_algorithm_keeps_no_layer_of_another() -> None:
    row = measured(LAYERS[0])
    other = next(one for one in ("im2col", "mec") if not row.algorithm.startswith(one))
    named: dict[str, Any] = {"accuracy": "float32", "peers": ("torch_nchw",), "untuned": True}
    assert resume.kept(result(row), result(), LAYERS, Machine.host(1), algorithm=other, **named) == {}
    assert set(resume.kept(result(row), result(), LAYERS, Machine.host(1), algorithm=row.algorithm, **named)) == {0}


@pytest.mark.parametrize(("changes", "message"), [
    ({"suite": "resnet50"}, r"suite \(='resnet50'\), this run has 'custom'"),
    ({"threads": 2}, r"threads \(=2\), this run has 1"),
    ({"device": "other"}, r"device \(='other'\)"),
    ({"versions": {"torch": "1"}}, r"versions\[torch\] \(='1'\), this run has '2'"),
    ({"versions": {}}, r"versions\[torch\] \(=None\)"),
])  # fmt: skip
def test_another_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ResultError, match=message):
        kept(result(measured(LAYERS[0]), **changes))


def test_a_run_measures_what_is_missing_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.ceilings, "measure", lambda threads, **_: bench.ceilings.Ceilings(100.0, 10.0))
    times = {place: measured(layer, date="2026-11-01") for place, layer in enumerate(LAYERS) if place != 1}
    monkeypatch.setattr(bench, "kept", lambda *rest, **named: dict(times))
    seen: list[list[str]] = []
    new = bench.run(
        LAYERS, against=(), rounds=2, seconds_warmup=0.01, threads=1, before=result(ceilings={"fma_gflops": 90.0, "copy_gbs": 12.0}),
        keep=lambda partial: seen.append([row.layer for row in partial.layers]),
    )  # fmt: skip
    assert seen == [["conv0", "conv2"], ["conv0", "conv1", "conv2"], ["conv0", "conv1", "conv2"]]
    assert [bool(row.date) for row in new.layers] == [True, False, True] and new.layers[1].ours_ms != 1.0
    assert new.ceilings == {"fma_gflops": 100.0, "copy_gbs": 12.0}  # of both runs, so that the rows of neither are above them
    assert Result.load(new.save(tmp_path / "r.json")) == new
