"""The nine graphs that the package onnx carries: and the inputs and outputs stored for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
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


def until(model: onnx.ModelProto, last: str) -> onnx.ModelProto:
    """The part of a graph that computes one value, which becomes its only output."""
    graph, needed, kept = model.graph, {last}, list[onnx.NodeProto]()
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed.update(node.input)
    del graph.node[:], graph.output[:]
    graph.node.extend(reversed(kept))
    for values in (graph.initializer, graph.input):
        given = [value for value in values if value.name in needed]
        del values[:]
        values.extend(given)
    graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    return model
