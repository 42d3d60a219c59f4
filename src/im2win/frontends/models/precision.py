"""Selects the precision of a compiled model: its own, or float16 or bfloat16 for a float32 model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from im2win.frontends.models.source import Source
from im2win.frontends.onnx.graph import Graph, subgraphs
from im2win.frontends.onnx.layers import import_onnx
from im2win.frontends.onnx.shapes import infer
from im2win.spec.dtypes import ELEMENT_TYPES

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

Precision = Literal["float32", "float16", "bfloat16"]
NARROW = tuple(row.name for row in ELEMENT_TYPES.values() if row.narrow and row.onnx)
"""The precisions in which tensors are rounded between layers; see `tensor_layouts.NarrowLayouts`."""
_FLOAT, _CODES = 1, {10: "float16", 16: "bfloat16"}  # of onnx.TensorProto


def chosen(model: ModelProto, dtype: str | None) -> Precision:
    """The precision to compile a model in; `dtype` None asks for the model's own.

    Raises:
        ValueError: an unknown precision, or another one than a float16 or bfloat16 model's own.
    """
    if dtype not in (None, *get_args(Precision)):
        raise ValueError(f"`dtype` (={dtype!r}) must be {', '.join(get_args(Precision))}, or left out for the model's own.")
    own = _own(model.graph)
    if own != "float32" and dtype not in (None, own):
        raise ValueError(f"`dtype` (={dtype!r}) must be {own} or left out: the model's weights are {own}.")
    return cast(Precision, dtype or own)


def _own(graph: GraphProto) -> str:
    """The narrow type that all constant filters of convolutions and matrices of products have; float32 if there is none."""
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in (one for one in graph.node if one.op_type == "Constant"):
        types |= dict.fromkeys(node.output, next((one.t.data_type for one in node.attribute if one.HasField("t")), 0))
    found = {types[node.input[1]] for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in types}
    floats = found & {_FLOAT, *_CODES}
    return _CODES.get(floats.pop(), "float32") if len(floats) == 1 else "float32"


def widened(model: ModelProto) -> tuple[ModelProto, dict[str, str]]:
    """A float16 or bfloat16 model converted to float32 with the same values, and the types of its inputs and outputs that were narrow.

    Its kernels sum in float32 and round what they write; see `tensor_layouts`.
    """
    onnx = import_onnx()
    copy: ModelProto = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    types = Graph(infer(onnx, model, strict=False).graph).types
    stated = {value.name: _CODES.get(value.type.tensor_type.elem_type) for value in (*graph.input, *graph.output)}
    ports = {name: dtype for name, dtype in stated.items() if dtype is not None}
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in _CODES:
            value.type.tensor_type.elem_type = _FLOAT
    for tensor in graph.initializer:
        _widen(onnx, tensor)
    for node in graph.node:
        _widen_node(onnx, node, types)
    return copy, ports


def _widen_node(onnx: Any, node: NodeProto, types: dict[str, int]) -> None:
    if any(True for _ in subgraphs(node)):
        return  # control flow is an error later
    if node.op_type == "Cast":
        [to] = [one for one in node.attribute if one.name == "to"]
        if {to.i, types.get(node.input[0])} <= {_FLOAT, *_CODES}:
            node.op_type = "Identity"
            del node.attribute[:]
            return
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype") and attribute.i in _CODES:
            attribute.i = _FLOAT
        if attribute.HasField("t"):
            _widen(onnx, attribute.t)


def _widen(onnx: Any, tensor: Any) -> None:
    if tensor.data_type in _CODES:
        array = onnx.numpy_helper.to_array(tensor).astype("float32")
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def with_ports(source: Source, ports: Mapping[str, str]) -> Source:
    """The source of a widened model whose inputs and outputs have their original types again."""

    def own(one: Any) -> Any:
        return replace(one, dtype=ports.get(one.name, one.dtype))

    return replace(source, inputs=tuple(map(own, source.inputs)), outputs=tuple(map(own, source.outputs)))
