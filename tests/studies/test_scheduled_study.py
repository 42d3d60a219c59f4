"""The study of TVM's CUDA schedules: what it builds for a layer, and its tables from the committed file."""

from __future__ import annotations

import json
import math

import pytest
from paths import ROOT

from im2win.device.gpu import H200
from im2win.registry.schedules import SCHEDULES
from im2win.reports import scheduled as report
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.spec.conv2d import Conv2d
from im2win.studies import scheduled
from im2win.studies.entries import FIRST_SCHEDULED as FIRST
from im2win.studies.entries import HAND_BUILT, RULES
from im2win.studies.scheduled import forms, hand_built, narrow_subjects, others, tiles_of

CONV = Conv2d.parse("n8-c64x28x28-k64x3x3")
FILE = ROOT / "benchmarks" / "studies" / "nvidia-h200" / "scheduled.json"


def test_what_is_timed_on_a_layer() -> None:
    """Distinct tiles; one with the rules of each form; every other algorithm; a kernel that no TVM schedule made."""
    tiles = tiles_of(CONV, H200, 4)
    assert len(tiles) == 4 == len({tile.deduplication_key for tile in tiles})
    made = forms(CONV, tiles[0], H200)
    assert list(made) == [*RULES, *others(), HAND_BUILT]
    assert {made[name].tile.rules for name in RULES} == set(RULES.values())
    assert all(isinstance(SCHEDULES[key].cuda, Scheduled) for key in (FIRST, *others()))
    assert not isinstance(SCHEDULES[hand_built(CONV, H200).algorithm].cuda, Scheduled)


def test_what_is_timed_on_tensor_cores() -> None:
    """Distinct tiles of TVM's schedule, and a kernel that no TVM schedule made, in every type and layout."""
    for key in ("n8-c64x28x28-k64x3x3-float16-NHWC", "n8-c64x28x28-k64x3x3-int8"):
        made = narrow_subjects(Conv2d.parse(key), H200, 2)
        assert list(made) == [f"{FIRST} 1", f"{FIRST} 2", HAND_BUILT]
        assert made[f"{FIRST} 1"].tile != made[f"{FIRST} 2"].tile and made[f"{FIRST} 1"].algorithm == FIRST
        assert not isinstance(SCHEDULES[made[HAND_BUILT].algorithm].cuda, Scheduled)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"`count` \(=0\)"):
        scheduled.run([object()], 0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="`layers` must name one at least"):
        scheduled.run([])
    with pytest.raises(ValueError, match="`layers` must name one at least"):
        scheduled.narrow([])


def test_tables_of_the_committed_study() -> None:
    """Ratios are those of the times in the file."""
    study = json.loads(FILE.read_text())
    found = report.times(study)["conv3"]
    text = report.table([study])
    assert f"| conv3 | {found['both']:.3f} | {found[HAND_BUILT]:.3f} |" in text
    gains = [one["plain"] / one["both"] for one in report.times(study).values()]
    assert f"{math.exp(sum(map(math.log, gains)) / len(gains)):.2f}x |" in text
    assert study["brand"] in text and "geometric mean" in text


def test_table_of_kernels_on_tensor_cores() -> None:
    """The better of a layer's tiles, and how many times as long it takes as the kernel by hand; what was not timed is left out."""
    study = json.loads(FILE.with_name("scheduled-narrow.json").read_text())
    study["entries"] = [
        {"layer": "conv9", "conv": f"n2-c16x8x8-k16x3x3-{form}", "subject": subject, "ms": ms}
        for form, times in {"float16-NHWC": (3.0, 2.0, 0.5), "int8": (None, None, 0.5)}.items()
        for subject, ms in zip((f"{FIRST} 1", f"{FIRST} 2", HAND_BUILT), times, strict=True)
    ]
    lines = report.narrow_table([study]).splitlines()
    assert lines[0] == "| layer | float16 NHWC |" and lines[2] == "| conv9 | 2.000 (4.0) |" and lines[3] == "| geometric mean | (4.0) |"
