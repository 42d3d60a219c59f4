"""The study of clusters of thread blocks, as far as it needs no GPU: its problems, the tiles that it takes, their variants, its table."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from recorded import bad, fill, ok

from im2win.bench import cuda_builds
from im2win.bench import cuda_harness as cuda_contest
from im2win.bench.cuda_harness import Contender
from im2win.device.gpu import H200
from im2win.records.log import Log
from im2win.records.lookup import PACKAGED, tile_problems
from im2win.records.record import Record
from im2win.reports import clusters as cluster_report
from im2win.reports import studies
from im2win.reports import tables as report
from im2win.schedules.cuda.kernels.split_k_tile import SplitTile
from im2win.schedules.cuda.tiles.multistage import CudaTile
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies import clusters as cuda_clusters
from im2win.studies.entries import ROWS, STAYS, TAPS

CONV = Conv2d.parse("n4-c64x16x16-k64x3x3-p1-float16-NHWC")
TILE = CudaTile("wg_f16", 64, 64, 64, 64, 1, 3, "uvc")
ROW_TILE = CudaTile("wg_f16", 64, 64, 64, 64, 1, 3, "Cuvc", 1, 8, 8, outputs=2)
STAYING = PersistentTile("wg_f16", 64, 8, 8, 1, 2, 2)


def record(ms: float, algorithm: str, tile: Any, conv: Conv2d = CONV, **changes: Any) -> Record:
    return ok(ms * 1e-3, conv, algorithm=algorithm, tile=tile.as_dict(), device=H200.name, target="cuda", threads=1, **changes)


def log(folder: Path, *records: Record) -> Log:
    return fill(Log(folder), *records)


# --- problems and tiles


def test_problems() -> None:
    layers = cuda_clusters.problems()
    kinds = Counter((layer.conv.types, layer.conv.layout, layer.conv.batch) for layer in layers)
    assert kinds == {
        ("float32", "NCHW", 128): 12, ("float16", "NHWC", 128): 12, ("float16", "NHWC", 32): 23,
        **{("float16", layout, batch): 3 for layout in ("NCHW", "NHWC") for batch in (1, 16)},
    }  # fmt: skip
    assert {layer.conv.height for layer in layers if layer.name.startswith("map")} == {224, 320, 512}
    assert len({layer.conv for layer in layers}) == len(layers)


def test_of_every_family_the_best_record_of_blocks_alone(tmp_path: Path) -> None:
    """Whatever its code was; not those of warps, in parts, in clusters, illegal, failed, or measured again since."""
    slower, fastest = replace(TILE, stages=4), replace(TILE, stages=5)
    taken = log(
        tmp_path,
        record(1, "implicit_gemm/tiled", fastest, trial=0),
        record(5, "implicit_gemm/tiled", slower),
        record(4, "im2win/stored", TILE, fingerprint="older"),
        record(9, "implicit_gemm/tiled", fastest, trial=9),
        record(1, "implicit_gemm/tiled", replace(TILE, cluster=2)),
        record(1, "implicit_gemm/tiled", CudaTile("f16", 64, 64, 32, 32, 1, 3, "uvc")),
        record(1, "implicit_gemm/split_k", SplitTile(**vars(TILE), split=2)),
        record(1, "implicit_gemm/tiled", replace(TILE, stages=2)),
        record(1, "forgotten", TILE),
        bad(conv=str(CONV), algorithm="direct/tiled", tile=ROW_TILE.as_dict(), device=H200.name, target="cuda", threads=1),
        record(3, "winograd/tiled", ROW_TILE),
        record(2, "direct/persistent", STAYING),
    )
    found = cuda_clusters.chosen(CONV, H200, taken)
    assert found == {TAPS: ("im2win/stored", TILE), ROWS: ("winograd/tiled", ROW_TILE), STAYS: ("direct/persistent", STAYING)}
    assert cuda_clusters.chosen(CONV.with_(batch=8), H200, taken) == {}


def test_variants_are_all_legal_ones() -> None:
    """Of the records that ship: alone and in clusters, with the record's stages and one more, and no other difference."""
    taken = Log(PACKAGED)
    made = cuda_clusters.recipes(cuda_clusters.problems(), H200, taken)
    assert {one.family for _, one in made} == {TAPS, ROWS, STAYS}
    for conv in {conv for conv, _ in made}:
        for family, (algorithm, tile) in cuda_clusters.chosen(conv, H200, taken).items():
            wanted = [replace(tile, cluster=blocks, stages=tile.stages + more) for blocks in (1, 2, 4) for more in (0, 1)]
            legal = [one for one in wanted if not tile_problems(conv, algorithm, one.as_dict(), H200)]
            found = [one.tile for of, one in made if of == conv and one.family == family]
            assert found == (legal if any(one.cluster > 1 for one in legal) else []) and (not found or found[0] == tile)


def test_a_tile_that_cannot_be_in_clusters_is_left_out(tmp_path: Path) -> None:
    conv = Conv2d.parse("n3-c64x8x8-k64x3x3-p1-float16-NHWC")  # three thread blocks along windows
    assert cuda_clusters.variants(conv, H200, log(tmp_path, record(1, "implicit_gemm/tiled", TILE, conv))) == []
    found = cuda_clusters.variants(CONV, H200, log(tmp_path, record(1, "implicit_gemm/tiled", TILE)))
    assert [(one.tile.cluster, one.tile.stages, one.more) for one in found] == [
        (1, 3, 0), (1, 4, 1), (2, 3, 0), (2, 4, 1), (4, 3, 0), (4, 4, 1),
    ]  # fmt: skip


# --- the table


def entry(conv: str, family: str, cluster: int, more: int, ms: float | None, failed: str | None = None) -> dict[str, Any]:
    return {"conv": conv, "family": family, "cluster": cluster, "more": more, "ms": ms, "failed": failed}


STUDY = {
    "study": "clusters", "device": "nvidia-h200", "brand": "NVIDIA H200", "date": "2026-11-22T05:00:00+00:00",
    "versions": {"apache-tvm": "0.27.0", "torch": "2.11.0", "cuda": "13.0", "numpy": "2"},
    "entries": [
        entry("a", TAPS, 1, 0, 1.0), entry("a", TAPS, 1, 1, 0.9), entry("a", TAPS, 2, 0, 1.2), entry("a", TAPS, 2, 1, 0.6),
        entry("b", TAPS, 1, 0, 1.0), entry("b", TAPS, 2, 0, 1.5), entry("b", TAPS, 4, 0, 0.98),
        entry("a", STAYS, 1, 0, 2.0), entry("a", STAYS, 2, 0, None, "wrong result:  error 1."), entry("a", STAYS, 4, 0, 4.0),
        entry("b", STAYS, 1, 0, None, "out of memory"), entry("b", STAYS, 2, 0, 1.0), entry("b", STAYS, 4, 0, None, "out of memory"),
    ],
}  # fmt: skip


def test_table() -> None:
    text = report.fill("<!-- table:clusters -->\n<!-- /table -->", {}, [STUDY])
    lines = text.splitlines()
    assert lines[1].startswith("| tiles | problems | clusters of 2: measured | clusters of 2: gain, geometric mean | clusters of 2: best |")
    assert lines[1].count("more than 3 %") == 2
    assert lines[3] == "| tiles of taps | 2 | 2 | 1.00 | 1.50 (a) | 1 | 1 | 1.02 | 1.02 (b) | 0 |"
    assert lines[4] == "| blocks that stay | 2 | 0 | – | – | 0 | 1 | 0.50 | 0.50 (a) | 0 |"  # noqa: RUF001
    assert len({line.count("|") for line in lines[1:5]}) == 1
    assert lines[6] == "Failed: wrong result: error 1.; out of memory (2 tiles)"
    assert "NVIDIA H200 (`nvidia-h200`); apache-tvm 0.27.0, torch 2.11.0, cuda 13.0; 2026-11-22." in text and "numpy" not in text


def test_gains_are_of_the_better_number_of_stages() -> None:
    assert cluster_report.gains(STUDY["entries"], TAPS, 2) == {"a": pytest.approx(1.5), "b": pytest.approx(2 / 3)}  # type: ignore[arg-type]
    assert cluster_report.gains(STUDY["entries"], ROWS, 2) == {}  # type: ignore[arg-type]


def test_what_the_text_says_of_clusters_is_what_was_measured() -> None:
    """They are retired because no problem gains more than measurements spread."""
    study = json.loads((ROOT / "benchmarks" / "studies" / H200.name / "clusters.json").read_text())
    found = [gain for family in cluster_report.FAMILIES for size in cluster_report.SIZES
             for gain in cluster_report.gains(study["entries"], family, size).values()]  # fmt: skip
    assert len(found) > 100 and max(found) <= cluster_report.WORTH


# --- the script, on a device that is none


class FakeBench:
    """A bench without tensors: outputs are right, but for those of one variant behind its timing."""

    def __init__(self, conv: Conv2d, seed: int) -> None:
        self.conv = conv


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which n blocks of a cluster take n ms, and a stage more as long; clusters of 4 of blocks that stay are not built."""

    def build_all(recipes: dict[Any, Any], folder: Path) -> dict[Any, Any]:
        return {key: "no such launch" if key[1].family == STAYS and key[1].tile.cluster == 4 else key[1].tile for key in recipes}

    def contender(bench: Any, built: Any, allowed: float) -> Contender:
        if isinstance(built, str):
            raise cuda_builds.BuildError(built)
        return Contender(lambda: 1e-3 * built.cluster, 0, 1e-4)

    monkeypatch.setattr(cuda_clusters, "device_gpu", lambda: H200)
    monkeypatch.setattr(cuda_clusters.backend_for(H200).__class__, "check_tools", lambda self: None)
    monkeypatch.setattr(cuda_clusters, "Bench", FakeBench)
    monkeypatch.setattr(cuda_clusters, "build_all", build_all)
    monkeypatch.setattr(cuda_clusters, "kernel_contender", contender)
    monkeypatch.setattr(cuda_clusters, "verify", lambda bench, call, allowed: ("", 0.0) if call() < 3e-3 else ("error 1 exceeds 0", 1.0))
    monkeypatch.setattr(cuda_contest, "sample", lambda bench, call: call())


def _script() -> Any:
    """benchmarks/clusters.py as a module."""
    spec = importlib.util.spec_from_file_location("clusters", ROOT / "benchmarks" / "clusters.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("given", [True, False], ids=["--json", "default"])
def test_the_script_writes_what_the_table_shows(given: bool, fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    script = _script()
    file = tmp_path / "studies" / H200.name / "clusters.json"
    monkeypatch.setattr(script, "STUDIES", tmp_path / "studies")
    monkeypatch.setattr(sys, "argv", ["clusters.py", "--layers", "conv9", "--rounds", "3", *(["--json", str(file)] if given else [])])
    script.main()
    study = json.loads(file.read_text())
    assert set(study) == {"study", "device", "brand", "versions", "commit", "date", "entries"}
    entries = study["entries"]
    assert {one["conv"] for one in entries} == {"n128-c64x56x56-k64x3x3", "n128-c64x56x56-k64x3x3-float16-NHWC"}
    for one in entries:
        assert one["tile"].get("cluster", 1) == one["cluster"] and (one["ms"] is None) == (one["failed"] is not None)
        failed = {STAYS: "no such launch"}.get(one["family"], "after timing: error 1 exceeds 0")
        expected = (None, 0, failed) if one["cluster"] == 4 else (one["cluster"], 3, None)
        assert (one["ms"], one["samples"], one["failed"]) == pytest.approx(expected)
    text = report.fill("<!-- table:clusters -->\n<!-- /table -->", {}, studies.load_all(tmp_path / "results"))
    assert "| blocks that stay | 1 | 1 | 0.50 | 0.50 (n128-c64x56x56-k64x3x3-float16-NHWC) | 0 | 0 |" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "conv99"], "`--layers` (='conv99') must name layers of the workload"),
        (["--layers", "conv9", "--rounds", "0"], "`rounds` (=0) must be at least 1"),
    ],
)
def test_bad_words_are_one_line(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["clusters.py", "--json", "never.json", *words])
    with pytest.raises(SystemExit) as ended:
        _script().main()
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_layers_without_a_recorded_tile_are_refused(fake_gpu: None, tmp_path: Path) -> None:
    pytest.importorskip("torch")  # which a GPU's results name
    with pytest.raises(ValueError, match=r"`layers` must have one of which .* has a tile for nvidia-h200 that may be in clusters"):
        cuda_clusters.run([Layer("one", CONV)], log=Log(tmp_path))
