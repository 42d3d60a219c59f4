"""Shape inference that continues where ONNX's own stops: at shapes that the graph itself computes, as PyTorch's exporter writes them.

ONNX's reference implementation computes Shape, Gather, Slice, Concat and arithmetic on a few integers. The results are put into the graph,
and shapes are inferred again.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.frontends.onnx.graph import attributes_of, foldable, subgraphs

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

_KEEPING = ("GroupNormalization",)  # operators whose output has the type and shape of the first input
_FEW = 64  # elements of a tensor that holds a shape or part of one
_SHAPES = 1024  # elements of a tensor that may hold a shape, or what a shape is computed from
_VALUES: tuple[Any, ...] = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")  # fields of a tensor
_ROUNDS = 64
_LARGE = ("ConstantOfShape", "Expand", "Tile", "EyeLike")  # operators whose outputs may be large
Array = np.ndarray[Any, Any]


def infer(onnx: ModuleType, model: ModelProto, *, strict: bool) -> ModelProto:
    """The model with the shapes of its values, as far as they can be inferred.

    Args:
        strict: report errors of single nodes.

    Raises:
        Exception: any error of ONNX's shape inference.
    """
    light, weights = _without_weights(model)
    inferred: ModelProto = onnx.shape_inference.infer_shapes(light, strict_mode=strict, data_prop=True)
    for _ in range(_ROUNDS):
        if not _unknown(inferred):
            break
        if not _keep(inferred):
            if not _compute(onnx, inferred):
                break
            del inferred.graph.value_info[:]
        inferred = onnx.shape_inference.infer_shapes(inferred, strict_mode=strict, data_prop=True)
    for tensor in inferred.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name])
    return inferred


def _without_weights(model: ModelProto) -> tuple[ModelProto, dict[str, TensorProto]]:
    """A copy whose large tensors have types and shapes, but no values, and these tensors: each inference writes out and reads its model."""
    light = type(model)()
    light.CopyFrom(model)
    weights = {one.name: one for one in model.graph.initializer if np.prod(one.dims, dtype=np.int64) > _SHAPES}
    for tensor in light.graph.initializer:
        if tensor.name in weights:
            for field in _VALUES:
                tensor.ClearField(field)
    return light, weights


def _unknown(model: ModelProto) -> bool:
    """Whether some node's output has no complete shape."""
    values = {value.name: value.type.tensor_type for value in (*model.graph.value_info, *model.graph.output)}
    known = {name for name, one in values.items() if one.HasField("shape") and all(dim.dim_value > 0 for dim in one.shape.dim)}
    return any(name and name not in known for node in model.graph.node for name in node.output)


def _keep(model: ModelProto) -> bool:
    """States the outputs of operators that keep their input's type and shape, where ONNX has no rule for them.

    Returns whether there was one.
    """
    values = {value.name: value for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    stated = False
    for node in model.graph.node:
        data = values.get(node.input[0]) if node.op_type in _KEEPING and node.domain in ("", "ai.onnx") else None
        made = values.get(node.output[0])
        if data is not None and data.type.tensor_type.HasField("shape") and not (made and made.type.tensor_type.HasField("shape")):
            target = next((value for value in model.graph.output if value.name == node.output[0]), None)
            target = target or model.graph.value_info.add(name=node.output[0])
            target.type.CopyFrom(data.type)
            values[node.output[0]] = target
            stated = True
    return stated


def _compute(onnx: ModuleType, model: ModelProto) -> bool:
    """Replaces nodes that compute a few numbers from known ones by their values. Returns whether there was such a node."""
    values: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and np.prod(tensor.dims, dtype=np.int64) <= _FEW:
            values[tensor.name] = np.asarray(onnx.numpy_helper.to_array(tensor))
    shapes = {value.name: value.type.tensor_type for value in (*model.graph.input, *model.graph.value_info)}
    left: list[NodeProto] = []
    for node in model.graph.node:
        made = _value(onnx, model, node, values, shapes)
        if made is None:
            left.append(node)
        else:
            values[node.output[0]] = made
            model.graph.initializer.append(onnx.numpy_helper.from_array(made, node.output[0]))
    found = len(left) < len(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(left)
    return found


def _value(onnx: ModuleType, model: ModelProto, node: NodeProto, values: dict[str, Array], shapes: dict[str, Any]) -> Array | None:
    """The only output of a node, if it is small and computed from known values."""
    if node.domain not in ("", "ai.onnx") or len(node.output) != 1 or node.op_type in _LARGE:
        return None
    if node.op_type == "Shape":
        dims = shapes[node.input[0]].shape.dim if node.input[0] in shapes and shapes[node.input[0]].HasField("shape") else []
        sizes = [dim.dim_value for dim in dims]
        stated = attributes_of(node)
        return np.array(sizes[stated.get("start", 0) : stated.get("end")], np.int64) if sizes and min(sizes) > 0 else None
    if not foldable(node) or next(subgraphs(node), None) is not None or not all(name in values for name in node.input if name):
        return None
    from onnx.reference import ReferenceEvaluator

    feeds = {name: values[name] for name in node.input if name}
    inputs = [onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
    graph = onnx.helper.make_graph([node], "value", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    try:
        [result] = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=model.opset_import)).run(None, feeds)
    except Exception:  # reference implementations raise any class; the node stays, and code that needs its value reports it
        return None
    value = np.asarray(result)
    return value if value.size <= _FEW and value.dtype.kind in "iubf" else None
