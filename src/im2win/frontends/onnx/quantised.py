"""Finds convolutions and products of integers in ONNX graphs: what DequantizeLinear feeds and QuantizeLinear reads.

A QuantizeLinear or DequantizeLinear node states what integers stand for; `im2win.frontends.quantisation` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from im2win.frontends.onnx.activations import activation_behind
from im2win.frontends.onnx.epilogues import Tail, adds
from im2win.frontends.onnx.graph import Graph, attributes_of
from im2win.frontends.quantisation import Array, Step, Steps, added, fits_int8, fits_int32, in_units, requantised, unit_of
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from onnx import NodeProto

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
DOMAINS = ("", "ai.onnx", "com.microsoft")  # ONNX Runtime has the same operators for other types in its own domain
_TYPES = {2: "uint8", 3: "int8"}  # by onnx.TensorProto.DataType
_INT32 = 6


@dataclass(frozen=True)
class Integers:
    """The integer operands of a convolution or product.

    Attributes:
        data: the value that it reads, of uint8 or int8.
        dtype: of data.
        zero_point: of data.
        filter: the constant that holds its filters, of int8 or uint8.
        steps: of the filters.
        bias: the constant that is added, as the graph has it, or None.
        unit: float32 [out_channels], the product of the scales of data and filters.
        scale: float32, that of the `Conv2d`.
        residual: the integers that it adds, or None.
    """

    data: str
    dtype: str
    zero_point: int
    filter: str
    steps: Steps
    bias: str | None
    unit: Array
    scale: Array
    residual: str | None = None


def steps_of(graph: Graph, node: NodeProto) -> Steps | None:
    """The constant scales and zeros of a QuantizeLinear or DequantizeLinear; None if they are computed, or given by block."""
    stated = attributes_of(node)
    scale = graph.array(node.input[1])
    zero = graph.array(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1, np.int64)
    if scale is None or zero is None or stated.get("block_size", 0) or scale.dtype != np.float32 or zero.dtype.kind not in "iu":
        return None
    if scale.ndim > 1 or zero.size not in (1, scale.size):
        return None
    return Steps(scale.reshape(-1), zero.reshape(-1).astype(np.int64), stated.get("axis", 1))


def dequantised(graph: Graph, value: str) -> tuple[str, Steps] | None:
    """The integers that a DequantizeLinear computes a value from; None if no such node computes it."""
    found = graph.maker(value)
    if found is None or found[1].op_type != DEQUANTIZE or found[1].domain not in DOMAINS:
        return None
    steps = steps_of(graph, found[1])
    return None if steps is None else (found[1].input[0], steps)


def integers_of(graph: Graph, node: NodeProto, data: str, conv: Conv2d) -> Integers | None:
    """The integer operands of a Conv, Gemm or MatMul of float32, `conv`, that reads `data`; None if im2win cannot compute with integers."""
    given, weights = dequantised(graph, data), dequantised(graph, node.input[1])
    if node.op_type not in ("Conv", "Gemm", "MatMul") or given is None or weights is None or conv.dtype != "float32":
        return None
    (source, at), (filters, steps) = given, weights
    dtype, stored = _TYPES.get(graph.types.get(source, 0)), _TYPES.get(graph.types.get(filters, 0))
    stated = attributes_of(node)
    channels = 0 if node.op_type == "Conv" or stated.get("transB", 0) else 1
    rank = len(graph.shapes.get(filters, ()))
    plain = stated.get("alpha", 1.0) == 1.0 and stated.get("beta", 1.0) == 1.0
    if dtype is None or stored is None or at.scale.size != 1 or not plain or not graph.fixed(filters):
        return None
    if steps.scale.size > 1 and (steps.axis % rank != channels or steps.scale.size != conv.out_channels):
        return None
    values = graph.array(filters)
    if (stored != "int8" or steps.zero.any()) and (values is None or not fits_int8(values, steps)):
        return None
    unit = unit_of(at, steps, conv.out_channels)
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
    if unit is None or not (bias is None or (graph.fixed(bias) and _small(graph, bias, unit))):
        return None
    return Integers(source, dtype, int(at.zero[0]), filters, steps, bias, unit, unit)


def _small(graph: Graph, bias: str, unit: Array) -> bool:
    """Whether a bias fits int32 in these units; True where its values are not in the file."""
    values = _real(graph, bias)
    return values is None or fits_int32(values, unit)


def _real(graph: Graph, name: str) -> Array | None:
    """The values of a constant in float64, those of a DequantizeLinear computed from its integers."""
    if (found := dequantised(graph, name)) is not None:
        source, steps = found
        stored = graph.array(source)
        return None if stored is None else steps.real(stored)
    array = graph.array(name)
    return None if array is None else array.astype(np.float64)


def stored_of(graph: Graph, one: Integers) -> list[str]:
    """Names of the constants that hold a convolution's filters and bias, as integers where these are dequantised."""
    names = [one.filter]
    if one.bias is not None:
        found = dequantised(graph, one.bias)
        names.append(one.bias if found is None else found[0])
    return names


def filters_and_bias(graph: Graph, node: NodeProto, one: Integers, conv: Conv2d) -> tuple[Array, Array | None]:
    """The filters in int8 as `conv` has them, and the bias in int32.

    Args:
        graph: knows the values of all constants.
    """
    stored = graph.array(one.filter)
    assert stored is not None, one.filter
    weight = one.steps.shifted(stored)
    if node.op_type != "Conv" and not attributes_of(node).get("transB", 0):
        weight = weight.T
    filters = np.ascontiguousarray(weight.astype(np.int8)).reshape(conv.filter_shape)
    if one.bias is None:
        return filters, None
    real = _real(graph, one.bias)
    assert real is not None, one.bias
    return filters, in_units(real, one.unit)


def fused(graph: Graph, conv: Conv2d, behind: Tail, one: Integers, claimed: set[int]) -> tuple[Conv2d, Tail, Integers]:
    """The convolution of integers with what follows it, requantised if a QuantizeLinear ends it; else its outputs are float32.

    An addition of two tensors that are quantised each for itself is fused with the convolution that computes the later one of them.

    Args:
        behind: what follows, without scalings.
        claimed: indices of additions that another convolution fused; one that is fused here is added.
    """
    plain = {"dtype": one.dtype, "zero_point": one.zero_point}
    floats = conv.with_(**plain, out_dtype="float32", **behind.fields), behind, one
    if (whole := _sums(graph, conv, behind, one)) is not None:
        return whole
    if (quantised := _quantised(graph, behind.output)) is None:
        return floats
    index, node, out = quantised
    residual, made = None, None
    if behind.residual is None:
        made = requantised(floats[0], one.unit, out.step, out.zero, out.dtype)
    elif (other := _step_of(graph, behind.residual)) is not None:
        residual, step = other
        if (step.step, step.dtype) == (out.step, out.dtype):
            made = requantised(floats[0], one.unit, out.step, out.zero, out.dtype, step.zero)
        made = made or added(floats[0], one.unit, out, step)
    if made is None:
        return floats
    nodes = frozenset((*behind.nodes, index))
    ended = Tail({**behind.fields, "activation": made[0].activation}, behind.scalings, behind.residual, nodes, node.output[0])
    whole = made[0], ended, replace(one, scale=made[1], residual=residual)
    return whole if residual is not None else _with_addition(graph, whole, out, claimed) or whole


def _quantised(graph: Graph, value: str) -> tuple[int, NodeProto, Step] | None:
    """The QuantizeLinear that alone reads a value, with its index, if it has one scale and is of 8 bits; else None."""
    readers = graph.readers(value)
    if len(readers) != 1 or readers[0][1].op_type != QUANTIZE or readers[0][1].domain not in DOMAINS:
        return None
    index, node = readers[0]
    steps, dtype = steps_of(graph, node), _TYPES.get(graph.types.get(node.output[0], 0))
    if steps is None or steps.scale.size != 1 or dtype is None or node.input[0] != value:
        return None
    return index, node, Step(float(steps.scale[0]), int(steps.zero[0]), dtype)


def _step_of(graph: Graph, value: str) -> tuple[str, Step] | None:
    """The integers of 8 bits with one scale that a value is dequantised from, and their step; None for any other value."""
    found = dequantised(graph, value)
    if found is None or found[1].scale.size != 1:
        return None
    dtype = _TYPES.get(graph.types.get(found[0], 0))
    return None if dtype is None else (found[0], Step(float(found[1].scale[0]), int(found[1].zero[0]), dtype))


def _with_addition(
    graph: Graph, whole: tuple[Conv2d, Tail, Integers], own: Step, claimed: set[int]
) -> tuple[Conv2d, Tail, Integers] | None:
    """A requantising convolution with the addition that alone reads its outputs, and with what quantises the sum; None without them.

    Args:
        own: the steps that the convolution itself is quantised in.
    """
    conv, behind, one = whole
    readers = graph.readers(behind.output)
    if conv.activation != "none" or len(readers) != 1 or readers[0][1].op_type != DEQUANTIZE:
        return None
    first, real = readers[0][0], readers[0][1].output[0]
    readers = graph.readers(real)
    if _step_of(graph, real) != (behind.output, own) or len(readers) != 1 or readers[0][0] in claimed or not adds(graph, readers[0][1]):
        return None
    second, addition = readers[0]
    residual = addition.input[1] if addition.input[0] == real else addition.input[0]
    activation, nodes, value = activation_behind(graph, addition.output[0])
    other, quantised = _step_of(graph, residual), _quantised(graph, value)
    if other is None or quantised is None:
        return None
    index, last, out = quantised
    made = added(conv.with_(residual=True, out_dtype="float32", activation=activation), one.unit, out, other[1], own)
    if made is None:
        return None
    claimed.add(second)
    fields = {**behind.fields, "residual": True, "activation": made[0].activation}
    fused_nodes = frozenset((*behind.nodes, first, second, *nodes, index))
    return made[0], Tail(fields, behind.scalings, residual, fused_nodes, last.output[0]), replace(one, scale=made[1], residual=other[0])


def _sums(graph: Graph, conv: Conv2d, behind: Tail, one: Integers) -> tuple[Conv2d, Tail, Integers] | None:
    """The convolution as sums in int32, if its operands have units of 1 and a conversion to int32 follows; else None."""
    readers = graph.readers(behind.output)
    if len(readers) != 1 or readers[0][1].op_type != "Cast" or behind.nodes or conv.bias or (one.unit != 1).any():
        return None
    index, node = readers[0]
    if attributes_of(node)["to"] != _INT32:
        return None
    found = Tail(behind.fields, (), None, frozenset((index,)), node.output[0])
    return conv.with_(dtype=one.dtype, zero_point=one.zero_point), found, one
