"""Compiled ONNX models: batches, worker processes, bad input, and their files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_graphs import classifier, compiled, graph, in_new_process, integers, keys, node, onnx, peer
from paths import ROOT

import im2win
from im2win.device.cpu import Machine
from im2win.frontends.models.convolutions import build, in_processes
from im2win.frontends.models.kept_kernels import Job
from im2win.frontends.onnx.layers import ModelError, layers_of
from im2win.records import judge
from im2win.runtime.manifest import ArtefactError
from im2win.runtime.model_manifest import digest
from im2win.runtime.seal import seal

# --- batches -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def buckets() -> tuple[Any, Any]:
    model = classifier("n")
    return model, compiled(model, batches=[4, 1, 2])


@pytest.mark.parametrize("images", range(1, 12))
def test_any_number_of_images(buckets: tuple[Any, Any], images: int) -> None:
    """Exactly one of the batches, the next larger, and more than the largest."""
    model, made = buckets
    assert made.batches == (1, 2, 4)
    x = integers(images, 3, 8, 8)
    [expected] = peer(model, {"x": x})
    assert (made(x) == expected).all()
    out = np.full((images, 5), np.nan, np.float32)
    assert made(x, out=out) is out and (out == expected).all()


def test_torch_tensors(buckets: tuple[Any, Any]) -> None:
    torch = pytest.importorskip("torch")
    model, made = buckets
    x = integers(3, 3, 8, 8)
    y = made(torch.from_numpy(x))
    assert isinstance(y, torch.Tensor) and (y.numpy() == peer(model, {"x": x})[0]).all()


def test_many_threads_on_one_model(buckets: tuple[Any, Any]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model, made = buckets
    images = [integers(1 + i % 5, 3, 8, 8) for i in range(24)]
    expected = [peer(model, {"x": x})[0] for x in images]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(made, images))
    assert all((ours == theirs).all() for ours, theirs in zip(found, expected, strict=True))


def test_another_batch_than_the_models_own() -> None:
    """Shapes that Reshape is given hold the old batch."""
    made = compiled(classifier(2), batches=[3])
    x = integers(3, 3, 8, 8)
    model = classifier(3)
    for tensor, other in zip(model.graph.initializer, classifier(2).graph.initializer, strict=True):
        assert tensor.name == other.name
    with pytest.raises(ValueError, match="`x` has shape"):
        made(x[:, :, :7])
    assert made(x).shape == (3, 5) and made.batches == (3,)


def test_a_model_whose_output_does_not_grow() -> None:
    model = graph([node("ReduceSum", "x", "y", keepdims=0)], {"x": ("n", 4)})
    made = compiled(model, batches=[2])
    x = integers(2, 4)
    assert made(x) == x.sum()
    with pytest.raises(ValueError, match=r"1 images must be one of the batches .*'y' does not grow with the batch"):
        made(x[:1])


def test_what_was_tuned_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the nearest layer's tile where another batch was tuned and it is worth borrowing."""
    monkeypatch.setattr(judge, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(judge, "MOST_EXPECTED", float("inf"))
    [conv, product] = [layer.conv for layer in layers_of(classifier("n"), epilogues=True, products=True)]
    im2win.tune(conv, trials=2, logs=tmp_path)
    made = compiled(classifier("n"), batches=[1, 2], logs=tmp_path)
    tiers = {layer.conv: layer.tier for layer in made.manifest.layers}
    assert tiers[str(conv)] == "exact" and tiers[str(conv.with_(batch=2))] == "nearest layer" and tiers[str(product)] == "default"


# --- compilation -----------------------------------------------------------------------------------------------------


def test_worker_processes_make_the_same_code(tmp_path: Path) -> None:
    machine = Machine.host()
    convs = [im2win.Conv2d.parse(key) for key in ("n1-c3x8x8-k8x3x3-bias-relu", "n1-c4x4x4-k4x1x1", "n1-c6x5x5-k6x3x3-g6")]
    jobs = [Job(conv, f"conv_{i}", machine, None, "exact", tmp_path / f"{i}.o") for i, conv in enumerate(convs)]
    alone = [build(job) for job in jobs]
    objects = [job.path.read_bytes() for job in jobs]
    assert list(in_processes(jobs, 1)) == alone and [job.path.read_bytes() for job in jobs] == objects
    impossible = Job(convs[0].with_(dtype="int8", activation="silu"), "conv", machine, None, "exact", tmp_path / "x.o")
    with pytest.raises(ValueError, match="n1-c3x8x8-k8x3x3-int8-bias-silu: no algorithm computes"):
        list(in_processes([impossible], 1))


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_model_whose_images_do_not_lie_on_the_first_axis() -> None:
    model = graph([node("Reshape", "x flat", "y")], {"x": ("n", 4)}, {"flat": np.array([-1])})
    assert compiled(model, batches=[3])(integers(3, 4)).shape == (12,)
    with pytest.raises(ModelError, match=r"must hold the images of 'y' on its first axis alone .* shape \[12\] at batch 3"):
        compiled(model, batches=[1, 3])


def test_wrong_tensors(buckets: tuple[Any, Any]) -> None:
    _, made = buckets
    x = integers(1, 3, 8, 8)
    with pytest.raises(ValueError, match="`x` has dtype float64; it must be float32"):
        made(x.astype(np.float64))
    with pytest.raises(ValueError, match=r"`x` has shape \(1, 3, 8, 9\); it must be \(1, 3, 8, 8\)"):
        made(integers(1, 3, 8, 9))
    with pytest.raises(ValueError, match="not contiguous"):
        made(integers(1, 3, 8, 16)[..., ::2])
    with pytest.raises(ValueError, match="at least 1; they hold x: 0"):
        made(x[:0])
    with pytest.raises(ValueError, match=r"takes 1 inputs \(x\), not 2"):
        made(x, x)
    with pytest.raises(ValueError, match=r"inputs \(z\) must be exactly those of the model: x"):
        made.run({"z": x})
    with pytest.raises(ValueError, match=r"`x` .* must be a numpy array"):
        made([1.0])
    with pytest.raises(ValueError, match="`out` must have 1 tensors"):
        made(x, out=(x, x))
    with pytest.raises(ValueError, match=r"`y` has shape \(2, 5\)"):
        made(x, out=np.empty((2, 5), np.float32))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: graph([node("Relu", "x", "y")], {"x": (1, "h")}), r"must have fixed shapes but for the batch; 'x' has the shape \[1, h\]"),
        (lambda: graph([node("Conv", "x w", "y")], {"x": (1, 3, "h", 8)}, {"w": integers(2, 3, 1, 1)}), "must have fixed shapes"),
        (lambda: graph([node("Det", "x", "y")], {"x": (3, 3)}), "must have operators that TVM imports"),
        (lambda: graph([node("NonZero", "x", "y")], {"x": (3, 3)}), "must"),
    ],
)
def test_models_that_cannot_be_compiled(model: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        compiled(model())


@pytest.mark.parametrize("batches", [[], [0], [1.5], [True]])
def test_batches_out_of_range(batches: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"`batches` .* must be 1 to 64 integers, each at least 1"):
        compiled(classifier("n"), batches=batches)


def test_missing_weights(tmp_path: Path) -> None:
    model = classifier("n")
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    assert compiled(tmp_path / "m.onnx")(integers(1, 3, 8, 8)).shape == (1, 5)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(ModelError, match="must lie beside its external weights"):
        compiled(tmp_path / "m.onnx")


# --- files ---------------------------------------------------------------------------------------------------------


def test_export_and_load(buckets: tuple[Any, Any], tmp_path: Path) -> None:
    model, made = buckets
    path = made.export(tmp_path / "folder" / "model.so")
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.so", "model.so.json", "model.so.weights"]
    loaded = im2win.load_model(path, verify=True)
    x = integers(5, 3, 8, 8)
    assert (loaded(x) == peer(model, {"x": x})[0]).all()
    assert keys(loaded) == keys(made) and "batches 1, 2, 4" in repr(loaded)
    assert loaded.export(path) == path  # onto itself


def test_large_weights_are_checked_on_request(buckets: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = buckets[1].export(tmp_path / "model.so")
    weights = tmp_path / "model.so.weights"
    size = weights.stat().st_size
    weights.write_bytes(bytes(size))
    im2win.load_model(path, verify=False)
    monkeypatch.setattr("im2win.runtime.model_manifest.VERIFIED_BYTES", size - 1)
    im2win.load_model(path)
    with pytest.raises(ArtefactError, match="not the weights"):
        im2win.load_model(path, verify=True)


def test_files_that_are_not_whole(buckets: tuple[Any, Any], tmp_path: Path) -> None:
    path = buckets[1].export(tmp_path / "model.so")
    manifest, weights = tmp_path / "model.so.json", tmp_path / "model.so.weights"
    good = {file: file.read_bytes() for file in (path, manifest, weights)}

    def fails(words: str, **options: Any) -> None:
        with pytest.raises(ArtefactError, match=words):
            im2win.load_model(path, **options)
        for file, content in good.items():
            file.write_bytes(content)

    weights.write_bytes(good[weights][:-1])
    fails("truncated, or not the weights")
    weights.write_bytes(bytes(len(good[weights])))
    fails("not the weights", verify=True)
    weights.write_bytes(bytes(len(good[weights])))
    fails("not the weights")
    weights.unlink()
    fails("no weights there")
    path.write_bytes(good[path][:-1])
    fails("checksums differ")
    manifest.unlink()
    fails("no manifest there; `im2win compile` writes it")
    manifest.write_text("{")
    fails("not a readable manifest")
    manifest.write_text(json.dumps({**json.loads(good[manifest]), "schema": 99}))
    fails("schema 99 is not 4")
    manifest.write_text(json.dumps({**json.loads(good[manifest]), "odd": 1}))
    fails("not a manifest of im2win")
    manifest.write_text(json.dumps({**json.loads(good[manifest]), "isa": "neon9"}))
    fails("sealed with other facts")
    elsewhere = {**json.loads(good[manifest]), "isa": "neon9"}
    seal(path, elsewhere)
    manifest.write_text(json.dumps({**elsewhere, "sha256": digest(path)}))
    fails("built for neon9")
    with pytest.raises(ArtefactError, match="load_model` loads it"):
        im2win.load(path)
    older = json.loads(good[manifest])
    untiled = [{name: value for name, value in one.items() if name != "tile"} for one in older["layers"]]
    for wrong in (None, [1], [{"conv": 1}], 7, untiled):
        manifest.write_text(json.dumps({**older, "schema": 2, "layers": wrong}))
        fails("not a manifest of im2win")
    for schema in (1, 2):
        layers = [{"rung" if name == "tier" and schema == 1 else name: value for name, value in one.items()} for one in older["layers"]]
        manifest.write_text(json.dumps({**older, "schema": schema, "layers": layers}))
        assert im2win.load_model(path).batches == (1, 2, 4), "manifests of older schemas are read"


def test_without_the_compiler(buckets: tuple[Any, Any], tmp_path: Path) -> None:
    model, made = buckets
    x = integers(2, 3, 8, 8)
    [y] = in_new_process(made.export(tmp_path / "model.so"), x, tmp_path)
    assert (y == peer(model, {"x": x})[0]).all()


@pytest.mark.slow
def test_the_texts_c_program_runs(buckets: tuple[Any, Any], tmp_path: Path) -> None:
    model, made = buckets
    text = (ROOT / "docs" / "onnx.md").read_text()
    [code] = (one for one in re.findall(r"^```cpp\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if "int main" in one)
    ffi, tvm = (Path(str(importlib.util.find_spec(name).origin)).parent for name in ("tvm_ffi", "tvm"))
    (tmp_path / "run.cc").write_text(code)
    [command] = re.findall(r"^// (g\+\+ .*)$", code, re.MULTILINE)
    words = command.replace("$FFI", str(ffi)).replace("$TVM", str(tvm)).split()
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    x = integers(1, 3, 8, 8)
    x.tofile(tmp_path / "x")
    library = made.export(tmp_path / "model.so")
    workspace = made.manifest.buckets[0].workspace
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{ffi / 'lib'}:{tvm / 'lib'}"}
    words = ["./run", str(library), str(workspace), "x", "y", str(x.size), "5"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert (np.fromfile(tmp_path / "y", np.float32).reshape(1, 5) == peer(model, {"x": x})[0]).all()
