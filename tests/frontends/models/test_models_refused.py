"""Models that cannot be compiled end in one line that names what is wrong: element types, operators, files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402

import im2win  # noqa: E402
from im2win.frontends.onnx.layers import ModelError  # noqa: E402


def model(nodes: list[Any], inputs: dict[str, tuple[int, ...]], kind: int, opset: int, weights: tuple[Any, ...] = ()) -> Any:
    values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    body = helper.make_graph(nodes, "refused", values, [helper.make_tensor_value_info("y", kind, None)], list(weights))
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def test_bfloat16_is_named() -> None:
    """A model that has bfloat16 values, though not all of its filters are."""
    w = helper.make_tensor("w", TensorProto.BFLOAT16, [4, 4, 1, 1], np.ones(16, np.float32))
    v = helper.make_tensor("v", TensorProto.FLOAT, [4, 4, 1, 1], np.ones(16, np.float32))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Conv", ["b", "v"], ["c"]), helper.make_node("Cast", ["c"], ["y"], to=TensorProto.BFLOAT16),
    ]  # fmt: skip
    made = model(nodes, {"x": (1, 4, 8, 8)}, TensorProto.BFLOAT16, 22, (w, v))
    with pytest.raises(ModelError, match="must have inputs and outputs of integers, booleans or IEEE floats; 'x' is bfloat16"):
        im2win.compile_model(made)


def test_an_operator_that_tvm_does_not_know_is_named_and_nothing_else_is_printed(tmp_path: Path) -> None:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=2, kv_num_heads=2)
    made = model([node], dict.fromkeys("qkv", (1, 4, 8)), TensorProto.FLOAT, 23)
    onnx.save(made, tmp_path / "attention.onnx")
    words = ["-m", "im2win", "compile", str(tmp_path / "attention.onnx"), "--out", str(tmp_path / "a.so")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("im2win: compiling")]
    assert "Attention, as operator set 23 has it, it cannot import (KeyError: 'num_heads')" in line


def test_a_missing_file_is_not_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    for verb in (["layers"], ["compile", "--out", tmp_path / "a.so"], ["onnxruntime", "--out", tmp_path / "a.onnx"], ["tune"]):
        done = command(verb[0], tmp_path / "none.onnx", *verb[1:])
        assert done.status == 2 and "none.onnx') must be an existing file" in done.err


def test_a_model_without_convolutions_says_so(tmp_path: Path, command: Any) -> None:
    """It is compiled, and none of it is im2win's kernels'."""
    onnx.save(model([helper.make_node("Relu", ["x"], ["y"])], {"x": (1, 4, 8)}, TensorProto.FLOAT, 17), tmp_path / "relu.onnx")
    done = command("compile", tmp_path / "relu.onnx", "--out", tmp_path / "relu.so", "--no-compare")
    assert done.status == 0 and "no convolution or matrix product of this model runs on im2win's kernels" in done.out
