"""Digests of the source in result files."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import script

import im2win
from im2win.bench import source
from im2win.registry import sources
from im2win.reports.deploy import operators_table
from im2win.studies.entries import SCHEMA

FILES = ("registry/ranking.py", "schedules/cpu/model.py", "schedules/cuda/space/plain.py", "schedules/cuda/loop.py", "bench/cpu.py")

KEY = "n1-c8x8x8-k8x3x3"
COMPILED = SimpleNamespace(manifest=SimpleNamespace(layers=[SimpleNamespace(conv=KEY), SimpleNamespace(conv=KEY)]))


def _package(root: Path) -> Path:
    for name in FILES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NAME = {name!r}\n", encoding="utf-8")
    return root


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "ROOT", _package(tmp_path / "package"))
    return tmp_path / "package"


def source_now() -> str:
    return source.source_digest.__wrapped__()


def choice_now(target: str) -> str:
    return sources.choice_digest.__wrapped__(target)


def test_comments_and_docstrings_do_not_count_and_statements_do(package: Path) -> None:
    before, path = source_now(), package / "bench/cpu.py"
    path.write_text('"""Text."""\n' + path.read_text() + "# a comment\n", encoding="utf-8")
    assert source_now() == before
    path.write_text(path.read_text() + "OTHER = 1\n", encoding="utf-8")
    assert source_now() != before


def test_files_behind_linked_folders_count(package: Path, tmp_path: Path) -> None:
    before, elsewhere = source_now(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "more.py").write_text("MORE = 1\n", encoding="utf-8")
    (package / "linked").symlink_to(elsewhere)
    assert source_now() != before


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("schedules/cpu/model.py", ("cpu",)),
        ("schedules/cuda/space/plain.py", ("cuda",)),
        ("registry/ranking.py", ("cpu", "cuda")),
        ("schedules/cuda/loop.py", ("cuda",)),  # generates a kernel, which may change what is chosen
        ("bench/cpu.py", ()),
    ],
)
def test_what_chooses_counts_for_its_target(package: Path, name: str, changed: tuple[str, ...]) -> None:
    before = {target: choice_now(target) for target in sources.TARGETS}
    (package / name).write_text("CHANGED = True\n", encoding="utf-8")
    assert tuple(target for target in sources.TARGETS if choice_now(target) != before[target]) == changed


def test_what_looks_records_up_makes_results_stale_and_no_proof(package: Path) -> None:
    """A proof says how records stand against default tiles. Which of the two a look-up takes is another question."""
    before, chosen = sources.look_up_digest.__wrapped__("cpu"), choice_now("cpu")
    (package / "records").mkdir(exist_ok=True)
    (package / "records" / "judge.py").write_text("CHANGED = True\n", encoding="utf-8")
    assert sources.look_up_digest.__wrapped__("cpu") != before and choice_now("cpu") == chosen


def test_the_thread_pool_counts_on_cpus_alone(package: Path) -> None:
    pool = package / "codegen" / "pool" / "launch.c"
    pool.parent.mkdir(parents=True)
    pool.write_text("int parts = 32; /* of a loop */\n", encoding="utf-8")
    before = sources.runtime_digest.__wrapped__("cpu")
    pool.write_text("int parts = 32; /* for each thread */\n", encoding="utf-8")
    assert before and sources.runtime_digest.__wrapped__("cpu") == before
    pool.write_text("int parts = 16;\n", encoding="utf-8")
    assert sources.runtime_digest.__wrapped__("cpu") != before and not sources.runtime_digest.__wrapped__("cuda")


@pytest.mark.parametrize("target", sources.TARGETS)
def test_stale_names_what_changed(target: str) -> None:
    today = source.digests(target)
    assert source.stale(today) is None
    assert source.stale({**today, "source": "other"}) is None  # other code, but the same kernels and choices
    assert source.stale({}) == "no digest"
    method, other = source.methods_of(target)[:2]
    changed = {**today, method: "other"}
    assert source.stale(changed) == source.stale(changed, [method, other]) == "other kernels" and source.stale(changed, [other]) is None
    assert source.stale({**changed, "choice": "y"}) == "other kernels and choice"
    assert source.stale(today, ["direct/none"]) == "other kernels"


@pytest.mark.parametrize("target", sources.TARGETS)
def test_a_file_with_one_digest_of_all_methods_is_older(target: str) -> None:
    """As files held them before each method had its own."""
    before = {name: value for name, value in source.digests(target).items() if "/" not in name} | {"kernels": "0" * 16}
    assert source.stale(before) == source.stale(before, ["direct/tiled"]) == "other kernels"
    assert not source.same_kernels(before, "direct/tiled") and source.kernels_of(before) == ()


def test_results_name_the_methods_that_they_time() -> None:
    rows = [{"algorithm": "mec/tiled", "untuned_algorithm": "direct/tiled"}, {"algorithm": "", "failed": "why"}, {"algorithm": "mec/tiled"}]
    assert source.timed("papers12", rows) == {"mec/tiled", "direct/tiled"}
    assert source.timed("ladder-papers12", rows) is None and source.timed("papers12", [{"tensor_bytes": 1}]) is None


def test_the_study_of_untuned_choices_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path, layers = script("benchmarks/untuned.py"), tmp_path / "untuned.json", tmp_path / "layers.jsonl"
    layers.write_text("".join(json.dumps({"schema": 1, "conv": f"n1-c{c}x8x8-k8x3x3", "count": 1, "target": "cpu"}) + "\n" for c in (8, 9)))
    command = ["untuned.py", str(layers), "--trials", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    module.main()
    written = json.loads(path.read_text())
    assert written["schema"] == SCHEMA and written["digests"] == source.digests("cpu")
    assert [row["conv"] for row in written["rows"]] == ["n1-c8x8x8-k8x3x3", "n1-c9x8x8-k8x3x3"]
    assert all(row["default"]["outcome"] == "ok" and row["tuned"]["ms"] <= row["default"]["ms"] for row in written["rows"])
    monkeypatch.setattr(module, "study", None)  # known layers are not measured again
    module.main()
    assert json.loads(path.read_text())["rows"] == written["rows"]


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_layers_are_drawn_from_networks() -> None:
    module = script("benchmarks/draw_layers.py")
    found = {str(conv) for conv in module.convolutions("resnet18")}
    assert {"n1-c3x224x224-k64x7x7-s2-p3", "n1-c512x7x7-k512x3x3-p1"} <= found and len(found) == 11


def test_the_study_of_models_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    module, path = script("benchmarks/models.py"), tmp_path / "models.json"
    row = SimpleNamespace(model="m", ours_ms=1.0, inside_ms=None, ratio=2.0, peers={}, peers_failed={}, failed=None, inside_failed=None)
    peers = {"peers": {"onnxruntime": 2.0, "torch": 3.0}, "peers_failed": {}}
    row.as_dict = lambda: {"model": "m", **peers, "inside_ms": None, "inside_failed": None}
    monkeypatch.setattr(im2win, "compile_model", lambda *_, **__: COMPILED)
    monkeypatch.setattr(module, "measure", lambda *_, **__: row)
    monkeypatch.setattr(sys, "argv", ["models.py", "--json", str(path), "m.onnx"])
    module.main()
    written = json.loads(path.read_text())
    assert written["schema"] == SCHEMA and written["digests"] == source.digests("cpu", models=True)
    assert written["models"] == [{**row.as_dict(), "convs": [KEY]}]
    monkeypatch.setattr(module, "measure", None)  # known models are not measured again
    module.main()
    assert json.loads(path.read_text())["models"] == written["models"]


def test_a_study_of_models_is_stale_with_what_compiles_them() -> None:
    made = source.digests("cpu", models=True)
    assert source.stale(made) is None and source.stale({**made, "models": "other"}) == "other models"
    assert source.stale(source.digests("cpu")) is None


def test_the_study_of_operators_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    module, path = script("benchmarks/operators.py"), tmp_path / "operators.json"
    for graph in module.GRAPHS.values():
        made = module.model(*graph)
        assert all(dim.dim_value > 0 for dim in made.graph.output[0].type.tensor_type.shape.dim)
    row = SimpleNamespace(ours_ms=1.0, ratio=2.0, peers={"onnxruntime": 2.0}, failed=None)
    row.as_dict = lambda: {"model": "Add", "ours_ms": 1.0, "peers": row.peers, "ratio": 2.0}
    monkeypatch.setattr(im2win, "compile_model", lambda *_, **__: COMPILED)
    monkeypatch.setattr(module, "measure", lambda *_, **__: row)
    monkeypatch.setattr(sys, "argv", ["operators.py", "--json", str(path), "Add"])
    module.main()
    written = json.loads(path.read_text())
    assert written["digests"] == source.digests("cpu", models=True)
    assert written["models"] == [{**row.as_dict(), "inputs": {"x": [1, 256, 56, 56], "z": [1, 256, 56, 56]}, "convs": [KEY]}]
    assert "| Add | 1x256x56x56, 1x256x56x56 | 1.000 | 2.000 | 2.00 |" in operators_table([written])
