"""Finds what can be fused with a convolution in an ONNX graph: padding before it; scaling, bias, residual and activation after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from im2win.frontends.onnx.activations import activation_behind
from im2win.frontends.onnx.graph import Graph, attributes_of

if TYPE_CHECKING:
    from onnx import NodeProto


@dataclass(frozen=True)
class Tail:
    """The nodes that are fused with a convolution or a product.

    Attributes:
        fields: the `Conv2d` fields that they become.
        scalings: indices of the nodes that fold into filters and bias, in order: BatchNormalization, and Mul, Div, Add and Sub with a
            constant of one value, or one for each channel.
        residual: the value that is added, if one is.
        nodes: indices of all of them.
        output: the value that the fused operator computes.
    """

    fields: dict[str, Any]
    scalings: tuple[int, ...]
    residual: str | None
    nodes: frozenset[int]
    output: str


def tail(graph: Graph, value: str, claimed: set[int], axis: int = 1, *, residuals: bool = True, scalings: bool = True) -> Tail:
    """What can be fused after `value`, the output of a convolution or product. No other node may read the values in between.

    Scalings come first, then the addition of a tensor of the same shape (the residual), then an activation.

    Args:
        claimed: indices of additions that another convolution fused; an addition that is fused here is added.
        axis: of the channels.
        residuals: whether an addition may be fused.
        scalings: whether scalings may be fused.
    """
    fields: dict[str, Any] = {}
    folded: list[int] = []
    residual: str | None = None
    nodes: list[int] = []
    while (found := _only_reader(graph, value)) is not None:
        index, node = found
        if graph.hands_on(node):
            nodes.append(index)
        elif scalings and scales(graph, node, value, axis) and not _begins_activation(graph, node, value):
            folded.append(index)
            if node.op_type in ("BatchNormalization", "Add", "Sub"):
                fields["bias"] = True
        else:
            break
        value = node.output[0]
    found = _only_reader(graph, value)
    if residuals and found is not None and found[0] not in claimed and adds(graph, found[1]):
        index, node = found
        claimed.add(index)
        nodes.append(index)
        fields["residual"] = True
        residual = node.input[1] if node.input[0] == value else node.input[0]
        value = node.output[0]
    activation, fused, value = activation_behind(graph, value)
    return Tail({**fields, "activation": activation}, tuple(folded), residual, frozenset((*folded, *nodes, *fused)), value)


def padding_before(graph: Graph, value: str) -> tuple[int, str, tuple[int, int, int, int]] | None:
    """The Pad node with zeros around each image that computes `value` for one reader: its index, its input, and its padding.

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
    if attributes.get("mode", b"constant") != b"constant" or filled != 0.0 or inputs[3] or pads is None or len(pads) not in (6, 8):
        return None
    if len(pads) == 6:  # of lines, which are images of one row
        pads = [*pads[:2], 0, pads[2], *pads[3:5], 0, pads[5]]
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
    channels = len(shape) - axis if axis > 0 else -axis  # axis of the channels, counted from the end
    return all(size == 1 or (place == channels and size == shape[axis]) for place, size in enumerate(reversed(constant), 1))


def _begins_activation(graph: Graph, node: NodeProto, value: str) -> bool:
    """Whether a scaling of `value` belongs to an activation of several nodes: without it, no activation or another one follows."""
    word = activation_behind(graph, value)[0]
    return word != "none" and word != activation_behind(graph, node.output[0])[0]


def _normalises(graph: Graph, node: NodeProto, value: str) -> bool:
    """Whether the node normalises `value` by fixed statistics of each channel.

    Old operator sets mark training mode by additional outputs.
    """
    if node.input[0] != value or len(list(filter(None, node.output))) > 1:
        return False
    attributes = attributes_of(node)
    fixed = all(graph.fixed(name) for name in node.input[1:])
    return fixed and not attributes.get("training_mode", 0) and bool(attributes.get("spatial", 1))


def adds(graph: Graph, node: NodeProto) -> bool:
    """Whether the node adds two tensors of one shape (Caffe2 exports Sum for Add)."""
    if node.op_type not in ("Add", "Sum") or len(node.input) != 2:
        return False
    first, second = (graph.shapes.get(name) for name in node.input)
    return first is not None and first == second and "?" not in first[1:]
