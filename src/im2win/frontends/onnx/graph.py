"""A view of an ONNX graph: the shape, constant value and readers of every value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from im2win.spec.dtypes import ELEMENT_TYPES

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

Shape = tuple[int | str, ...]  # a symbolic dimension is its name, or "?" where it has none

_RANDOM = ("Random", "Bernoulli", "Multinomial")

_OUTPUT = -1  # index of the reader that stands for the model's output


def name_of(node: NodeProto) -> str:
    """The node's name, or the name of its first output if it has none."""
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
    """Values that the node reads, including those that its subgraphs capture (and their own, which has no effect)."""
    yield from node.input
    for graph in subgraphs(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from reads_of(inner)


def foldable(node: NodeProto) -> bool:
    """Whether the node's outputs depend on its inputs and attributes alone."""
    return not node.op_type.startswith(_RANDOM) and node.op_type != "Dropout" and next(subgraphs(node), None) is None


class Graph:
    """Types, shapes, constants and readers of the values of a graph after shape inference.

    Args:
        fixed: further values that are known to be the same in every run; a mapping gives the values themselves, too.
    """

    def __init__(self, graph: GraphProto, fixed: Iterable[str] = ()) -> None:
        self._known: Mapping[str, npt.NDArray[Any]] = fixed if isinstance(fixed, Mapping) else {}
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
        """Whether a value is the same in every run: a constant, or computed from constants alone."""
        return name in self._fixed

    def hands_on(self, node: NodeProto) -> bool:
        """Whether the node passes its input on: Identity, and Dropout without a reader of its mask."""
        if node.op_type not in ("Identity", "Dropout") or any(node.input[2:]):  # Dropout's third input may enable training mode
            return False
        return not any(self._readers.get(name) for name in node.output[1:] if name)

    def scalar(self, name: str) -> float | None:
        """The value of a floating-point constant of one element; None for any other value."""
        from onnx import TensorProto, numpy_helper

        value = self._constants.get(name)
        if not isinstance(value, TensorProto):
            return value
        floats = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
        stored = value.data_location != TensorProto.EXTERNAL and value.data_type in floats
        return float(numpy_helper.to_array(value).item()) if stored and math.prod(value.dims) == 1 else None

    def single(self, name: str, value: str) -> float | None:
        """The constant `name` as in `scalar`, if it has no more dimensions than `value`."""
        constant, shape = self.shapes.get(name, ()), self.shapes.get(value)
        return self.scalar(name) if shape is not None and len(constant) <= len(shape) else None

    def dtype(self, name: str) -> str:
        """The element type of a value, as `im2win.spec.dtypes` names it; float32 where it is unknown or none of these."""
        from onnx import TensorProto

        known = TensorProto.DataType.Name(self.types.get(name, TensorProto.FLOAT))
        return next((row.name for row in ELEMENT_TYPES.values() if row.onnx == known), "float32")

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """The value of a constant; None if it is none, or computed, or lies in another file."""
        from onnx import TensorProto, numpy_helper

        if name in self._known:
            return self._known[name]
        value = self._constants.get(name)
        if isinstance(value, float):
            return np.array(value, np.float32)
        if not isinstance(value, TensorProto) or value.data_location == TensorProto.EXTERNAL:
            return None
        return np.asarray(numpy_helper.to_array(value))

    def integers(self, name: str) -> list[int] | None:
        """The values of an integer constant; None for any other value."""
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
        """The nodes that read `value`, with their indices, once for each use; none where the model's output reads it too."""
        indices = self._readers.get(value, [])
        return [] if _OUTPUT in indices else [(index, self.nodes[index]) for index in indices]


# --- what can be fused -------------------------------------------------------------------------------------------
