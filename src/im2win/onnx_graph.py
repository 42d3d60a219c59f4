"""A view of an ONNX graph: the shape of every value, who reads it, and what can be fused behind a convolution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

Shape = tuple[int | str, ...]  # a symbolic dimension is its name, or "?" where it has none

_OUTPUT = -1  # index of the reader that stands for the model's output


def name_of(node: NodeProto) -> str:
    """The node's name, or where it has none that of its first output."""
    return node.name or next(iter(node.output), node.op_type)


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The attributes that the node states, as Python values (strings are bytes)."""
    from onnx.helper import get_attribute_value

    return {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Bodies of an If, Loop or Scan."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _reads(node: NodeProto) -> Iterator[str]:
    """Values that the node reads, those its subgraphs capture included (and their own, which do no harm)."""
    yield from node.input
    for graph in subgraphs(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from _reads(inner)


class Graph:
    """Types, shapes, constants and readers of the values of a graph that went through shape inference."""

    def __init__(self, graph: GraphProto) -> None:
        self.nodes: list[NodeProto] = list(graph.node)
        self.types: dict[str, int] = {}  # TensorProto.DataType
        self.shapes: dict[str, Shape] = {}
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            self.types[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                # Some exporters write 0 or -1 for a dimension that they do not know.
                self.shapes[value.name] = tuple(dim.dim_value if dim.dim_value > 0 else dim.dim_param or "?" for dim in tensor.shape.dim)
        self._constants: dict[str, TensorProto | float | None] = {}
        for initializer in graph.initializer:
            self.types[initializer.name] = initializer.data_type
            self.shapes[initializer.name] = tuple(initializer.dims)
            self._constants[initializer.name] = initializer
        self._readers: dict[str, list[int]] = {value.name: [_OUTPUT] for value in graph.output}
        for index, node in enumerate(self.nodes):
            for name in _reads(node):
                self._readers.setdefault(name, []).append(index)
            if node.op_type == "Constant":
                stated = attributes_of(node)
                self._constants[node.output[0]] = stated.get("value", stated.get("value_float"))

    def scalar(self, name: str) -> float | None:
        """The value of a floating-point constant of one element; None for anything else."""
        from onnx import TensorProto, numpy_helper

        value = self._constants.get(name)
        if not isinstance(value, TensorProto):
            return value
        stored = value.data_location != TensorProto.EXTERNAL and value.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)
        return float(numpy_helper.to_array(value).item()) if stored and math.prod(value.dims) == 1 else None

    def readers(self, value: str) -> list[tuple[int, NodeProto]]:
        """The nodes that read `value`, with their indices, once for each time; none where the model's output reads it too."""
        indices = self._readers.get(value, [])
        return [] if _OUTPUT in indices else [(index, self.nodes[index]) for index in indices]


# --- what can be fused -------------------------------------------------------------------------------------------


def epilogue(graph: Graph, value: str, claimed: set[int]) -> dict[str, Any]:
    """The `Conv2d` fields that the nodes behind a convolution's output `value` can become.

    A BatchNormalization is a bias (its scale goes into the filter), an addition before an activation is the residual. `claimed` holds
    indices of additions that another convolution fused; the one fused here joins it.
    """
    fields: dict[str, Any] = {}
    readers = graph.readers(value)
    if len(readers) == 1 and _folds(readers[0][1], value):
        fields["bias"] = True
        value = readers[0][1].output[0]
        readers = graph.readers(value)
    if len(readers) == 1 and readers[0][0] not in claimed and _adds(graph, readers[0][1]):
        index, addition = readers[0]
        if (activation := _activation(graph, addition.output[0])) != "none":
            claimed.add(index)
            return {**fields, "residual": True, "activation": activation}
    return {**fields, "activation": _activation(graph, value)}


def _folds(node: NodeProto, value: str) -> bool:
    """Whether it normalises `value` by each channel's fixed statistics; old operator sets mark training by more outputs."""
    if node.op_type != "BatchNormalization" or node.input[0] != value or len(list(filter(None, node.output))) > 1:
        return False
    attributes = attributes_of(node)
    return not attributes.get("training_mode", 0) and bool(attributes.get("spatial", 1))


def _adds(graph: Graph, node: NodeProto) -> bool:
    """Whether it adds two tensors of one shape (Caffe2 exports Sum for Add)."""
    if node.op_type not in ("Add", "Sum") or len(node.input) != 2:
        return False
    first, second = (graph.shapes.get(name) for name in node.input)
    return first is not None and first == second and "?" not in first[1:]


def _activation(graph: Graph, value: str) -> str:
    """The activation that hides `value` from all other nodes, in the words of `Conv2d`."""
    nodes = [node for _, node in graph.readers(value)]
    if len(nodes) == 1:
        return _single(graph, nodes[0])
    if len(nodes) == 2:
        sigmoid, product = sorted(nodes, key=lambda node: node.op_type != "Sigmoid")
        gated = sigmoid.op_type == "Sigmoid" and product.op_type == "Mul" and set(product.input) == {value, sigmoid.output[0]}
        if gated and len(graph.readers(sigmoid.output[0])) == 1:
            return "silu"
    return "none"


def _single(graph: Graph, node: NodeProto) -> str:
    if node.op_type == "Relu":
        return "relu"
    attributes = attributes_of(node)
    if node.op_type == "Swish" and attributes.get("alpha", 1.0) == 1.0:
        return "silu"
    if node.op_type == "Clip":  # its bounds are attributes up to operator set 10, inputs since
        inputs = [graph.scalar(name) for name in node.input[1:]]
        bounds = inputs or [attributes.get("min"), attributes.get("max")]
        return "relu6" if bounds == [0.0, 6.0] else "none"
    return "none"
