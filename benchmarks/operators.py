"""Single operators of models, compiled, against ONNX Runtime: everything that is no convolution takes part of a model's time, too.

    python benchmarks/operators.py --json benchmarks/studies/DEVICE/operators.json [NAME...]

Each is an ONNX graph of one operator, or of the few that exporters write for it, at the size that it has in a network. It is compiled for
one image, and timed as `benchmarks/README.md` says: a process for each subject, interleaved rounds, outputs checked against ONNX Runtime's.
Those that the file already holds with today's kernels, on the same device with the same versions, are skipped.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import im2win
from im2win.bench.cpu import commit, versions
from im2win.bench.models import convs_of, measure
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.records.record import utc_now
from im2win.studies.confirmation import held
from im2win.studies.entries import OPERATORS, SCHEMA

OPSET = 20
Shapes = Mapping[str, tuple[int, ...]]
Steps = list[tuple[str, str, str, dict[str, Any]]]  # operators: name, inputs and outputs separated by commas, attributes
_RANDOM = np.random.default_rng(0)


def _weights(*shape: int) -> Any:
    return _RANDOM.normal(0, 0.1, shape).astype(np.float32)


def _one(operator: str, shape: tuple[int, ...], inputs: str = "x", constants: Mapping[str, Any] | None = None, **stated: Any) -> Any:
    """An operator on one input, with constants."""
    return [(operator, inputs, "y", stated)], {"x": shape}, constants or {}


def _two(operator: str, one: tuple[int, ...], other: tuple[int, ...]) -> Any:
    return [(operator, "x,z", "y", {})], {"x": one, "z": other}, {}


def _transposed(inputs: int, outputs: int, size: int, kernel: int, pad: int, more: int = 0) -> Any:
    constants = {"w": _weights(inputs, outputs, kernel, kernel), "b": _weights(outputs)}
    stated = {"strides": [2, 2], "pads": [pad] * 4, "output_padding": [more] * 2}
    return _one("ConvTranspose", (1, inputs, size, size), "x,w,b", constants, **stated)


def _normalised(operator: str, shape: tuple[int, ...], size: int, **stated: Any) -> Any:
    return _one(operator, shape, "x,s,b", {"s": _weights(size), "b": _weights(size)}, **stated)


def _resized(shape: tuple[int, ...], edge: int, **stated: Any) -> Any:
    return _one("Resize", shape, "x,,,s", {"s": np.array([*shape[:2], edge, edge])}, **stated)


def _window(operator: str, shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Any:
    return _one(operator, shape, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)


def _group_norm(groups: int, shape: tuple[int, ...]) -> Any:
    """As PyTorch's exporter writes it."""
    constants = {
        "parts": np.array([0, groups, -1]), "whole": np.array(shape), "g": np.ones(groups, np.float32), "z": np.zeros(groups, np.float32),
        "s": _weights(shape[1], 1, 1), "b": _weights(shape[1], 1, 1),
    }  # fmt: skip
    steps = [
        ("Reshape", "x,parts", "r", {}), ("InstanceNormalization", "r,g,z", "i", {}), ("Reshape", "i,whole", "j", {}),
        ("Mul", "j,s", "k", {}), ("Add", "k,b", "y", {}),
    ]  # fmt: skip
    return steps, {"x": shape}, constants


def _shuffle(groups: int, channels: int, size: int) -> Any:
    constants = {"parts": np.array([1, groups, channels // groups, size, size]), "whole": np.array([1, channels, size, size])}
    steps = [("Reshape", "x,parts", "r", {}), ("Transpose", "r", "t", {"perm": [0, 2, 1, 3, 4]}), ("Reshape", "t,whole", "y", {})]
    return steps, {"x": (1, channels, size, size)}, constants


_HEADS, _TOKENS, _MAP = (1, 12, 197, 64), (1, 197, 768), (1, 96, 56, 56)
GRAPHS: dict[str, Any] = {
    "ConvTranspose 2x2, stride 2": _transposed(256, 128, 28, 2, 0),
    "ConvTranspose 4x4, stride 2": _transposed(64, 32, 56, 4, 1),
    "ConvTranspose 3x3, stride 2": _transposed(128, 64, 28, 3, 1, 1),
    "Conv 3, 1-D": _one("Conv", (1, 128, 1000), "x,w,b", {"w": _weights(256, 128, 3), "b": _weights(256)}, pads=[1, 1]),
    "Conv 3, 1-D, dilation 4": _one("Conv", (1, 64, 4000), "x,w", {"w": _weights(64, 64, 3)}, pads=[4, 4], dilations=[4]),
    "MatMul, queries by keys": (
        [("Transpose", "z", "t", {"perm": [0, 1, 3, 2]}), ("MatMul", "x,t", "y", {})], {"x": _HEADS, "z": _HEADS}, {},
    ),
    "MatMul, scores by values": _two("MatMul", (1, 12, 197, 197), _HEADS),
    "MatMul with a constant": _one("MatMul", _TOKENS, "x,w", {"w": _weights(768, 3072)}),
    "Softmax of scores": _one("Softmax", (1, 12, 197, 197), axis=-1),
    "Softmax of channels": _one("Softmax", (1, 21, 224, 224), axis=1),
    "LayerNormalization of tokens": _normalised("LayerNormalization", _TOKENS, 768, axis=-1),
    "LayerNormalization of pixels": _normalised("LayerNormalization", (1, 56, 56, 96), 96, axis=-1),
    "GroupNorm": _group_norm(8, (1, 128, 64, 64)),
    "InstanceNormalization": _normalised("InstanceNormalization", (1, 64, 128, 128), 64),
    "BatchNormalization": _one("BatchNormalization", (1, 64, 56, 56), "x,s,b,m,v", {name: 1 + abs(_weights(64)) for name in "sbmv"}),
    "Resize nearest, twice the size": _resized((1, 128, 32, 32), 64, nearest_mode="floor", coordinate_transformation_mode="asymmetric"),
    "Resize linear, twice the size": _resized((1, 64, 56, 56), 112, mode="linear"),
    "Resize linear, aligned corners": _resized((1, 21, 28, 28), 224, mode="linear", coordinate_transformation_mode="align_corners"),
    "MaxPool 3x3, stride 2": _window("MaxPool", (1, 64, 112, 112), 3, 2, 1),
    "MaxPool 5x5, stride 1": _window("MaxPool", (1, 256, 20, 20), 5, 1, 2),
    "AveragePool 2x2, stride 2": _window("AveragePool", (1, 128, 56, 56), 2, 2, 0),
    "AveragePool 3x3, stride 1": _window("AveragePool", (1, 192, 35, 35), 3, 1, 1),
    "GlobalAveragePool 7x7": _one("GlobalAveragePool", (1, 1280, 7, 7)),
    "ReduceMean of 28x28": _one("ReduceMean", (1, 240, 28, 28), "x,a", {"a": np.array([2, 3])}),
    "Add": _two("Add", (1, 256, 56, 56), (1, 256, 56, 56)),
    "Mul by channel": _two("Mul", _MAP, (1, 96, 1, 1)),
    "Div": _two("Div", _MAP, _MAP),
    "Relu": _one("Relu", _MAP),
    "Clip": _one("Clip", _MAP, "x,a,b", {"a": np.float32(0), "b": np.float32(6)}),
    "PRelu": _one("PRelu", (1, 64, 112, 112), "x,s", {"s": _weights(64, 1, 1)}),
    "HardSwish": _one("HardSwish", _MAP),
    "Sigmoid": _one("Sigmoid", _MAP),
    "SiLU": ([("Sigmoid", "x", "s", {}), ("Mul", "x,s", "y", {})], {"x": _MAP}, {}),
    "Tanh": _one("Tanh", _MAP),
    "Gelu": _one("Gelu", (1, 197, 3072)),
    "Exp": _one("Exp", _MAP),
    "Transpose to channels last": _one("Transpose", _MAP, perm=[0, 2, 3, 1]),
    "Transpose to channels first": _one("Transpose", (1, 56, 56, 96), perm=[0, 3, 1, 2]),
    "Transpose of heads": _one("Transpose", (1, 197, 12, 64), perm=[0, 2, 1, 3]),
    "DepthToSpace": _one("DepthToSpace", (1, 256, 48, 48), blocksize=2, mode="CRD"),
    "channel shuffle": _shuffle(2, 116, 28),
    "Concat of channels": [[("Concat", "x,z", "y", {"axis": 1})], {"x": (1, 128, 28, 28), "z": (1, 128, 28, 28)}, {}],
}  # fmt: skip


def model(steps: Steps, inputs: Shapes, constants: Mapping[str, Any]) -> onnx.ModelProto:
    """An ONNX model whose outputs have the shapes that ONNX infers."""
    nodes = [helper.make_node(name, read.split(","), made.split(","), **stated) for name, read, made, stated in steps]
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "operator", ports, outputs, [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()])
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9))


def main() -> None:
    """Reads the command line, times every operator, writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=list(GRAPHS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in GRAPHS]:
        parser.error(f"`NAME` (={unknown[0]!r}) must be one of {', '.join(GRAPHS)}.")
    machine = Machine.host(options.threads)
    facts = {
        "study": OPERATORS, "schema": SCHEMA, "device": machine.name, "brand": machine.brand, "threads": machine.threads, "batch": 1,
        "versions": versions(),
    }  # fmt: skip
    rows = held(options.json, "models", facts)
    known = {row["model"] for row in rows}
    for name in (one for one in options.names if one not in known):
        with tempfile.TemporaryDirectory(prefix="im2win-operators-") as folder:
            source, library = Path(folder) / "operator.onnx", Path(folder) / "operator.so"
            onnx.save(model(*GRAPHS[name]), source)
            compiled = im2win.compile_model(source, library, batches=[1], threads=options.threads)
            row = measure(name, source, library, ["onnxruntime"], machine.threads, options.rounds)
        times = f"ours {row.ours_ms or float('nan'):.4f} ms, ONNX Runtime {row.peers.get('onnxruntime', float('nan')):.4f}"
        print(f"{name}: {times}, ratio {row.ratio or float('nan'):.2f} {row.failed or ''}", flush=True)
        shapes = {port: list(shape) for port, shape in GRAPHS[name][1].items()}
        rows.append({**row.as_dict(), "inputs": shapes, "convs": convs_of(compiled)})
        made = {"commit": commit(), "date": utc_now(), "digests": digests("cpu", models=True)}
        replace_json(options.json, {**facts, **made, "models": rows})


if __name__ == "__main__":
    main()
