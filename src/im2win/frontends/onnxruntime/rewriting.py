"""Finds the convolutions of an ONNX graph that another operator can replace, and rewrites the graph with it.

All other nodes are unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from im2win.frontends.models.parts import Convolution, folded
from im2win.frontends.models.source import Array, Source, values_of
from im2win.frontends.onnx.graph import Graph, name_of, reads_of
from im2win.frontends.onnx.layers import Fused, ModelError, Skipped, fusions, import_onnx, set_batch
from im2win.frontends.onnx.pairs import in_pairs
from im2win.frontends.onnx.quantised import DEQUANTIZE, stored_of
from im2win.frontends.onnx.shapes import infer

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# Stands for a symbolic batch while a graph is read, in units of the batch asked for: a size that other dimensions hardly have by chance.
_UNIT = 13
_OWN_WEIGHTS = 4  # the IR version of ONNX from which on initializers need not be inputs


@dataclass(frozen=True)
class Replaceable:
    """A convolution with what is fused with it.

    Attributes:
        convolution: its problem is that of one kernel call; the graph may have any multiple of its images.
        nodes: first outputs of the nodes that it replaces.
        line: whether the graph has a 1-D convolution there, whose tensors lack the problem's one row.
    """

    convolution: Convolution
    nodes: frozenset[str]
    line: bool = False

    def of_graph(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The extents in the graph of a tensor of the problem."""
        return (*shape[:2], *shape[3:]) if self.line else tuple(shape)


@dataclass(frozen=True)
class Replacement:
    """What replaces a convolution: the operator, the attributes of its node, and its packed filters."""

    replaced: Replaceable
    operator: str
    attributes: dict[str, Any]
    filter: Array


def replaceable(model: ModelProto, label: str, batch: int | None) -> tuple[list[Replaceable], list[Skipped]]:
    """The convolutions that a kernel can compute, of float32 or of the integers of a quantised model, in graph order, and the others.

    Those come with the reason. A convolution of integers includes the QuantizeLinear behind it, or is a QLinearConv or ConvInteger.

    Args:
        batch: images of one kernel call where the model's batch is symbolic; 1 if None.

    Raises:
        ModelError: shape inference fails, or the model has another fixed batch.
    """
    onnx = import_onnx()
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    fixed = set_batch(copy.graph, _UNIT * (batch or 1))
    origins = in_pairs(onnx, copy)
    if fixed is not None and batch is not None and batch != fixed:
        raise ModelError(f"`batch` (={batch}) must be left out, or {fixed}: the model's batch is not symbolic.")
    try:
        read = infer(onnx, copy, strict=False)
    except Exception as error:  # ONNX's C++ code and protobuf raise their own classes
        raise ModelError(f"`source` (={label}) must pass ONNX shape inference; it fails: {error}") from error
    graph = Graph(read.graph)
    found, left = fusions(graph, fixed or _UNIT * (batch or 1), products=False)
    known = _values(model.graph)
    taken: list[Replaceable] = []
    for index, one in sorted(found.items()):
        reason = _unfit(graph, graph.nodes[index], one) or _part(graph, index, one, origins, known)
        try:
            if not reason:
                taken.append(_taken(read, graph, index, one, 1 if fixed else _UNIT, origins))
        except ModelError as error:
            reason = str(error)
        if reason:
            left.append((index, Skipped(name_of(graph.nodes[index]), reason)))
    return taken, [entry for _, entry in sorted(left, key=lambda pair: pair[0])]


def _unfit(graph: Graph, node: NodeProto, one: Fused) -> str | None:
    """The reason why no CPU kernel computes a problem; None if one does."""
    if one.conv.dtype != "float32" and one.integers is None:
        return f"its dtype {one.conv.dtype} is not float32"
    constant = all(graph.fixed(name) for name in node.input[1:] if name)
    return None if constant else "its filters or its bias are no constants"


def _values(graph: GraphProto) -> set[str]:
    """Names of the values of a graph."""
    return {one.name for one in (*graph.input, *graph.initializer)} | {name for node in graph.node for name in node.output}


def _part(graph: Graph, index: int, one: Fused, origins: Mapping[str, str], known: set[str]) -> str | None:
    """Why a convolution is only a part of the model's nodes, which were written as several each; None if it is whole ones."""
    inner = any(name not in known for name in (one.data, _residual(one), one.tail.output) if name)
    if inner and one.integers is None:
        return "im2win cannot compute it with its integers"
    taken = {index, *one.tail.nodes, *one.ahead}
    whole = {origins.get(graph.nodes[place].output[0]) for place in taken}
    left = [node for place, node in enumerate(graph.nodes) if place not in taken and node.op_type != DEQUANTIZE and node.output]
    if inner or any(origins.get(node.output[0]) in whole for node in left):
        return "its zero points, or its output's scale, are no constants that a kernel can have"
    return None


def _residual(one: Fused) -> str | None:
    return (one.integers.residual if one.integers is not None else None) or one.tail.residual


def _taken(model: ModelProto, graph: Graph, index: int, one: Fused, unit: int, origins: Mapping[str, str]) -> Replaceable:
    node, line = graph.nodes[index], len(graph.shapes.get(one.data) or ()) == 3
    if one.integers is None:
        behind = [graph.nodes[place] for place in one.tail.scalings]
        values = values_of(model, graph, [name for each in (node, *behind) for name in each.input if graph.fixed(name)])
    else:
        values = values_of(model, graph, stored_of(graph, one.integers))
        graph = Graph(model.graph, values)
    convolution = folded(Source(graph, values, (), (), 0), node, one)
    if convolution.conv.batch % unit == 0:
        convolution = replace(convolution, conv=convolution.conv.with_(batch=convolution.conv.batch // unit))
    nodes = (index, *one.tail.nodes, *one.ahead)
    made = (graph.nodes[place].output[0] for place in nodes)
    return Replaceable(convolution, frozenset(origins.get(name, name) for name in made), line)


# --- the graph that is written


def rewrite(model: ModelProto, replacements: Sequence[Replacement], domain: str) -> None:
    """Replaces each convolution, with what is fused with it, by one node.

    Its inputs are X, W, B, Z (the residual) and S (the scales), its output is Y.

    Weights without readers are removed.

    Args:
        model: changed in place.
        domain: of the new nodes.
    """
    onnx = import_onnx()
    graph = model.graph
    shapes = {value.name: value for value in onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info}
    nodes: list[NodeProto | None] = list(graph.node)
    places = {node.output[0]: index for index, node in enumerate(graph.node) if node.output}
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | {tensor.name for tensor in graph.initializer}
    unread: list[str] = []
    for one in replacements:
        indices = sorted(places[name] for name in one.replaced.nodes)
        for index in indices:
            unread += graph.node[index].input
            nodes[index] = None
        nodes[indices[-1]] = _node(onnx, graph, one, domain, taken)
    _put(graph, [node for node in nodes if node is not None], unread, old=model.ir_version < _OWN_WEIGHTS)
    written = {name for node in graph.node for name in node.output}
    _keep(graph.value_info, lambda value: value.name in written)
    stated = {value.name for value in (*graph.value_info, *graph.output)}
    made = [one.replaced.convolution.output for one in replacements]
    graph.value_info.extend(shapes[name] for name in made if name in shapes and name not in stated)
    model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    model.ir_version = max(model.ir_version, _OWN_WEIGHTS)


def _node(onnx: Any, graph: GraphProto, one: Replacement, domain: str, taken: set[str]) -> NodeProto:
    convolution = one.replaced.convolution

    def constant(kind: str, array: Array) -> str:
        name = f"{convolution.output}/{kind}"
        while name in taken:
            name += "_"
        taken.add(name)
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name

    inputs = [convolution.data, constant("filter", one.filter)]
    inputs.append("" if convolution.bias is None else constant("bias", convolution.bias))
    inputs.append(convolution.residual or "")
    inputs.append("" if convolution.scale is None else constant("scale", convolution.scale))
    while not inputs[-1]:
        inputs.pop()
    made: NodeProto = onnx.helper.make_node(one.operator, inputs, [convolution.output], convolution.name, domain=domain, **one.attributes)
    return made


def _put(graph: GraphProto, nodes: list[NodeProto], names: list[str], old: bool) -> None:
    """Inserts `nodes` into the graph. Removes nodes that only compute some of `names` without a reader, and weights without a reader.

    Args:
        old: remove weights from the graph's inputs, where old versions of the format list them: a caller could override them in every run.
    """
    reads = Counter(name for node in nodes for name in reads_of(node))
    reads.update(value.name for value in graph.output)
    makers = {name: node for node in nodes for name in node.output}
    weights = {tensor.name for tensor in graph.initializer}
    dropped: set[str] = set()
    while names:
        name = names.pop()
        if not name or reads[name] or name in dropped:
            continue
        dropped.add(name)
        node = makers.get(name)
        if node is not None and not any(reads[other] for other in node.output):
            inputs = list(reads_of(node))
            reads.subtract(inputs)
            names += inputs
            nodes = [other for other in nodes if other is not node]
            dropped.update(node.output)
    kept = [_copied(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    _keep(graph.initializer, lambda tensor: tensor.name not in dropped)
    _keep(graph.input, lambda value: value.name not in weights or not (old or value.name in dropped))


def _copied(node: NodeProto) -> NodeProto:
    copy = type(node)()
    copy.CopyFrom(node)
    return copy


def _keep(field: Any, wanted: Callable[[Any], bool]) -> None:
    """Removes the elements of a repeated field that are not wanted."""
    for index in reversed(range(len(field))):
        if not wanted(field[index]):
            del field[index]
