"""The study of TVM's searches beside ours, as far as it needs no GPU: what it searches and builds, when it ends, and its table."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT
from scripts import script

from im2win.bench.cuda_builds import TileRecipe
from im2win.bench.source import digests
from im2win.device.gpu import H200
from im2win.records.log import Log
from im2win.registry.interface import Kernel
from im2win.registry.schedules import SCHEDULES
from im2win.reports import studies
from im2win.reports.tables import fill
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer, suite
from im2win.studies import scheduled, tvm_search
from im2win.studies.entries import FIRST_SCHEDULED as FIRST
from im2win.studies.entries import HAND_BUILT, OURS_BEST, OURS_SEARCHED, TVM_SEARCHED
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import Session
from im2win.tuner.tuning import TuneError

MS = {TVM_SEARCHED: 4.0, OURS_SEARCHED: 1.0, HAND_BUILT: 2.0, OURS_BEST: 0.5, "torch_nchw": 1.5, "cudnn_gemm": 3.0}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU on which a subject takes what `MS` says; the layers of each of TVM's searches, and the seconds left to it."""
    searched: list[Any] = []
    clock = iter(range(0, 10**6, 20))

    def find(layers: Any, gpu: Any, trials: int, cache: Path, left: float, note: Any) -> Any:
        searched.append(([layer.name for layer in layers], left))
        return {layer.conv: "tvm: searching: no" for layer in layers if layer.name == "conv3"}, {"tvm_s": 50.0}

    def timed(layer: Layer, libraries: Any, rounds: int, seconds: float, others: Any) -> list[scheduled.Entry]:
        assert set(libraries) == {OURS_SEARCHED, HAND_BUILT, OURS_BEST} and set(others) == {TVM_SEARCHED}
        failed = others[TVM_SEARCHED].keywords["failed"].get(layer.conv)
        times = {name: ms for name, ms in MS.items() if not (failed and name == TVM_SEARCHED)}
        entries = [scheduled.Entry(layer.name, str(layer.conv), name, ms) for name, ms in times.items()]
        return [*entries, *([scheduled.Entry(layer.name, str(layer.conv), TVM_SEARCHED, failed=failed)] if failed else [])]

    def ours(layers: Any, gpu: Any, trials: int, folder: Path, pool: Any, builders: Any) -> Any:
        built = dict.fromkeys((OURS_SEARCHED, HAND_BUILT, OURS_BEST), "a library")
        return {layer.conv: built for layer in layers}, {"trials": {layer.name: 33 for layer in layers}, "ours_s": 30.0}

    monkeypatch.setattr(tvm_search, "Pool", lambda gpu: contextlib.nullcontext("a pool"))
    monkeypatch.setattr(tvm_search, "checked", lambda layers, trials, rounds: H200)
    monkeypatch.setattr(tvm_search, "_searched", find)
    monkeypatch.setattr(tvm_search, "_ours", ours)
    monkeypatch.setattr(tvm_search, "time_layer", timed)
    monkeypatch.setattr(tvm_search, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    return searched


def test_a_run_ends_at_its_limit_and_the_next_goes_on(fake_gpu: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "studies" / "nvidia-h200" / "tvm-search.json"

    def run(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["tvm_search.py", "--json", str(file), *words])
        script("benchmarks/tvm_search.py").main()
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    first = run("--layers", "conv1,conv2,conv3,conv5,conv6,conv7", "--limit", "75")
    assert [names for names, _ in fake_gpu] == [["conv1", "conv2", "conv3", "conv7"], ["conv5", "conv6"]], "four layers take 20 s"
    assert first["digests"] == digests("cuda") and first["trials"] == 64
    assert [one["layers"] for one in first["searches"]] == [names for names, _ in fake_gpu]
    del fake_gpu[:]
    second = run("--layers", "conv1,conv5,conv9")
    assert [names for names, _ in fake_gpu] == [["conv9"]] and second["entries"][: len(first["entries"])] == first["entries"]
    del fake_gpu[:]
    run("--layers", "conv1,conv5", "--trials", "16", "--group", "1", "--limit", "35")
    assert [names for names, _ in fake_gpu] == [["conv1"]], "other trials begin anew; the second group does not fit"
    file.write_text(json.dumps(second))
    (tmp_path / "results").mkdir()
    text = fill("<!-- table:tvm-search -->\n<!-- /table -->", {}, studies.load_all(tmp_path / "results"))
    assert "| conv1 | 4.000 | 1.000 | 2.000 | 0.500 | 33 | torch_nchw | 1.500 | 4.00 | 2.00 | 8.00 |" in text
    assert "| conv3 | - | 1.000 | 2.000 | 0.500 | 33 | torch_nchw | 1.500 | - | - | - |" in text.replace("–", "-")  # noqa: RUF001
    assert "| geometric mean |  |  |  |  |  |  |  | 4.00 | 2.00 | 8.00 |" in text
    assert "in 64 trials" in text and "conv3, tvm: tvm: searching: no" in text and "took 150 s, ours 90 s" in text


def test_what_is_built_for_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best tile of our search, the hand-built default and the best of all; a search that found nothing is a reason."""
    one, other = (Layer(key, Conv2d.parse(key)) for key in ("n8-c64x28x28-k64x3x3", "n8-c64x30x30-k64x3x3"))

    def tuned(conv: Conv2d, target: str, *, trials: int, logs: Path, algorithm: str, accuracy: str, pool: Any) -> Any:
        assert (target, trials, algorithm, accuracy, pool) == ("cuda", 64, FIRST, "exact", "a pool")
        if conv == other.conv:
            raise TuneError("tuning found no right kernel")
        session = Session(one.conv, [FIRST], H200, Log(logs), trials, 0, accuracy="exact")
        records = [
            session.record(choice, Outcome("ok", samples_s=[1e-3], error=0.0), Kernel(0, f"{number}" * 16))
            for number, choice in enumerate(session.search.all[:3])
        ]
        return records[1]

    recipes: dict[Any, TileRecipe] = {}
    builders: Any = SimpleNamespace(build_all=lambda made, folder: recipes.update(made) or dict.fromkeys(made, "built"))
    monkeypatch.setattr(tvm_search, "tune", tuned)
    built, facts = tvm_search._ours([one, other], H200, 64, tmp_path, "a pool", builders)  # type: ignore[arg-type]
    assert facts["trials"] == {one.name: 3, other.name: 0}
    assert built[other.conv] == {OURS_SEARCHED: "tuning found no right kernel", HAND_BUILT: "built", OURS_BEST: "built"}
    assert recipes[one.conv, OURS_SEARCHED].algorithm == FIRST and recipes[one.conv, OURS_SEARCHED].tile is not None
    assert not isinstance(SCHEDULES[recipes[one.conv, HAND_BUILT].algorithm].cuda, Scheduled)
    assert {recipe.accuracy for recipe in recipes.values()} == {"exact"} and recipes[one.conv, OURS_BEST].recorded


@pytest.mark.parametrize(
    "wrong, message",
    [({"trials": 0}, r"`trials` \(=0\)"), ({"group": 0}, r"`group` \(=0\)"), ({"limit_s": 0.0}, r"`limit_s` \(=0\)")],
)
def test_bad_arguments_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tvm_search.run(suite("papers12"), **wrong)


def test_the_texts_show_the_table() -> None:
    assert "<!-- table?:tvm-search -->" in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
