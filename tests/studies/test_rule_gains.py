"""The study of what each rule of the reconstructor gains: what it builds and leaves out, its table, and its kernels for racecheck."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from im2win.device.gpu import H200
from im2win.reconstruct.rules.races import race
from im2win.reconstruct.validate.validators import RacecheckValidator
from im2win.registry.schedules import schedule_of
from im2win.reports import rule_gains as report
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.schedules.cuda.legality.scheduled import RULES
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies import rule_gains
from im2win.studies.entries import ALL_RULES, DEFAULT_RULES, RULE_FORMS, RULES_IN_ORDER, WITHOUT_ONE
from im2win.studies.rule_gains import SMALL, STORED, equal_sources, forms, problems, rewritten_unit, without_barrier

KEY, NAME = "n2-c16x14x14-k64x3x3-p1", "direct/scheduled"


def test_what_is_timed() -> None:
    """Every rule alone and left out of all; every form is legal; stored windows, types and layouts are among the problems."""
    assert RULES_IN_ORDER == RULES and len(RULE_FORMS) == 13 == len(set(RULE_FORMS))
    assert {"", DEFAULT_RULES, ALL_RULES, *RULES_IN_ORDER, *WITHOUT_ONE.values()} == set(RULE_FORMS)
    found = problems(8)
    assert {algorithm for _, algorithm in found} == {NAME, *STORED}
    assert all(isinstance(schedule_of(name).cuda, Scheduled) for _, name in found)
    assert {(layer.conv.dtype, layer.conv.layout) for layer, _ in found} == {
        ("float32", "NCHW"), ("float16", "NCHW"), ("float16", "NHWC"), ("int8", "NCHW"),
    }  # fmt: skip
    assert len({(layer.conv, name) for layer, name in found}) == len(found)
    for key in ("n8-c64x28x28-k64x3x3", "n8-c64x28x28-k64x3x3-float16"):
        conv = Conv2d.parse(key)
        made = forms(conv, NAME, H200)
        assert list(made) == list(RULE_FORMS) and {one.tile.stages > 1 for one in made.values()} == {True}
        assert not [broken for one in made.values() for broken in schedule_of(NAME).on_gpu.violations(conv, one.tile, H200)]


def test_equal_sources_are_timed_once() -> None:
    assert equal_sources({"": "a", "wide": "a", "copies": "b", "copies+wide": "b", "bounds": "c"}) == {"wide": "", "copies+wide": "copies"}


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="`chosen` must name one problem at least"):
        rule_gains.run([])
    with pytest.raises(ValueError, match=r"`rounds` \(=0\)"):
        rule_gains.run([(Layer("one", Conv2d.parse(KEY)), NAME)], rounds=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", SMALL)
def test_kernels_for_racecheck_are_shown_to_be_free_of_races(key: str) -> None:
    """What racecheck is to find agrees with the proof, with all rules and without a barrier."""
    unit, changes = rewritten_unit(Conv2d.parse(key), SMALL[key], H200)
    name = list(unit.kernels)[-1]
    assert changes > 4 and race(unit, name) is None
    assert race(without_barrier(unit), name)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_the_program_for_racecheck_compiles(tmp_path: Path) -> None:
    unit, _ = rewritten_unit(Conv2d.parse("n1-c32x12x12-k64x3x3-p1-float16"), NAME, H200)
    assert RacecheckValidator("sm_90a").build(unit, tmp_path).exists()


def study() -> dict[str, Any]:
    """Two problems: on the first, `wide` changes nothing and all rules double the speed; the second is not rewritten by all rules."""
    times = {"": 4.0, "pipelines": 4.0, "copies": 3.0, "bounds": 2.0, "unroll": 5.0, DEFAULT_RULES: 2.5, ALL_RULES: 2.0}
    entries = []
    for rules in RULE_FORMS:
        entry = {"layer": "conv5", "conv": KEY, "algorithm": NAME, "rules": rules, "ms": times.get(rules), "same_as": None}
        if rules in ("wide", WITHOUT_ONE["wide"]):
            entry["same_as"] = "" if rules == "wide" else ALL_RULES
        elif rules not in times:
            entry["ms"] = 4.0
        entries.append(entry)
    other = {"layer": "conv9", "conv": "n1", "same_as": None}
    entries += [{**entry, **other, "ms": 1.0 if entry["rules"] == "" else None} for entry in entries]
    kernel = {"conv": KEY, "algorithm": NAME, "rules": ALL_RULES, "changes": 9, "failed": None}
    races = [{**kernel, "barriers_removed": number, "hazard": hazard} for number, hazard in enumerate((None, "Error: hazard"))]
    versions = {"apache-tvm": "0.27", "cuda": "13.0"}
    head = {"device": "nvidia-h200", "brand": "NVIDIA H200", "versions": versions, "date": "2026-01-01T00:00:00+00:00"}
    return json.loads(json.dumps({**head, "entries": entries, "races": races}))  # type: ignore[no-any-return]


def test_table() -> None:
    """Gains are of kernels whose source differs; a kernel that was not timed counts nowhere."""
    assert report.gains(study(), "", "copies") == [4 / 3] and report.gains(study(), "", "wide") == []
    assert report.gains(study(), WITHOUT_ONE["bounds"], ALL_RULES) == [2.0]
    assert report.times(study())["conv5", KEY, NAME]["wide"] == 4.0
    lines = report.table([study()]).splitlines()
    assert "| copies | 1 | 1.33x | 1.33x to 1.33x | 1 | 2.00x | 2.00x to 2.00x |" in lines
    assert "| wide | 0 | - | - | 0 | - | - |" in lines and "| all rules | 1 | 2.00x | 2.00x to 2.00x |  |  |  |" in lines
    assert f"| conv5 | `{KEY}` | direct | 4.000 | 1.00x | 1.33x | 1.00x | 2.00x | 0.80x | 1.60x | 2.00x | bounds |" in lines
    assert f"| `{KEY}` | direct | 9 changes | no hazard |" in lines and f"| `{KEY}` | direct | without a barrier | Error: hazard |" in lines
