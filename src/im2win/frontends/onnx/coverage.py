"""Lists every convolution and product of an ONNX graph: who computes it, its arithmetic, and what is fused with it and what is not."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from im2win.frontends.onnx.graph import Graph, name_of
from im2win.frontends.onnx.layers import Fused, fusions, import_onnx, set_batch
from im2win.frontends.onnx.pairs import in_pairs
from im2win.frontends.onnx.problems import nested
from im2win.frontends.onnx.shapes import infer

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_PRODUCTS = ("Gemm", "MatMul")
_FILTERS_AT = {"QLinearConv": 3}  # index of the input; 1 for other operators


@dataclass(frozen=True)
class Covered:
    """A convolution of any kind, or a product.

    Attributes:
        name: of its node.
        operator: of ONNX.
        ours: whether an im2win kernel computes it.
        flops: of its products and sums, at the batch in question; None where its shapes are unknown.
        fused: operators that its kernel computes too, in graph order; () if it is not im2win's.
        unfused: why nothing more is fused; "" if a convolution or product follows, or if it is not im2win's.
    """

    name: str
    operator: str
    ours: bool
    flops: int | None
    fused: tuple[str, ...] = ()
    unfused: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {**asdict(self), "fused": list(self.fused)}


def share_left(operators: Sequence[Covered]) -> float | None:
    """The share of the flops of convolutions and products that is not im2win's, from 0 to 1; None where some are unknown or all are 0."""
    known = [one.flops for one in operators if one.flops is not None]
    if len(known) < len(operators) or not sum(known):
        return None
    return sum(one.flops or 0 for one in operators if not one.ours) / sum(known)


def coverage(model: ModelProto, batch: int | None, ours: Collection[str], *, products: bool) -> tuple[Covered, ...]:
    """Every convolution and product of the main graph, in its order, and the convolutions of its subgraphs at the nodes that hold them.

    Those that are computed from constants alone are left out. The arithmetic of subgraphs is not known.

    Args:
        model: not changed.
        batch: images where the model's batch is symbolic; 1 if None.
        ours: names of the nodes that im2win computes.
        products: whether im2win may compute products; decides which convolution an addition is fused with.
    """
    onnx = import_onnx()
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    fixed = set_batch(copy.graph, batch)
    stated = {name_of(node): node.op_type for node in model.graph.node}  # a QLinearConv stays one in the list
    in_pairs(onnx, copy)
    graph = Graph(infer(onnx, copy, strict=False).graph)
    found, _ = fusions(graph, fixed or batch or 1, products=products)
    found = {index: one for index, one in found.items() if name_of(graph.nodes[index]) in ours}
    owners = {place: name_of(graph.nodes[index]) for index, one in found.items() for place in (*one.ahead, *one.tail.nodes)}
    listed: list[Covered] = []
    for index, node in enumerate(graph.nodes):
        listed += [Covered(name_of(inner), inner.op_type, False, None) for inner, _ in nested(node)]
        if not _listed(node) or all(graph.fixed(name) for name in node.output if name):
            continue
        name, flops = name_of(node), _flops(graph, node)
        operator = stated.get(name, node.op_type)
        if (one := found.get(index)) is None:
            listed.append(Covered(name, operator, False, flops))
        else:
            fused = tuple(graph.nodes[place].op_type for place in sorted((*one.ahead, *one.tail.nodes)))
            listed.append(Covered(name, operator, True, flops, fused, _unfused(graph, one, owners)))
    return tuple(listed)


def _listed(node: NodeProto) -> bool:
    return "Conv" in node.op_type or node.op_type in _PRODUCTS


def _unfused(graph: Graph, one: Fused, owners: dict[int, str]) -> str:
    """Why fusion ends at the output of a convolution or product."""
    readers = graph.readers(one.tail.output)
    if not readers:
        return "its output is the model's"
    if len(readers) > 1:
        return f"{len(readers)} nodes read its output"
    index, node = readers[0]
    if index in owners:
        return f"{node.op_type} is fused with {owners[index]}"
    return "" if _listed(node) else f"{node.op_type} is not fused"


def _flops(graph: Graph, node: NodeProto) -> int | None:
    """Two for each product of an element and a weight. None where a shape is unknown."""
    place = _FILTERS_AT.get(node.op_type, 1)
    if len(node.input) <= place:
        return None
    data, made, filters = (_sizes(graph, name) for name in (node.input[0], node.output[0], node.input[place]))
    if data is None or filters is None or made is None:
        return None
    if node.op_type in _PRODUCTS:
        transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
        return 2 * math.prod(made) * data[-2 if transposed else -1] if data else None
    # Each input element of a transposed convolution meets a whole filter; each output element of any other one is the sum over one.
    elements = data if node.op_type == "ConvTranspose" else made
    return 2 * math.prod(elements) * math.prod(filters[1:])


def _sizes(graph: Graph, name: str) -> list[int] | None:
    shape = graph.shapes.get(name)
    sizes = [size for size in shape or () if isinstance(size, int)]
    return sizes if shape is not None and len(sizes) == len(shape) else None
