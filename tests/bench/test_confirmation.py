"""A result file is confirmed where today's source chooses and emits the kernels that it times, and only there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import fill, ok
from scripts import script

from im2win.bench import confirmation
from im2win.bench.confirmation import (
    accuracy_of,
    checked,
    chosen,
    confirmed,
    default_moved,
    problems,
    untuned_confirmed,
    untuned_kept,
    zoo_confirmed,
    zoo_kept,
)
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
BEFORE = {**TODAY, "kernels": "other", "choice": "other"}


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


def test_the_zoo_is_confirmed_where_its_problems_have_the_same_kernels() -> None:
    study = {"digests": TODAY, "rows": [{"groups": {"ours": {"convs": [str(CONV)]}, "ours_nhwc": {"convs": []}}}]}
    assert problems(study) == [str(CONV)] and problems({"rows": [{"groups": {"ours": {"layers": 1}}}]}) == []
    kernels = {str(CONV): chosen(str(CONV), HERE)}
    new, reasons = zoo_confirmed(study, kernels)
    assert not reasons and new["kernels"] == kernels and "confirmed" not in new
    later, reasons = zoo_confirmed({**new, "digests": BEFORE}, kernels)
    assert not reasons and later["confirmed"] == TODAY
    other, reasons = zoo_confirmed({**new, "digests": BEFORE}, {str(CONV): "cpu:0"})
    assert reasons == [f"{CONV}: another kernel is chosen today"] and "confirmed" not in other
    unknown, reasons = zoo_confirmed({**study, "digests": BEFORE}, kernels)
    assert "does not say which kernels" in reasons[0] and unknown == {**study, "digests": BEFORE}


def test_networks_with_other_kernels_are_dropped_from_the_zoo() -> None:
    other = replace(CONV, batch=CONV.batch + 1)
    rows = [{"network": str(conv.batch), "groups": {"ours": {"convs": [str(conv)]}}} for conv in (CONV, other, CONV)]
    study = {"digests": BEFORE, "rows": rows, "kernels": {str(CONV): "cpu:1", str(other): "cpu:2"}}
    kept = zoo_kept(study, {str(CONV): "cpu:1", str(other): "cpu:3"})
    assert kept["rows"] == [rows[0], rows[2]] and kept["confirmed"] == TODAY and set(problems(kept)) == {str(CONV)}


def test_a_study_of_untuned_layers_is_confirmed_where_default_tiles_stay(row: Row) -> None:
    same = {"conv": str(CONV), "default": {"algorithm": row.algorithm, "tile": row.tile}}
    other, failed = {"conv": str(CONV), "default": {"algorithm": "mec/tiled", "tile": row.tile}}, {"conv": str(CONV), "failed": "why"}
    moved = [default_moved(one, HERE) for one in (same, other, failed)]
    assert moved == ["", f"{CONV}: another default tile is chosen today", ""]
    study = {"digests": {**TODAY, "choice": "other"}, "rows": [same]}
    assert untuned_confirmed(study, [""]) == ({**study, "confirmed": TODAY}, [])
    assert untuned_confirmed(study, moved) == (study, [moved[1]])
    assert untuned_confirmed({**study, "digests": TODAY}, [""]) == ({**study, "digests": TODAY}, [])
    unknown, reasons = untuned_confirmed({**study, "digests": BEFORE}, [""])
    assert "does not say which kernels" in reasons[0] and "confirmed" not in unknown


def test_layers_whose_default_tile_moved_are_dropped_where_the_others_are_confirmed() -> None:
    rows = [{"conv": str(replace(CONV, batch=batch))} for batch in (1, 2, 3)]
    study = {"digests": {**TODAY, "choice": "other"}, "rows": rows}
    assert untuned_kept(study, ["", "moved", ""]) == ({**study, "rows": [rows[0], rows[2]], "confirmed": TODAY}, [])
    older = {**study, "digests": BEFORE}
    same, reasons = untuned_kept(older, ["", "moved", ""])
    assert same == older and "does not say which kernels" in reasons[0]
