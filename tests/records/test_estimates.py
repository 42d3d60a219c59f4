"""A measured kernel gives way to a default tile that was not, only where its estimate wins by more than estimates are known to err."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from recorded import beside_default, fill, ok

from im2win.builder.batch import Chooser
from im2win.device.cpu import Machine
from im2win.records import estimates, judge, lookup
from im2win.records.estimates import LEAST_RATIOS, NEAR, factor
from im2win.records.log import Log
from im2win.records.lookup import Found, open_logs, search
from im2win.records.merit import LEAST_RIVALS
from im2win.records.record import Record
from im2win.records.tiers import NO_RECORD, OLDER
from im2win.registry.cpu_backend import CpuBackend
from im2win.registry.ranking import default_of
from im2win.registry.schedules import candidates, schedule_of
from im2win.registry.sources import code_digest
from im2win.spec.conv2d import Conv2d
from im2win.tuner.layers import tuned_before

HERE = Machine("intel-xeon", "rocketlake", "avx512f", 2, 16, 32, 48 << 10, 2 << 20, 32 << 20)
CONV = Conv2d.parse("n1-c8x12x12-k16x1x1")
SIMILAR = [CONV.with_(batch=1 + more) for more in range(1, LEAST_RATIOS + 1)]
OLD = "mec/tiled"
FACTS: dict[str, Any] = {"tvm": tvm.__version__, "device": HERE.name}


@pytest.fixture(autouse=True)
def nothing_is_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lookup, "PACKAGED", tmp_path / "packaged")


@pytest.fixture(autouse=True)
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile has the estimate 1, those of the default's schedule 0.9."""
    method = default()[0]
    monkeypatch.setattr(CpuBackend, "cost", lambda self, conv, row, tile: 0.9 if row.key == method else 1.0)


@functools.cache
def default() -> tuple[str, Any]:
    """The default tile, as the model's own costs rank it; a fixture asks first, before costs are a test's."""
    found = default_of(CONV, [row.key for row in candidates("auto", CONV)], HERE)
    assert found is not None and found[0] != OLD
    return found


def made(seconds: float, method: str = OLD, conv: Conv2d = CONV, **more: Any) -> Record:
    row = schedule_of(method)
    tile = default()[1] if method == default()[0] else next(iter(row.scheduler.space(conv, HERE)))
    return ok(seconds, conv, **{"tile": tile.as_dict(), "algorithm": method, "generator": code_digest("cpu", method), **FACTS, **more})


def evidence(*ratios: float, method: str | None = None, **more: Any) -> Iterable[Record]:
    """Records of similar layers whose measured costs are these multiples of the default's estimate of CONV, 0.9."""
    return [made(0.9 * ratio, method or default()[0], conv, **more) for ratio, conv in zip(ratios, SIMILAR, strict=False)]


def look(log: Log, conv: Conv2d = CONV, device: Machine = HERE, **more: Any) -> Found:
    names = [row.key for row in candidates("auto", conv, "cpu")]
    return search(conv, device, names, log.folder, default=lambda *_: default(), **more)


@pytest.mark.parametrize("seconds, used", [(0.9 * 3.9, True), (0.9 * 4.1, False)])
def test_the_estimate_must_win_by_its_known_error(log: Log, seconds: float, used: bool) -> None:
    """The third quartile of five ratios is the fourth."""
    record = made(seconds)
    found = look(fill(log, record, *evidence(5, 2, 1, 3, 4)))
    assert factor(CONV, default(), HERE, "float32", open_logs(log.folder)) == pytest.approx(4)
    if used:
        assert (found.record, found.tier, found.skipped) == (record, OLDER, [])
    else:
        assert found.record is None and found.skipped[0][1].endswith("was not tried")


def test_of_a_layer_the_tile_with_the_lowest_estimate_counts(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the default tile is the one that its model ranks first."""
    other = next(tile for tile in schedule_of(default()[0]).scheduler.space(CONV, HERE) if tile != default()[1])
    slow = [replace(one, tile=other.as_dict(), samples_s=tuple(9 * time for time in one.samples_s)) for one in evidence(1, 1, 1, 1, 1)]
    monkeypatch.setattr(CpuBackend, "cost", lambda self, conv, row, tile: 0.8 if tile == other else 0.9)
    fill(log, *evidence(*[1] * LEAST_RATIOS), *slow)
    assert factor(CONV, default(), HERE, "float32", open_logs(log.folder)) == pytest.approx(9 * 0.9 / 0.8)


def test_where_the_schedule_is_new_the_others_errors_count(log: Log) -> None:
    """Of the layer itself, too, and of no more layers than can be asked in time."""
    record = made(2.0)
    fill(log, record, *evidence(3, 3, 3, 3, method=OLD))
    assert factor(CONV, default(), HERE, "float32", open_logs(log.folder)) == pytest.approx(2.7)
    assert look(log).tier == OLDER
    fill(log, *evidence(*[1] * LEAST_RATIOS))  # now its own are known
    assert look(log).record is None


def test_without_evidence_the_record_is_a_hint(log: Log) -> None:
    assert look(fill(log, made(1e-9), *evidence(1, 1, method=OLD))).record is None
    assert factor(CONV, default(), HERE, "float32", open_logs(log.folder)) is None


@pytest.mark.parametrize("more", [{"generator": "before"}, {"tvm": "0.1"}, {"threads": 1}])
def test_what_is_no_evidence(log: Log, more: dict[str, Any]) -> None:
    """Kernels that today's source may not emit, and other numbers of threads."""
    fill(log, made(1e-9), *evidence(*[9] * LEAST_RATIOS, **more))
    assert factor(CONV, default(), HERE, "float32", open_logs(log.folder)) is None


def test_tiles_with_the_default_s_fields_count_before_those_without(log: Log) -> None:
    conv = CONV.with_(in_channels=64, kernel=3, padding=1)
    space = list(schedule_of("direct/tiled").scheduler.space(conv, HERE))
    new, old = (next(tile for tile in space if ("inputs" in tile.as_dict()) == named) for named in (True, False))
    layers = [conv.with_(batch=more) for more in range(2, 2 + LEAST_RATIOS)]
    asked = open_logs(fill(log, *(made(9.0, "direct/tiled", one, tile=old.as_dict()) for one in layers)).folder)
    estimate = CpuBackend(HERE).cost(conv, schedule_of("direct/tiled"), new)
    assert factor(conv, ("direct/tiled", new), HERE, "float32", asked) == pytest.approx(9 / estimate)
    fill(log, *(made(2.0, "direct/tiled", one, tile=new.as_dict()) for one in layers))
    assert factor(conv, ("direct/tiled", new), HERE, "float32", asked) == pytest.approx(2 / estimate)


def test_of_other_types_and_layouts_its_own_schedule_counts_before_the_others(log: Log) -> None:
    """A schedule errs elsewhere as it does here. Grouped layers have schedules of their own."""
    of_layout = [CONV.with_(batch=more, layout="NHWC") for more in range(1, LEAST_RATIOS + 1)]
    tile = next(iter(schedule_of(default()[0]).scheduler.space(of_layout[0], HERE))).as_dict()
    elsewhere = [made(0.9 * 7, default()[0], conv, tile=tile) for conv in of_layout]
    fill(log, made(2.0), *evidence(3, 3, 3, 3, method=OLD), *elsewhere)
    asked = open_logs(log.folder)
    assert factor(CONV, default(), HERE, "float32", asked) == pytest.approx(7)
    assert factor(CONV.with_(groups=8), default(), HERE, "float32", asked) is None
    fill(log, *evidence(*[1] * LEAST_RATIOS))
    assert factor(CONV, default(), HERE, "float32", asked) == pytest.approx(1)


def test_the_nearest_layers_are_asked(log: Log) -> None:
    far = [made(9.0, default()[0], CONV.with_(batch=100 + more)) for more in range(NEAR[0])]
    near = [made(0.9, default()[0], CONV.with_(batch=2 + more)) for more in range(NEAR[0])]
    assert factor(CONV, default(), HERE, "float32", open_logs(fill(log, *far, *near).folder)) == pytest.approx(1)


def test_another_epilogue_s_record_outweighs_the_estimate_too(log: Log) -> None:
    record = made(1.0)
    found = look(fill(log, record, *evidence(*[2] * LEAST_RATIOS)), CONV.with_(bias=True, activation="relu"))
    assert (found.record, found.tier) == (record, OLDER)


@pytest.mark.parametrize("device, conv", [(replace(HERE, mcpu="icelake"), CONV), (HERE, CONV.with_(batch=64))])
def test_records_of_another_device_or_layer_stay_hints(log: Log, device: Machine, conv: Conv2d) -> None:
    fill(log, made(1.0), *evidence(*[2] * LEAST_RATIOS))
    assert look(log, conv, device).record is None


def test_what_was_measured_decides_alone(log: Log) -> None:
    """A default tile that was measured needs no estimate; where it has rivals, neither."""
    record = made(1.0)
    fill(log, *beside_default(record, HERE, slower=0.5), *evidence(*[2] * LEAST_RATIOS))
    assert look(log).tier == "exact" and look(log).record != record


def test_a_record_that_earned_its_place_comes_first_in_any_log(log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packaged = Log(tmp_path / "shipped")
    monkeypatch.setattr(lookup, "PACKAGED", packaged.folder)
    older, (earned, default) = made(1.0), beside_default(made(1.1), HERE)
    fill(log, older, *evidence(*[2] * LEAST_RATIOS))
    assert look(log).record == older
    fill(packaged, earned, default)
    assert (look(log).record, look(log).tier) == (earned, "exact")


def test_such_a_layer_is_not_tuned(log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tuning measures the default tile, `untuned="keep"` leaves the layer alone, and nothing is ranked to know that."""
    monkeypatch.setenv("IM2WIN_LOGS", str(tmp_path / "own"))
    fill(log, made(1.0), *evidence(*[2] * LEAST_RATIOS))
    asked = Chooser(tmp_path / "cache", log.folder)
    assert asked.untuned_layer(CONV, HERE)
    assert tuned_before(CONV, HERE, 1, log.folder, "float32") is None
    monkeypatch.setattr(judge, "default_of", lambda *_, **how: default())
    monkeypatch.setattr("im2win.builder.cache.Artefacts.default_choice", lambda *_: default())
    assert asked.choose(CONV, HERE).tier == OLDER
    assert replace(asked, untuned="keep").choose(CONV, HERE).tier == NO_RECORD


def test_rivals_that_are_too_few_leave_it_to_the_estimate(log: Log) -> None:
    """Fewer than make a record earn its place, and none of them the default tile."""
    space = [tile for tile in schedule_of(default()[0]).scheduler.space(CONV, HERE) if tile != default()[1]][: LEAST_RIVALS - 1]
    rivals = [made(1.5, default()[0], tile=tile.as_dict()) for tile in space]
    fill(log, made(1.0), *rivals, *evidence(*[2] * LEAST_RATIOS))
    assert look(log).tier == OLDER
    assert estimates.QUARTILE == 0.75
