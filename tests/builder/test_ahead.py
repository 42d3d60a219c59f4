"""Operators built by several processes before they are asked for: the same that would be built one by one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import tvm
from recorded import TODAY, beside_default, fill, ok

from im2win import Conv2d
from im2win.builder import batch as ahead
from im2win.builder.batch import Builders, Chooser, Job, build_ahead
from im2win.builder.cache import Artefacts
from im2win.device.cpu import Machine
from im2win.records.log import Log
from im2win.registry.ranking import default_tile

CONVS = [Conv2d(1, 3, 8, 8, 4 + i, 3) for i in range(5)]


def test_what_is_missing_is_built_at_once(tmp_path: Path) -> None:
    device, chooser, cache = Machine.host(), Chooser(tmp_path), Artefacts(tmp_path)
    layers = [(conv, device) for conv in (*CONVS, CONVS[0])]
    assert all(chooser.lacks(conv, device) for conv in CONVS)
    assert build_ahead(chooser, layers, Builders(2)) == len(CONVS)
    assert not any(chooser.lacks(conv, device) for conv in CONVS)
    for conv in CONVS:
        choice = chooser.choose(conv, device)
        assert cache.get(conv, choice.algorithm, choice.tile, device)[1].conv == conv
    assert cache.built == 0


def test_where_records_must_meet_a_default_first_the_workers_rank_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an operator is missing is asked in the caller's process, for all layers in turn."""
    conv, device = Conv2d(1, 8, 12, 12, 16, 1), Machine.host()
    tile = default_tile(conv, "mec/tiled", device)[1].as_dict()
    facts = {"device": device.name, "threads": device.threads, "tvm": tvm.__version__, "generator": TODAY}
    record = ok(1e-3, conv, algorithm="mec/tiled", tile=tile, **facts)
    chooser = Chooser(tmp_path / "cache", str(fill(Log(tmp_path / "logs"), record).folder))
    with monkeypatch.context() as patch:
        patch.setattr("im2win.registry.ranking.default_tile", None)
        assert chooser.lacks(conv, device)
    assert chooser.choose(conv, device).tier == ahead.DEFAULT
    fill(Log(tmp_path / "logs"), *beside_default(record, device))
    monkeypatch.setattr("im2win.registry.ranking.default_tile", None)
    assert chooser.choose(conv, device).tier == "exact", "the default tile is in the cache"


def test_processes_are_for_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("im2win.builder.batch.Worker", None)
    assert build_ahead(Chooser(tmp_path), [(conv, Machine.host()) for conv in CONVS[: ahead.LEAST - 1]]) == 0
    (tmp_path / "file").write_text("no folder")
    assert build_ahead(Chooser(tmp_path / "file"), [(conv, Machine.host()) for conv in CONVS]) == 0
    kept, device = Chooser(tmp_path, untuned="keep"), Machine.host()
    kept.selections(device).keep({kept.question(conv): kept.selected(conv, device) for conv in CONVS})
    assert build_ahead(kept, [(conv, device) for conv in CONVS]) == 0


def test_what_fails_is_noted_and_built_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with caplog.at_level(logging.INFO, "im2win"):
        assert build_ahead(Chooser(tmp_path), [(conv, Machine.host()) for conv in CONVS], Builders(1)) == 0
    assert all(f"{conv}: " in caplog.text for conv in CONVS)


def test_a_builder_asks_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that do so build next; where they fail, this one asks."""
    with Builders(2) as builders:
        assert builders.host() == Machine.host()
        processes = {worker._process for worker in builders.workers(9)}
        assert len(processes) == 2 and None not in processes
        job = Job(Chooser(tmp_path), CONVS[0], Machine.host())
        assert builders.workers(1)[0].call(job, 60.0)[0] == 1
        assert {worker._process for worker in builders.workers(2)} == processes
        assert builders.workers(1, torch=True)[0]._process not in processes, "those for a GPU are others"
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # no interpreter starts
    with Builders(1) as builders:
        assert builders.host() == Machine.host()
