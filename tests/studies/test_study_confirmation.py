"""A study is confirmed where today's source chooses the kernels that it times, and only there; its other rows can be dropped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripts import script

from im2win.bench.source import digests
from im2win.device.cpu import Machine
from im2win.registry.ranking import default_tile
from im2win.spec.conv2d import Conv2d
from im2win.studies.confirmation import chosen, confirmed, held, kept, problems, untuned_checked, untuned_confirmed, untuned_kept
from im2win.studies.entries import EPILOGUES, MODELS, OPERATORS, PYTORCH, SHARED, ZOO

HERE = Machine("intel-xeon", "rocketlake", "avx512f", 2, 16, 32, 48 << 10, 2 << 20, 32 << 20)
CONV = Conv2d.parse("n1-c8x12x12-k16x1x1")
OTHER = replace(CONV, batch=2)
TODAY = digests("cpu")
BEFORE = {name: "other" if "/" in name or name == "choice" else value for name, value in TODAY.items()}


def network(conv: Conv2d) -> dict[str, Any]:
    return {"network": str(conv.batch), "groups": {"ours": {"convs": [str(conv)]}, "ours_nhwc": {"convs": []}}}


def test_studies_name_their_problems() -> None:
    key, silu = str(CONV), str(CONV.with_(activation="silu"))
    assert problems({"study": ZOO, "rows": [network(CONV)]}) == [key]
    assert problems({"study": ZOO, "rows": [network(CONV), {"network": "old", "groups": {"ours": {"layers": 1}}}]}) == []
    for study in (MODELS, OPERATORS):
        assert problems({"study": study, "models": [{"model": "a", "convs": [key]}, {"model": "b", "convs": []}]}) == [key]
        assert problems({"study": study, "models": [{"model": "a", "convs": [key]}, {"model": "old"}]}) == []
    assert problems({"study": EPILOGUES, "layers": [{"conv": silu}]}) == sorted([key, silu])
    assert problems({"study": PYTORCH, "layers": [{"conv": key}, {"conv": None}]}) == [key]
    assert problems({"study": SHARED, "layers": {key: {}}}) == [key]


def test_a_study_is_confirmed_where_its_problems_have_the_same_kernels() -> None:
    study = {"study": ZOO, "digests": TODAY, "rows": [network(CONV)]}
    kernels = {str(CONV): chosen(str(CONV), study, HERE)}
    new, reasons = confirmed(study, kernels)
    assert not reasons and new["kernels"] == kernels and "confirmed" not in new
    later, reasons = confirmed({**new, "digests": BEFORE}, kernels)
    assert not reasons and later["confirmed"] == TODAY
    other, reasons = confirmed({**new, "digests": BEFORE}, {str(CONV): "cpu:0"})
    assert reasons == [f"{CONV}: another kernel is chosen today"] and "confirmed" not in other
    unknown, reasons = confirmed({**study, "digests": BEFORE}, kernels)
    assert "does not say which kernels" in reasons[0] and unknown == {**study, "digests": BEFORE}


def test_models_are_confirmed_only_with_the_same_code_for_their_other_operators() -> None:
    made = {**BEFORE, "models": digests("cpu", models=True)["models"], "choice": TODAY["choice"]}
    study = {"study": MODELS, "digests": made, "models": [{"model": "a", "convs": [str(CONV)]}], "kernels": {str(CONV): "cpu:1"}}
    new, reasons = confirmed(study, study["kernels"])
    assert not reasons and new["confirmed"] == digests("cpu", models=True)
    _, reasons = confirmed({**study, "digests": {**made, "models": "other"}}, study["kernels"])
    assert reasons == ["other code compiled the models' other operators"]
    _, reasons = confirmed({**study, "digests": {**made, "runtime": "other"}}, study["kernels"])
    assert reasons == ["other code ran its kernels' loops"]


def test_activations_are_timed_with_default_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("records were looked up")

    monkeypatch.setattr("im2win.studies.confirmation.looked_up", refused)
    assert chosen(str(CONV), {"study": EPILOGUES}, HERE)
    with pytest.raises(AssertionError, match="records"):
        chosen(str(CONV), {"study": MODELS}, HERE)


def test_rows_with_other_kernels_are_dropped() -> None:
    rows = [network(CONV), network(OTHER), network(CONV)]
    kernels = {str(CONV): "cpu:1", str(OTHER): "cpu:2"}
    study: dict[str, Any] = {"study": ZOO, "digests": BEFORE, "rows": rows, "kernels": kernels}
    left = kept(study, {**kernels, str(OTHER): "cpu:3"})
    assert left["rows"] == [rows[0], rows[2]] and left["confirmed"] == TODAY and set(problems(left)) == {str(CONV)}
    layers = [{"conv": str(one.with_(activation="relu"))} for one in (CONV, OTHER)]
    kernels |= {row["conv"]: "cpu:4" for row in layers}
    study = {"study": EPILOGUES, "digests": BEFORE, "layers": layers, "kernels": kernels}
    left = kept(study, {**kernels, str(CONV): "cpu:5"})
    assert left["layers"] == layers[1:] and left["confirmed"] == TODAY
    whole = {"study": PYTORCH, "digests": BEFORE, "layers": [{"conv": str(CONV)}], "kernels": kernels}
    assert kept(whole, {str(CONV): "cpu:6"}) == whole  # it is measured as a whole


def test_the_script_confirms_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, path, other = script("benchmarks/confirm.py"), tmp_path / "shared.json", tmp_path / "sliding.json"
    study = {"study": SHARED, "device": HERE.name, "digests": TODAY, "layers": {str(CONV): {}}}
    path.write_text(json.dumps(study), encoding="utf-8")
    other.write_text(json.dumps({"study": "sliding-window", "device": HERE.name, "digests": BEFORE}), encoding="utf-8")
    monkeypatch.setattr(module, "device_named", lambda name: HERE)
    assert module.main([str(path), "--processes", "1"]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["kernels"] == {str(CONV): chosen(str(CONV), study, HERE)}
    path.write_text(json.dumps({**found, "digests": BEFORE}), encoding="utf-8")
    assert module.main([str(path), str(other), "--processes", "1"]) == 1
    assert json.loads(path.read_text(encoding="utf-8"))["confirmed"] == TODAY
    assert "sliding.json: it does not name its problems" in capsys.readouterr().out


def test_rows_are_held_only_by_files_of_today_with_the_same_facts(tmp_path: Path) -> None:
    path, rows = tmp_path / "study.json", [{"conv": str(CONV)}]
    assert held(path, "rows", {}) == []
    for made, device, expected in ((TODAY, "here", rows), (TODAY, "there", []), (BEFORE, "here", []), ({}, "here", [])):
        path.write_text(json.dumps({"digests": made, "device": device, "rows": rows}), encoding="utf-8")
        assert held(path, "rows", {"device": "here"}) == expected
    path.write_text(json.dumps({"digests": BEFORE, "confirmed": TODAY, "device": "here", "rows": rows}), encoding="utf-8")
    assert held(path, "rows", {"device": "here"}) == rows


def test_a_study_of_untuned_layers_is_confirmed_where_tiles_and_kernels_stay() -> None:
    name, tile = default_tile(CONV, "auto", HERE)
    choice = {"algorithm": name, "tile": tile.as_dict(), "ms": 1.0}
    row = {"conv": str(CONV), "default": choice, "tuned": choice}
    other, failed = {**row, "default": {**choice, "algorithm": "mec/tiled"}}, {"conv": str(CONV), "failed": "why"}
    found = [untuned_checked(one, HERE, TODAY) for one in (row, other, failed)]
    assert [reason for _, reason in found] == ["", f"{CONV}: another default tile is chosen today", ""]
    marked = found[0][0]
    assert marked["default"]["fingerprint"] == marked["tuned"]["fingerprint"] != "" and found[1][0] == other and found[2][0] == failed
    study = {"digests": BEFORE, "rows": [row]}
    assert "does not say which kernels" in untuned_checked(row, HERE, BEFORE)[1]
    assert untuned_confirmed(study, [untuned_checked(marked, HERE, BEFORE)]) == ({**study, "rows": [marked], "confirmed": TODAY}, [])
    changed = {**marked, "tuned": {**marked["tuned"], "fingerprint": "other"}}
    assert untuned_checked(changed, HERE, BEFORE)[1] == f"{CONV}: its kernel has changed since"
    assert untuned_confirmed({**study, "digests": TODAY}, found[:1]) == ({"digests": TODAY, "rows": [marked]}, [])
    _, reasons = untuned_confirmed({**study, "digests": {**BEFORE, "runtime": "other"}}, found[:1])
    assert reasons == ["other code ran its kernels' loops"]


def test_layers_that_today_has_other_kernels_for_are_dropped() -> None:
    rows = [{"conv": str(replace(CONV, batch=batch))} for batch in (1, 2, 3)]
    study = {"digests": BEFORE, "rows": rows}
    checked = [(row, reason) for row, reason in zip(rows, ["", "moved", ""], strict=True)]
    assert untuned_kept(study, checked) == ({**study, "rows": [rows[0], rows[2]], "confirmed": TODAY}, [])
    other = {**study, "digests": {**BEFORE, "runtime": "other"}}
    same, reasons = untuned_kept(other, checked)
    assert same == other and reasons == ["other code ran its kernels' loops"]
