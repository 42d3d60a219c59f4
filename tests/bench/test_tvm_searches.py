"""TVM's default searches of several layers at once, for a CPU: what they leave in the cache, and what failing ones cost."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import SUPPORT

from im2win.bench.peers import tvm_default
from im2win.bench.peers.cpu import TvmDefault
from im2win.bench.peers.subject import PeerError, Tensors
from im2win.bench.peers.tvm_searches import search_all
from im2win.common.worker_pool import Worker
from im2win.device.cpu import Machine
from im2win.numerics.reference import error
from im2win.spec.conv2d import Conv2d

ONE, OTHER, BROKEN = (Conv2d(1, 3, 6, 6, channels, 3) for channels in (4, 5, 6))
TRIALS = 2
PLAIN = replace(Machine.host(1), mcpu="x86-64")  # without instructions that the search has intrinsics for


def folder(conv: Conv2d, cache: Path) -> Path:
    return tvm_default._folder(conv, TRIALS, PLAIN, cache)


@pytest.mark.slow
def test_searches_at_once_are_kept_and_one_that_fails_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    (tmp_path / "torch.py").write_text("raise ImportError")  # TVM's processes begin faster without
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(SUPPORT), *sys.path])}
    monkeypatch.setattr("im2win.bench.peers.tvm_searches.Worker", lambda module, **how: Worker("worker_searches", path, **how))
    monkeypatch.setattr(Machine, "host", lambda threads: PLAIN)
    interrupted = folder(ONE, tmp_path)
    interrupted.mkdir()
    (interrupted / "database_tuning_record.json").write_text("[0, [[[], ")
    folder(BROKEN, tmp_path).write_text("a file where a folder belongs")
    epilogue = ONE.with_(bias=True)
    failed = search_all([ONE, OTHER, BROKEN, ONE, epilogue], TRIALS, PLAIN, tmp_path, note=said.append, processes=2)
    assert list(failed) == [BROKEN] and "File exists" in failed[BROKEN]
    assert len(said) == 4 and "3 layers, 2 trials each, 2 at a time" in said[0] and "best candidate" in said[1] and "failed" in said[3]
    assert not any(tvm_default.lacks(conv, TRIALS, PLAIN, tmp_path) for conv in (ONE, OTHER))
    assert tvm_default.lacks(BROKEN, TRIALS, PLAIN, tmp_path)
    monkeypatch.setattr("im2win.bench.peers.tvm_searches.Worker", None)
    assert search_all([ONE, OTHER, epilogue], TRIALS, PLAIN, tmp_path, note=said.append) == {} and len(said) == 4
    monkeypatch.setattr(tvm_default, "search", None)
    for conv in (ONE, OTHER):
        tensors = Tensors.random(conv)
        trial = TvmDefault(TRIALS, tmp_path).prepare(conv, tensors, 1)
        trial.call()
        assert error(trial.read(), tensors.expected(conv)) <= 1e-5


def test_two_searches_of_one_layer_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the same cache: the second waits, and takes what the first has found."""
    searched = []

    def search_anew(conv: Conv2d, *settings: object) -> float:
        assert tvm_default.lacks(conv, TRIALS, PLAIN, tmp_path)
        time.sleep(0.3)
        searched.append(conv)
        folder(conv, tmp_path).mkdir()
        (folder(conv, tmp_path) / "done").touch()
        return 1.0

    monkeypatch.setattr(tvm_default, "_search_anew", search_anew)
    monkeypatch.setattr(tvm_default, "_best", lambda *found: SimpleNamespace(run_secs=[2.0]))
    monkeypatch.setattr(tvm_default.ms.database, "JSONDatabase", lambda work_dir: None)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(tvm_default.search, ONE, TRIALS, PLAIN, tmp_path, 1) for _ in range(2)]
        assert sorted(job.result() for job in jobs) == [1.0, 2.0]
    assert searched == [ONE]


def test_a_search_over_its_time_limit_is_an_error_and_made_again(tmp_path: Path) -> None:
    failed = search_all([ONE], TRIALS, PLAIN, tmp_path, limit_s=0.1)
    assert "no result within" in failed[ONE] and tvm_default.lacks(ONE, TRIALS, PLAIN, tmp_path)


def test_no_candidate_is_an_error_whenever_it_is_asked_for(tmp_path: Path) -> None:
    empty = folder(ONE, tmp_path)
    empty.mkdir()
    for name in ("database_workload.json", "database_tuning_record.json", "done"):
        (empty / name).touch()
    with pytest.raises(PeerError, match="no candidate of the default space ran in 2 trials"):
        tvm_default.compiled(ONE, TRIALS, PLAIN, tmp_path)
