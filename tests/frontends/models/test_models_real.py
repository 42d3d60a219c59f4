"""Whole ONNX models: real graphs, the command line, and the benchmark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import light  # noqa: E402
from model_graphs import classifier, in_new_process, integers, numpy_helper, peer  # noqa: E402

import im2win  # noqa: E402
from im2win.bench.models import with_random_weights  # noqa: E402
from im2win.frontends.models.parts import take_apart  # noqa: E402
from im2win.frontends.models.source import at_batch, read  # noqa: E402
from im2win.frontends.onnx.layers import layers_of  # noqa: E402

# --- real graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "batch"), [*((name, None) for name in light.NAMES), ("shufflenet", 4), ("inception_v2", 4)])
def test_tuned_are_exactly_the_layers_that_are_looked_up(name: str, batch: int | None) -> None:
    label, model = read(light.path(name))
    parts = take_apart(at_batch(model, label, batch), batch or 1)
    tuned = layers_of(light.path(name), batch=batch, epilogues=True, products=True)
    looked_up = [one.conv for one in parts.convolutions]
    assert {layer.conv: layer.count for layer in tuned} == {conv: looked_up.count(conv) for conv in looked_up}


# vgg19 and zfnet512 have bvlc_alexnet's operators with other sizes. Of these graphs the blocks after the last value that is compiled are
# like those before it, with other sizes.
FIRST_BLOCKS = {
    "densenet121": "r120",  # a dense block, what lies between two, and the beginning of the next
    "inception_v1": "r38",  # two blocks, and the pooling behind them
    "inception_v2": "r161",  # two blocks, and one with a stride
    "resnet50": "r56",  # three blocks, one with a stride, and the one behind it; its end is like shufflenet's
}
WHOLE = ("bvlc_alexnet", "resnet50", "shufflenet", "squeezenet")
# slow: 10 to 40 seconds each; of resnet50, the longest, an ordinary run has the first blocks
MARKS = {"squeezenet": [], "resnet50": [pytest.mark.slow, pytest.mark.exhaustive]}


def compared(model: Any, folder: Path) -> None:
    """Compiles a model, runs it without the compiler, and compares with ONNX Runtime."""
    made = im2win.compile_model(model, folder / "random.so")
    assert not made.manifest.skipped
    x = np.random.default_rng(1).normal(size=made.inputs[0].shape).astype(np.float32)
    for ours, theirs in zip(in_new_process(folder / "random.so", x, folder), peer(model, {made.inputs[0].name: x}), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in WHOLE])
def test_real_models(name: str, tmp_path: Path) -> None:
    compared(with_random_weights(light.path(name)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "last"), FIRST_BLOCKS.items())
def test_first_blocks_of_real_models(name: str, last: str, tmp_path: Path) -> None:
    compared(light.until(with_random_weights(light.path(name)), last), tmp_path)


def test_stored_output(tmp_path: Path) -> None:
    """With the weights that come with the graph, all equal, which tells less of a kernel than random ones."""
    im2win.compile_model(light.path("shufflenet"), tmp_path / "stored.so")
    [y] = in_new_process(tmp_path / "stored.so", light.stored_input("shufflenet"), tmp_path)
    np.testing.assert_allclose(y, light.stored_output("shufflenet"), rtol=1e-3, atol=1e-7)  # as the package's own tests


# --- the command line, and the benchmark ---------------------------------------------------------------------------------


def test_compile_and_run(command: Any, tmp_path: Path) -> None:
    model, library = classifier("n"), tmp_path / "out" / "model.so"
    onnx.save(model, tmp_path / "model.onnx")
    done = command("compile", tmp_path / "model.onnx", "--out", library, "--batch", "1,4")
    assert done.status == 0, done.err
    assert "the whole, 4 images: " in done.out
    assert "n4-c3x8x8-k8x3x3-s2-p1-bias-relu" in done.out and "batches 1, 4; tiles: 4 default tile" in done.out
    x = integers(2, 3, 8, 8)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.pb").write_bytes(numpy_helper.from_array(x).SerializeToString())
    [expected] = peer(model, {"x": x})
    for source, out in (("x.npy", "y.npy"), ("x.pb", "y.npz")):
        before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        done = command("run", library, "--input", f"x={tmp_path / source}", "--out", tmp_path / out, "--repeat", 1)
        assert before is None or os.sched_getaffinity(0) == before, "whoever counts CPUs afterwards counts all"
        assert done.status == 0 and "(2, 5)" in done.out and "median of 1" in done.out, done.err
    assert (np.load(tmp_path / "y.npy") == expected).all() and (np.load(tmp_path / "y.npz")["y"] == expected).all()
    (tmp_path / "text.pb").write_text("no tensor")
    (tmp_path / "text.npy").write_text("no array")
    for words, message in (
        (["run", library], "must name each input of the model once: x float32 [1, 3, 8, 8]"),
        (["run", library, "--input", "x"], "`--input` (='x') must be NAME=FILE"),
        (["run", library, "--input", f"x={tmp_path / 'text.npy'}"], "is no array of numpy"),
        (["run", library, "--input", f"x={tmp_path / 'text.pb'}"], "text.pb"),
        (["run", library, "--input", f"x={tmp_path / 'x.txt'}"], "must end in .npy or .pb"),
        (["run", library, "--input", f"x={tmp_path / 'x.npy'}", "--out", "y.csv"], "must end in .npz or .npy"),
        (["run", tmp_path / "nosuch.so"], "no manifest there"),
        (["compile", tmp_path / "model.onnx", "--out", library, "--batch", "one"], "must be integers with commas between them"),
        (["compile", tmp_path / "nosuch.onnx", "--out", library], "must be an existing file"),
        (["compile", tmp_path / "model.onnx", "--out", library, "--dtype", "int8"], "`dtype` (='int8') must be float32, float16, bfloat16"),
    ):
        done = command(*words)
        assert done.status == 2 and message in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.slow
def test_the_benchmark_measures_and_judges(tmp_path: Path) -> None:
    from im2win.bench.models import measure

    onnx.save(classifier("n"), tmp_path / "model.onnx")
    im2win.compile_model(tmp_path / "model.onnx", tmp_path / "model.so", batches=[2], threads=1)
    row = measure("classifier", tmp_path / "model.onnx", tmp_path / "model.so", threads=1, rounds=1, warmup=0.01)
    assert not row.failed and not row.peers_failed and row.error is not None and row.error < 1e-6
    assert set(row.peers) == {"onnxruntime", "torch"} and row.ratio == row.peers[str(row.best_peer)] / row.ours_ms
    wrong = classifier("n")
    wrong.graph.initializer[0].CopyFrom(numpy_helper.from_array(integers(8, 3, 3, 3), "w"))
    onnx.save(wrong, tmp_path / "model.onnx")
    row = measure("classifier", tmp_path / "model.onnx", tmp_path / "model.so", ["onnxruntime"], 1, rounds=1, warmup=0.01)
    assert row.failed is not None and "differs from ONNX Runtime's" in row.failed and row.ratio is None
    with pytest.raises(ValueError, match="must be one of onnxruntime, torch"):
        measure("classifier", tmp_path / "model.onnx", tmp_path / "model.so", ["tensorrt"])
