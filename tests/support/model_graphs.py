"""Small ONNX graphs of integers, compiled and compared with ONNX Runtime, which several test files share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from paths import ROOT  # noqa: E402

import im2win  # noqa: E402

helper, numpy_helper, FLOAT, INT64 = onnx.helper, onnx.numpy_helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
RANDOM = np.random.default_rng(7)


def integers(*shape: int, most: int = 3) -> np.ndarray:
    return RANDOM.integers(-most, most + 1, shape).astype(np.float32)


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), outputs.split(), name=f"{operator}_{outputs.split()[0]}", **attributes)


def graph(
    nodes: list[Any], inputs: dict[str, tuple[Any, ...]], constants: dict[str, Any] | None = None, outputs: str = "y", opset: int = 17
) -> Any:
    constants = constants or {}
    body = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(name, FLOAT, list(shape)) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    made = helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)  # fills in the outputs' shapes


def typed(model: Any, dtype: str) -> Any:
    """A float32 model with weights, inputs and outputs in float16 or bfloat16."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for tensor in made.graph.initializer:
        if tensor.data_type == FLOAT:
            array = numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(helper.make_tensor(tensor.name, code, array.shape, array.tobytes(), raw=True))
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = code if value.type.tensor_type.elem_type == FLOAT else value.type.tensor_type.elem_type
    del made.graph.value_info[:]
    return made


def peer(model: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """ONNX Runtime's outputs, its sums of integers exact on every CPU."""
    options = ort.SessionOptions()
    if any(one.data_type == onnx.TensorProto.UINT8 for one in model.graph.initializer):  # with it, ONNX Runtime refuses a QGemm of int8
        options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def compiled(model: Any, **options: Any) -> Any:
    return im2win.compile_model(model, **{"accuracy": "exact", **options})


def check(model: Any, exact: bool = True, **options: Any) -> Any:
    """Compiles a model of fixed shapes and compares all its outputs with ONNX Runtime's."""
    made = compiled(model, **options)
    feeds = {port.name: integers(*port.shape) for port in made.inputs}
    found = made.run(feeds)
    expected = peer(model, feeds)
    assert list(found) == [value.name for value in model.graph.output]
    for (name, ours), theirs in zip(found.items(), expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
        if exact:
            assert (ours == theirs).all(), f"{name}: {np.abs(ours - theirs).max()}"
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)
    return made


def keys(made: Any) -> list[str]:
    return [layer.conv for layer in made.manifest.layers]


def norm(channels: int, name: str) -> dict[str, np.ndarray]:
    """Statistics whose scale is exact in binary: gamma / sqrt(variance) is a power of two."""
    return {
        f"{name}g": RANDOM.choice([0.5, 1, 2], channels).astype(np.float32),
        f"{name}b": integers(channels),
        f"{name}m": integers(channels),
        f"{name}v": RANDOM.choice([1, 4], channels).astype(np.float32),
    }


def batch_norm(value: str, output: str, name: str) -> Any:
    return node("BatchNormalization", f"{value} {name}g {name}b {name}m {name}v", output, epsilon=0.0)


def dense(batch: int) -> Any:
    """Blocks that grow by concatenation; of each value every use that can forbid to compute it in its place."""
    nodes = [
        node("Conv", "x w0", "a"),
        node("Concat", "x a", "b", axis=1),  # an input must be copied
        node("Conv", "b w1", "c"),
        node("Concat", "b c", "d", axis=1),
        node("Conv", "d w2", "e"),
        node("Concat", "e d k e", "f", axis=1),  # a constant, and one value twice
        node("Relu", "f", "y"),
        node("Concat", "c e", "g", axis=2),
        node("Neg", "g", "z"),
    ]
    constants = {"w0": integers(3, 2, 1, 1), "w1": integers(3, 5, 1, 1), "w2": integers(3, 8, 1, 1), "k": integers(batch, 2, 4, 5)}
    return graph(nodes, {"x": (batch, 2, 4, 5)}, constants, "y z e")


def classifier(batch: Any) -> Any:
    nodes = [
        node("Conv", "x w b", "a", pads=[1] * 4, strides=[2, 2]),
        node("Relu", "a", "c"),
        node("Reshape", "c shape", "d"),
        node("Gemm", "d g", "y"),
    ]
    rows = batch if isinstance(batch, int) else -1
    constants = {"w": integers(8, 3, 3, 3), "b": integers(8), "shape": np.array([rows, 8 * 4 * 4]), "g": integers(128, 5)}
    return graph(nodes, {"x": (batch, 3, 8, 8)}, constants)


ALONE = """
    import sys
    import numpy as np
    import im2win
    path, x, y = sys.argv[1:]
    model = im2win.load_model(path)
    results = model(np.load(x))
    np.savez(y, *(results if isinstance(results, tuple) else (results,)))
    assert not {"tvm", "onnx", "onnxruntime"} & set(sys.modules), "the runtime must do"
    assert "libtvm_compiler" not in open("/proc/self/maps").read()
"""


def in_new_process(path: Path, x: np.ndarray, folder: Path) -> list[np.ndarray]:
    """The outputs of an exported model in a process that has no compiler."""
    np.save(folder / "x.npy", x)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-c", textwrap.dedent(ALONE), str(path), str(folder / "x.npy"), str(folder / "y.npz")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "y.npz") as stored:
        return list(stored.values())
