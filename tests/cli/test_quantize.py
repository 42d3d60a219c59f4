"""`im2win quantize`: the model that it writes, the loss that it prints, and its errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_graphs import graph, node, onnx

pytest.importorskip("onnxruntime.quantization")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, and calibration data, right and wrong."""
    place, random = tmp_path_factory.mktemp("quantize"), np.random.default_rng(0)
    weights = {"w": random.normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32), "m": random.normal(0, 0.3, (8, 5)).astype(np.float32)}
    nodes = [
        node("Conv", "x w", "a"), node("Relu", "a", "b"), node("GlobalAveragePool", "b", "c"), node("Flatten", "c", "d"),
        node("MatMul", "d m", "y"),
    ]  # fmt: skip
    onnx.save(graph(nodes, {"x": ("N", 3, 8, 8)}, weights), place / "model.onnx")
    images = random.normal(0, 1, (6, 3, 8, 8)).astype(np.float32)
    np.savez(place / "data.npz", x=images)
    np.savez(place / "named.npz", image=images)
    np.savez(place / "small.npz", x=images[:, :, 1:])
    np.savez(place / "double.npz", x=images.astype(np.float64))
    np.savez(place / "none.npz", x=images[:0])
    np.save(place / "data.npy", images)
    (place / "text.npz").write_text("no arrays")
    return place


@pytest.mark.parametrize("options", [["--calibrate", "data.npz"], ["--calibrate", "data.npy", "--no-per-channel", "--activations", "int8"]])
def test_it_writes_a_model_and_prints_the_loss(command: Callable[..., Any], folder: Path, monkeypatch: Any, options: list[str]) -> None:
    monkeypatch.chdir(folder)
    done = command("quantize", "model.onnx", *options, "--out", "int8.onnx")
    assert done.status == 0, done.err
    assert "y" in done.out and "6 images" in done.out
    share = re.search(r"([\d.]+) %", done.out)
    assert share is not None and float(share[1]) > 80
    operators = [one.op_type for one in onnx.load(folder / "int8.onnx").graph.node]
    assert {"QuantizeLinear", "DequantizeLinear", "Conv"} <= set(operators)
    again = command("quantize", "int8.onnx", "--calibrate", "data.npz", "--out", "more.onnx")
    assert again.status == 2 and "must be a float32 model" in again.err


def test_models_of_older_operator_sets_are_converted(command: Callable[..., Any], folder: Path, monkeypatch: Any) -> None:
    """Operator set 9 with constants that are inputs, too, as in files of IR version 3; a normalisation is folded into its filters."""
    monkeypatch.chdir(folder)
    ones = {name: np.ones(8, np.float32) for name in ("scale", "shift", "mean", "variance")}
    nodes = [
        node("Conv", "x w", "a"), node("BatchNormalization", "a scale shift mean variance", "b"), node("GlobalAveragePool", "b", "c"),
        node("Flatten", "c", "y"),
    ]  # fmt: skip
    weights = {"w": np.random.default_rng(0).normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32), **ones}
    model = graph(nodes, {"x": (1, 3, 8, 8)}, weights)
    model.ir_version = 3
    model.opset_import[0].version = 9
    for constant in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(constant.name, constant.data_type, constant.dims))
    onnx.save(model, "old.onnx")
    done = command("quantize", "old.onnx", "--calibrate", "data.npz", "--out", "new.onnx")
    assert done.status == 0, done.err
    written = onnx.load(folder / "new.onnx")
    assert written.opset_import[0].version >= 13
    assert "BatchNormalization" not in [one.op_type for one in written.graph.node]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nosuch.onnx --calibrate data.npz", "must be an existing file"),
        ("model.onnx --calibrate nosuch.npz", "`--calibrate` (=nosuch.npz) must be an existing file"),
        ("model.onnx --calibrate text.npz", "`--calibrate` (=text.npz) must be .npz or .npy"),
        ("model.onnx --calibrate named.npz", "`data` (=image) must have an array for each input of the model: x"),
        ("model.onnx --calibrate small.npz", "'x' is float32 [6, 3, 7, 8]; it must be float32 [images, 3, 8, 8]"),
        ("model.onnx --calibrate double.npz", "'x' is float64 [6, 3, 8, 8]"),
        ("model.onnx --calibrate none.npz", "at least 1"),
        ("model.onnx --calibrate data.npz --activations int4", "`activations` (='int4') must be uint8 or int8"),
    ],
)
def test_bad_input_is_one_line(command: Callable[..., Any], folder: Path, monkeypatch: Any, words: str, message: str) -> None:
    monkeypatch.chdir(folder)
    done = command("quantize", *words.split(), "--out", "out.onnx")
    assert done.status == 2 and message in done.err and done.err.count("\n") == 1
    assert not (folder / "out.onnx").exists()
