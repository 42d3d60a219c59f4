"""Moves QuantizeLinear in front of operators that only move or compare elements, so that these move integers of 8 bits.

With D for DequantizeLinear and Q for QuantizeLinear, Q(Concat(D(a), D(b))) is Concat(Q(D(a)), Q(D(b))), and since Q never decreases,
Q(MaxPool(D(a))) is MaxPool(Q(D(a))). Where D and Q have the same scale and zero, Q(D(a)) is a itself.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.frontends.onnx.graph import reads_of, subgraphs
from im2win.frontends.onnx.quantised import DEQUANTIZE, DOMAINS, QUANTIZE

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_MOVING = ("Concat", "DepthToSpace", "Flatten", "MaxPool", "Reshape", "Slice", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze")
_LEAST_OPSET = 13  # of which all of these take integers of 8 bits
_BYTES = ("uint8", "int8")
Steps = tuple[float, int, str]


def integers_moved(onnx: ModuleType, model: ModelProto) -> None:
    """Rewrites a model, in place, until no QuantizeLinear with one constant scale follows such an operator."""
    opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 1)
    if opset < _LEAST_OPSET or any(True for node in model.graph.node for _ in subgraphs(node)):
        return
    while _moved(onnx, model):
        pass


def _moved(onnx: ModuleType, model: ModelProto) -> bool:
    """Moves all that can be moved by one operator. Returns whether there was any."""
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    readers = Counter(name for node in graph.node for name in reads_of(node))
    readers.update(value.name for value in graph.output)
    dropped: set[int] = set()
    before: dict[int, list[NodeProto]] = {}
    for last in graph.node:
        node = makers.get(last.input[0]) if _is(last, QUANTIZE) else None
        if node is None or node.op_type not in _MOVING or node.domain not in ("", "ai.onnx") or len(list(filter(None, node.output))) != 1:
            continue
        out, moved = _steps(onnx, weights, last), range(len(node.input) if node.op_type == "Concat" else 1)
        makers_of = [makers.get(node.input[place]) for place in moved]
        given = [_steps(onnx, weights, one) if one is not None and _is(one, DEQUANTIZE) else None for one in makers_of]
        if out is None or readers[node.output[0]] != 1 or id(node) in before or not all(given):
            continue
        added: dict[str, NodeProto] = {}
        for place, one, steps in zip(moved, makers_of, given, strict=True):
            assert one is not None
            if steps == out:
                node.input[place] = one.input[0]
                continue
            real, name = one.output[0], f"{last.output[0]}/moved{place}"
            if real not in added:
                added[real] = onnx.helper.make_node(QUANTIZE, [real, *last.input[1:]], [name], name=name, domain=last.domain)
            node.input[place] = added[real].output[0]
        before[id(node)] = list(added.values())
        dropped.add(id(last))
        node.output[0] = last.output[0]
    if not before:
        return False
    nodes = [one for node in graph.node if id(node) not in dropped for one in (*before.get(id(node), ()), node)]
    copies = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    del graph.node[:]
    graph.node.extend(copies)
    written = {name for node in graph.node for name in node.output}
    kept = [value for value in graph.value_info if value.name in written]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    return True


def _is(node: NodeProto, operator: str) -> bool:
    return node.op_type == operator and node.domain in DOMAINS


def _steps(onnx: ModuleType, weights: dict[str, Any], node: NodeProto) -> Steps | None:
    """The one constant scale and zero of a QuantizeLinear or DequantizeLinear of 8 bits, with the type; None for any other."""
    scale, zero = (weights.get(name) for name in (*node.input[1:3], "", "")[:2])
    if scale is None or zero is None:
        return None
    step, offset = (np.asarray(onnx.numpy_helper.to_array(one)) for one in (scale, zero))
    if step.size != 1 or offset.size != 1 or step.dtype != np.float32 or str(offset.dtype) not in _BYTES:
        return None
    return float(step.item()), int(offset.item()), str(offset.dtype)
