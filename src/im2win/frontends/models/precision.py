"""Selects the precision of a compiled model: its own, or float16 for a float32 model on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from im2win.device.gpu import Gpu
from im2win.frontends.models.source import Source
from im2win.frontends.models.tensor_layouts import HALF
from im2win.frontends.onnx.graph import Graph, subgraphs
from im2win.frontends.onnx.layers import import_onnx
from im2win.frontends.onnx.shapes import infer
from im2win.registry.backends import Device

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

Precision = Literal["float32", "float16"]
_FLOAT, _HALF = 1, 10  # of onnx.TensorProto


def chosen(model: ModelProto, device: Device, dtype: str | None) -> Precision:
    """The precision to compile a model in; `dtype` None asks for the model's own.

    On a CPU it is float32, where TVM compiles float16 convolutions of a model.

    Raises:
        ValueError: an unknown precision, or one that this model and device do not support.
    """
    if dtype not in (None, "float32", HALF):
        raise ValueError(f"`dtype` (={dtype!r}) must be float32, float16, or left out for the model's own.")
    own = HALF if _is_half(model.graph) else "float32"
    if dtype == HALF and not isinstance(device, Gpu):
        raise ValueError("`dtype` (='float16') must be float32 or left out on a CPU, whose kernels compute in float32.")
    if dtype == "float32" and own == HALF:
        raise ValueError("`dtype` (='float32') must be float16 or left out: the model's weights are float16.")
    return "float16" if isinstance(device, Gpu) and HALF in (dtype, own) else "float32"


def _is_half(graph: GraphProto) -> bool:
    """Whether all constant filters of convolutions and matrices of products are float16."""
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in (one for one in graph.node if one.op_type == "Constant"):
        types |= dict.fromkeys(node.output, next((one.t.data_type for one in node.attribute if one.HasField("t")), 0))
    found = [types[node.input[1]] for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in types]
    return _HALF in found and _FLOAT not in found


def widened(model: ModelProto) -> tuple[ModelProto, frozenset[str]]:
    """A float16 model converted to float32 with the same values, and the names of the inputs and outputs that were float16.

    Its kernels sum in float32 and round what they write; see `layouts`.
    """
    onnx = import_onnx()
    copy: ModelProto = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    types = Graph(infer(onnx, model, strict=False).graph).types
    ports = frozenset(value.name for value in (*graph.input, *graph.output) if value.type.tensor_type.elem_type == _HALF)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == _HALF:
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
        if to.i in (_FLOAT, _HALF) and types.get(node.input[0]) in (_FLOAT, _HALF):
            node.op_type = "Identity"
            del node.attribute[:]
            return
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype") and attribute.i == _HALF:
            attribute.i = _FLOAT
        if attribute.HasField("t"):
            _widen(onnx, attribute.t)


def _widen(onnx: Any, tensor: Any) -> None:
    if tensor.data_type == _HALF:
        array = onnx.numpy_helper.to_array(tensor).astype("float32")
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def with_ports(source: Source, halves: frozenset[str]) -> Source:
    """The source of a widened model whose inputs and outputs have their original types again."""

    def own(one: Any) -> Any:
        return replace(one, dtype=HALF) if one.name in halves else one

    return replace(source, inputs=tuple(map(own, source.inputs)), outputs=tuple(map(own, source.outputs)))
