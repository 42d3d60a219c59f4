"""Models of one layer, cut out of a whole one: what ONNX Runtime computes there, and the same with im2win's operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.frontends.onnx.graph import reads_of
from im2win.frontends.onnx.layers import import_onnx
from im2win.frontends.onnxruntime.rewriting import Replaceable

if TYPE_CHECKING:
    from onnx import ModelProto


def layer_model(model: ModelProto, one: Replaceable) -> ModelProto:
    """The nodes that one operator replaces, as a model that reads the layer's input, and what is added, with one kernel call's images."""
    onnx = import_onnx()
    convolution, makers = one.convolution, {name: node for node in model.graph.node for name in node.output}
    conv, kinds = convolution.conv, {name: _code(onnx, dtype) for name, dtype in convolution.conv.dtypes.items()}
    given = {convolution.data: (kinds["data"], one.of_graph(conv.input_shape))}
    if convolution.residual:
        given[convolution.residual] = kinds["residual"], one.of_graph(conv.output_shape)
    wanted, names = set(one.nodes), [convolution.output]
    read: set[str] = set()
    while names:
        name = names.pop()
        if name in given or name in read:
            continue
        read.add(name)
        if (node := makers.get(name)) is not None:
            wanted.add(node.output[0])
            names += reads_of(node)
    nodes = [node for node in model.graph.node if node.output and node.output[0] in wanted]
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
    inputs = [onnx.helper.make_tensor_value_info(name, *of_input) for name, of_input in given.items()]
    output = onnx.helper.make_tensor_value_info(convolution.output, kinds["output"], one.of_graph(conv.output_shape))
    graph = onnx.helper.make_graph(nodes, "layer", inputs, [output], weights)
    cut: ModelProto = onnx.helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    return cut


def _code(onnx: Any, dtype: str) -> int:
    """ONNX's code of an element type."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
