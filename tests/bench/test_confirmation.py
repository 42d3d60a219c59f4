"""A result file is confirmed where today's source chooses and emits the kernels that it times, and only there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import fill, ok
from scripts import script

from im2win.bench import confirmation
from im2win.bench.confirmation import accuracy_of, checked, confirmed
from im2win.bench.results import Result, Row, Spread
from im2win.bench.source import digests, stale
from im2win.device.cpu import Machine
from im2win.records.emission import emitted
from im2win.records.log import Log
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d

HERE = Machine("intel-xeon", "rocketlake", "avx512f", 2, 16, 32, 48 << 10, 2 << 20, 32 << 20)
CONV = Conv2d.parse("n1-c8x12x12-k16x1x1")
TODAY = digests("cpu")
BEFORE = {name: "other" if "/" in name or name == "choice" else value for name, value in TODAY.items()}


@pytest.fixture(scope="module")
def row() -> Row:
    """A layer as a run of today's source leaves it: no record, so that the choice is the default tile."""
    name, tile = default_tile(CONV, "auto", HERE)
    values = tile.as_dict()
    default = {"untuned_algorithm": name, "untuned_tile": values}
    return Row("conv", str(CONV), ours_ms=1.0, untuned_ms=1.0, algorithm=name, tile=values, tier="default", **default)


def check(row: Row, made: dict[str, str] = TODAY) -> confirmation.Checked:
    return checked(row, HERE, "float32", made)


def result(*rows: Row, **fields: Any) -> Result:
    facts: dict[str, Any] = {"device": HERE.name, "brand": "", "threads": 2, "versions": {}, "commit": "", "date": "", "ceilings": {}}
    return Result("papers12", "float32", 1, **{**facts, "layers": list(rows), "digests": TODAY, **fields})


def test_a_new_file_gets_fingerprints_and_later_source_confirms_it(row: Row) -> None:
    new = check(row)
    kernel = emitted(CONV, row.algorithm, row.tile, "cpu")
    assert (new.reason, new.row.fingerprint, new.row.untuned_fingerprint) == ("", kernel, kernel)
    assert confirmed(result(row), [new]).confirmed == {}, "its own digests are today's"
    later = confirmed(result(new.row, digests=BEFORE), [check(new.row, BEFORE)])
    assert stale(later.digests) and later.confirmed == TODAY and later.layers == [new.row]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"fingerprint": "", "untuned_fingerprint": ""}, "conv: the file does not say which kernel was timed"),
    ({"fingerprint": "cpu:0"}, "conv: its kernel has changed since"),
    ({"untuned_fingerprint": "cpu:0"}, "conv, default: its kernel has changed since"),
    ({"algorithm": "mec/tiled"}, "conv: mec/tiled was timed, today it is "),
    ({"tier": "exact"}, "conv: its tile came from exact, today's from default"),
    ({"tile": {}}, "conv: its kernel is not known"),
    ({"failed": "no"}, "conv: its kernel is not known"),
])  # fmt: skip
def test_why_a_file_is_not_confirmed(row: Row, changes: dict[str, Any], reason: str) -> None:
    one = check(replace(check(row).row, **changes), BEFORE)
    assert one.reason.startswith(reason)
    assert confirmed(result(one.row, digests=BEFORE), [one]).confirmed == {}


def test_another_tile_is_another_kernel(row: Row) -> None:
    unroll = {**row.tile, "unroll": row.tile["unroll"] + 1}
    assert check(replace(row, tile=unroll)).reason == f"conv: another tile of {row.algorithm}"
    assert check(replace(row, untuned_tile=unroll)).reason == f"conv, default: another tile of {row.algorithm}"


def test_a_choice_that_became_the_default_tile_takes_its_times(row: Row, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run timed both. Without a record of the default tile nothing is known of its error, and the row stays."""
    spread = {"ours": Spread(2.0, 1.9, 2.1, 5), "untuned": Spread(1.0, 0.9, 1.1, 5)}
    before = replace(
        row, algorithm="mec/tiled", tile={"rows": 1}, tier="exact", ours_ms=2.0, ratio=1.5, untuned_ratio=3.0, gflops=10.0, spread=spread,
        fingerprint="cpu:0",
    )  # fmt: skip
    today = row.algorithm, schedule_of(row.algorithm).scheduler.tile(row.tile), "exact"
    monkeypatch.setattr(confirmation, "looked_up", lambda *_, **__: today)
    monkeypatch.setattr(confirmation, "PACKAGED", log.folder)
    assert check(before).reason.startswith("conv: mec/tiled was timed, today it is ")
    fill(log, ok(1e-3, CONV, algorithm=row.algorithm, tile=row.tile, device=HERE.name, error=1e-6, extra_bytes=64))
    after = check(before)
    assert after.reason == "" and after.row.fingerprint == after.row.untuned_fingerprint != ""
    assert (after.row.ours_ms, after.row.ratio, after.row.gflops, after.row.extra_bytes) == (1.0, 3.0, 20.0, 64)
    assert (after.row.algorithm, after.row.tile, after.row.spread["ours"]) == (row.algorithm, row.tile, spread["untuned"])
    assert check(replace(before, untuned_ms=None)).reason.startswith("conv: mec/tiled was timed")


def test_a_cpu_that_is_not_here_has_the_instructions_of_its_microarchitecture() -> None:
    found = {name: confirmation.device_named(f"{name}-2t") for name in ("intel-xeon-emeraldrapids", "amd-epyc-znver4")}
    features = {name: machine.features for name, machine in found.items() if isinstance(machine, Machine)}
    assert features["amd-epyc-znver4"] == ("avx512vnni", "avx512bf16")
    assert set(features["intel-xeon-emeraldrapids"]) >= {"avx512vnni", "avx512bf16", "amx-int8", "amx-bf16"}


def test_the_suite_names_the_accuracy() -> None:
    assert accuracy_of(result()) == "float32"
    assert accuracy_of(replace(result(), suite="winograd64-winograd")) == "winograd"
    assert accuracy_of(replace(result(), suite="papers12-exact")) == "exact"


def test_the_script_rewrites_files(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    result(row).save(path)
    result(row, device="unknown-cpu").save(other)
    module = script("benchmarks/confirm.py")
    monkeypatch.setattr(module, "device_named", lambda name: HERE if name == HERE.name else None)
    assert module.main([str(path), str(other), "--processes", "1"]) == 1
    assert Result.load(path).layers[0].fingerprint and not Result.load(other).layers[0].fingerprint
    assert "b.json: unknown-cpu is unknown" in capsys.readouterr().out
