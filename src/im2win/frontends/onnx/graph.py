"""A view of an ONNX graph: the shape of every value, who reads it, and what can be fused behind a convolution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

Shape = tuple[int | str, ...]  # a symbolic dimension is its name, or "?" where it has none

_RANDOM = ("Random", "Bernoulli", "Multinomial")

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


def reads_of(node: NodeProto) -> Iterator[str]:
    """Values that the node reads, those its subgraphs capture included (and their own, which do no harm)."""
    yield from node.input
    for graph in subgraphs(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from reads_of(inner)


def foldable(node: NodeProto) -> bool:
    """Whether the node's outputs follow from its inputs and attributes alone."""
    return not node.op_type.startswith(_RANDOM) and node.op_type != "Dropout" and next(subgraphs(node), None) is None


class Graph:
    """Types, shapes, constants and readers of the values of a graph that went through shape inference.

    Args:
        fixed: values that are known to be the same in every run, beside those that the graph says.
    """

    def __init__(self, graph: GraphProto, fixed: Iterable[str] = ()) -> None:
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
            for name in reads_of(node):
                self._readers.setdefault(name, []).append(index)
            if node.op_type == "Constant":
                stated = attributes_of(node)
                self._constants[node.output[0]] = stated.get("value", stated.get("value_float"))
        self._makers = {name: index for index, node in enumerate(self.nodes) for name in node.output}
        self._fixed = {*fixed, *(initializer.name for initializer in graph.initializer)}
        for node in self.nodes:
            if foldable(node) and all(name in self._fixed for name in node.input if name):
                self._fixed.update(node.output)

    def fixed(self, name: str) -> bool:
        """Whether a value is the same in every run: a constant, or computed of constants alone."""
        return name in self._fixed

    def hands_on(self, node: NodeProto) -> bool:
        """Whether the node does nothing to its input: Identity, and Dropout whose mask nobody reads."""
        if node.op_type not in ("Identity", "Dropout") or any(node.input[2:]):  # Dropout's third input may say that it trains
            return False
        return not any(self._readers.get(name) for name in node.output[1:] if name)

    def scalar(self, name: str) -> float | None:
        """The value of a floating-point constant of one element; None for anything else."""
        from onnx import TensorProto, numpy_helper

        value = self._constants.get(name)
        if not isinstance(value, TensorProto):
            return value
        stored = value.data_location != TensorProto.EXTERNAL and value.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)
        return float(numpy_helper.to_array(value).item()) if stored and math.prod(value.dims) == 1 else None

    def integers(self, name: str) -> list[int] | None:
        """The values of a constant of integers; None for anything else."""
        from onnx import TensorProto, numpy_helper

        value = self._constants.get(name)
        if not isinstance(value, TensorProto) or value.data_location == TensorProto.EXTERNAL or value.data_type != TensorProto.INT64:
            return None
        return [int(one) for one in numpy_helper.to_array(value).reshape(-1)]

    def maker(self, value: str) -> tuple[int, NodeProto] | None:
        """The node that computes `value`, with its index; None for inputs and weights."""
        index = self._makers.get(value)
        return None if index is None else (index, self.nodes[index])

    def readers(self, value: str) -> list[tuple[int, NodeProto]]:
        """The nodes that read `value`, with their indices, once for each time; none where the model's output reads it too."""
        indices = self._readers.get(value, [])
        return [] if _OUTPUT in indices else [(index, self.nodes[index]) for index in indices]


# --- what can be fused -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tail:
    """The nodes that a convolution or a product takes over.

    fields: the `Conv2d` fields that they become.
    scalings: indices of the nodes that fold into filters and bias, in their order: BatchNormalization, and Mul, Div, Add and Sub with a
        constant of one value, or one a channel.
    residual: the value that is added, if one is.
    nodes: indices of all of them.
    output: the value that is then computed.
    """

    fields: dict[str, Any]
    scalings: tuple[int, ...]
    residual: str | None
    nodes: frozenset[int]
    output: str


def tail(graph: Graph, value: str, claimed: set[int], axis: int = 1) -> Tail:
    """What can be fused behind `value`, the output of a convolution or product, each node only where nothing else reads what is before it.

    Scalings come first, then the addition of a tensor of the same shape (the residual), then an activation. `claimed` holds indices of
    additions that another convolution fused; the one fused here joins it. `axis` is that of the channels.
    """
    fields: dict[str, Any] = {}
    scalings: list[int] = []
    residual: str | None = None
    nodes: list[int] = []
    while (found := _only_reader(graph, value)) is not None:
        index, node = found
        if graph.hands_on(node):
            nodes.append(index)
        elif scales(graph, node, value, axis):
            scalings.append(index)
            if node.op_type in ("BatchNormalization", "Add", "Sub"):
                fields["bias"] = True
        else:
            break
        value = node.output[0]
    found = _only_reader(graph, value)
    if found is not None and found[0] not in claimed and _adds(graph, found[1]):
        index, node = found
        claimed.add(index)
        nodes.append(index)
        fields["residual"] = True
        residual = node.input[1] if node.input[0] == value else node.input[0]
        value = node.output[0]
    activation, fused, value = _activation(graph, value)
    return Tail({**fields, "activation": activation}, tuple(scalings), residual, frozenset((*scalings, *nodes, *fused)), value)


def padding_before(graph: Graph, value: str) -> tuple[int, str, tuple[int, int, int, int]] | None:
    """The Pad node that makes `value` by zeros round each image, for one reader alone: its index, its input, and what it adds.

    Returns:
        None if there is none; else the padding as (top, left, bottom, right).
    """
    found = graph.maker(value)
    if found is None or found[1].op_type != "Pad" or len(graph.readers(value)) != 1:
        return None
    index, node = found
    attributes = attributes_of(node)
    inputs = [*node.input, "", "", ""]
    pads = attributes.get("pads") or graph.integers(inputs[1])
    filled = attributes.get("value", 0.0) if not inputs[2] else graph.scalar(inputs[2])
    if attributes.get("mode", b"constant") != b"constant" or filled != 0.0 or inputs[3] or pads is None or len(pads) != 8:
        return None
    if min(pads) < 0 or any((*pads[:2], *pads[4:6])):
        return None
    return index, node.input[0], (pads[2], pads[3], pads[6], pads[7])


def _only_reader(graph: Graph, value: str) -> tuple[int, NodeProto] | None:
    readers = graph.readers(value)
    return readers[0] if len(readers) == 1 else None


def scales(graph: Graph, node: NodeProto, value: str, axis: int = 1) -> bool:
    """Whether the node computes value * constant + constant for each channel."""
    if node.op_type == "BatchNormalization":
        return axis == 1 and _normalises(graph, node, value)
    if node.op_type not in ("Mul", "Div", "Add", "Sub") or len(node.input) != 2:
        return False
    ours = 0 if node.input[0] == value else 1
    constant, shape = graph.shapes.get(node.input[1 - ours]), graph.shapes.get(value)
    if (ours == 1 and node.op_type in ("Div", "Sub")) or not graph.fixed(node.input[1 - ours]) or constant is None or shape is None:
        return False
    if len(constant) > len(shape):
        return False
    channels = len(shape) - axis if axis > 0 else -axis  # place of the channels, counted from the end
    return all(size == 1 or (place == channels and size == shape[axis]) for place, size in enumerate(reversed(constant), 1))


def _normalises(graph: Graph, node: NodeProto, value: str) -> bool:
    """Whether it normalises `value` by each channel's fixed statistics; old operator sets mark training by more outputs."""
    if node.input[0] != value or len(list(filter(None, node.output))) > 1:
        return False
    attributes = attributes_of(node)
    fixed = all(graph.fixed(name) for name in node.input[1:])
    return fixed and not attributes.get("training_mode", 0) and bool(attributes.get("spatial", 1))


def _adds(graph: Graph, node: NodeProto) -> bool:
    """Whether it adds two tensors of one shape (Caffe2 exports Sum for Add)."""
    if node.op_type not in ("Add", "Sum") or len(node.input) != 2:
        return False
    first, second = (graph.shapes.get(name) for name in node.input)
    return first is not None and first == second and "?" not in first[1:]


def _activation(graph: Graph, value: str) -> tuple[str, list[int], str]:
    """The activation that hides `value` from all other nodes, in the words of `Conv2d`, the nodes it takes, and their output."""
    readers = graph.readers(value)
    if len(readers) == 1:
        index, node = readers[0]
        word = _single(graph, node)
        return (word, [index], node.output[0]) if word != "none" else ("none", [], value)
    if len(readers) == 2:
        (first, sigmoid), (second, product) = sorted(readers, key=lambda reader: reader[1].op_type != "Sigmoid")
        gated = sigmoid.op_type == "Sigmoid" and product.op_type == "Mul" and set(product.input) == {value, sigmoid.output[0]}
        if gated and len(graph.readers(sigmoid.output[0])) == 1:
            return "silu", [first, second], product.output[0]
    return "none", [], value


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
