"""The nine graphs that the package onnx carries: the inputs and outputs stored for them, and the same graphs with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.backend.test.runner import Runner

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
NAMES = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19", "zfnet512")


def path(name: str) -> Path:
    return LIGHT / f"light_{name}.onnx"


def stored_input(name: str) -> np.ndarray:
    """What the package's own tests feed the graph with."""
    graph = onnx.load(path(name)).graph
    weights = {tensor.name for tensor in graph.initializer}
    [image] = [value for value in graph.input if value.name not in weights]
    return np.asarray(Runner.generate_dummy_data(image, seed=0, name=name, random=False))


def stored_output(name: str) -> np.ndarray:
    message = onnx.TensorProto()
    message.ParseFromString((LIGHT / f"light_{name}_output_0.pb").read_bytes())
    return np.asarray(numpy_helper.to_array(message))


def with_random_weights(name: str, seed: int = 0) -> Any:
    """The graph with weights that tell its channels apart: those stored are all the same number, and so are its outputs.

    What its softmax reads is an output, too: of random weights one class takes it all.
    """
    model = onnx.load(path(name))
    random = np.random.default_rng(seed)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    roles: dict[str, tuple[str, int]] = {}
    for node in model.graph.node:
        roles |= {value: (node.op_type, place) for place, value in enumerate(node.input)}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = tuple(int(extent) for extent in shapes[node.input[0]])
        array = _weights(*roles[node.output[0]], shape, random)
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), node.output[0]))
        model.graph.input.append(helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, shape))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    for node in kept:
        if node.op_type == "Softmax":
            model.graph.output.append(onnx.ValueInfoProto(name=node.input[0]))
            model.graph.output[-1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model


def _weights(operator: str, place: int, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if operator in ("Conv", "Gemm") and place == 1:
        return random.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
    if operator == "BatchNormalization" and place == 4:
        return random.uniform(0.5, 2, shape)
    if operator in ("BatchNormalization", "Mul", "Unsqueeze") and place in (0, 1):
        return random.uniform(0.5, 1.2, shape)
    return random.normal(0, 0.1, shape)
