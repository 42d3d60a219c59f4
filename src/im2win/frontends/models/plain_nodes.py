"""Writes QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear nodes out as plain operators, as the ONNX specification defines them.

TVM fuses these with what is computed before and behind: a chain of them is one loop that reads and writes integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.frontends.onnx.graph import attributes_of
from im2win.frontends.onnx.quantised import DEQUANTIZE, DOMAINS, QUANTIZE

if TYPE_CHECKING:
    from onnx import NodeProto

    from im2win.frontends.models.source import Array, Source

DYNAMIC = "DynamicQuantizeLinear"
_LEVELS = 255  # of DynamicQuantizeLinear, whose integers are uint8


class Writer:
    """Adds plain nodes that compute what others do.

    Args:
        plain: gives the name that a value has in the new graph.
        constants: values of the new graph; what is needed is added.
    """

    def __init__(self, onnx: Any, source: Source, plain: Callable[[str], str], constants: dict[str, Array]) -> None:
        self._onnx, self._source, self._plain, self._constants = onnx, source, plain, constants
        self.nodes: list[NodeProto] = []
        self._first = ""

    def takes(self, node: NodeProto) -> bool:
        """Whether a node is one of these operators, of types that have a plain form."""
        if node.op_type not in (QUANTIZE, DEQUANTIZE, DYNAMIC) or node.domain not in DOMAINS:
            return False
        stated, types = attributes_of(node), self._source.graph.types
        if node.op_type == DYNAMIC:
            return True
        integers = self._type(types.get((node.output if node.op_type == QUANTIZE else node.input)[0], 0))
        return integers in ("int8", "uint8", "int16", "uint16", "int32") and not stated.get("block_size", 0)

    def write(self, node: NodeProto) -> list[NodeProto]:
        """The nodes that compute a node's outputs."""
        self.nodes, self._first = [], self._plain(node.output[0])
        {QUANTIZE: self._quantize, DEQUANTIZE: self._dequantize, DYNAMIC: self._dynamic}[node.op_type](node)
        return self.nodes

    def _type(self, code: int) -> str:
        try:
            return str(self._onnx.helper.tensor_dtype_to_np_dtype(code))
        except KeyError:
            return ""

    def _code(self, dtype: str) -> int:
        return int(self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def _node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{self._first}_{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(operator, inputs, [output], **attributes))
        return output

    def _constant(self, value: Array | float) -> str:
        name = f"{self._first}_c{len(self._constants)}"
        self._constants[name] = np.asarray(value, np.float32) if isinstance(value, float) else value
        return name

    def _cast(self, value: str, dtype: str, output: str = "") -> str:
        return self._node("Cast", value, output=output, to=self._code(dtype))

    def _parameter(self, node: NodeProto, name: str) -> str:
        """A scale or zero in float32 and in a shape that broadcasts with the node's tensor."""
        rank, shape = len(self._source.graph.shapes.get(node.input[0], ())), self._source.graph.shapes.get(name, ())
        array = self._source.constants.get(name)
        if array is not None:
            shape = tuple(array.shape)
        axis = attributes_of(node).get("axis", 1) % max(rank, 1)
        wide = np.array([-1 if place == axis else 1 for place in range(rank)], np.int64)
        along = len(shape) == 1 and shape != (1,)
        if array is not None:
            array = array.astype(np.float32)
            return self._constant(array.reshape(tuple(wide)) if along else array.reshape(()))
        value = self._plain(name)
        if self._source.graph.types.get(name) != self._code("float32"):
            value = self._cast(value, "float32")
        return self._node("Reshape", value, self._constant(wide)) if along else value

    def _zero(self, node: NodeProto) -> str | None:
        """The zero in float32; None if it is 0."""
        name = node.input[2] if len(node.input) > 2 else ""
        array = self._source.constants.get(name)
        return None if not name or (array is not None and not array.any()) else self._parameter(node, name)

    def _dequantize(self, node: NodeProto) -> None:
        dtype, output = self._type(self._source.graph.types.get(node.output[0], 1)), self._plain(node.output[0])
        value = self._cast(self._plain(node.input[0]), "float32")
        if (zero := self._zero(node)) is not None:
            value = self._node("Sub", value, zero)
        value = self._node("Mul", value, self._parameter(node, node.input[1]), output=output if dtype in ("", "float32") else "")
        if value != output:
            self._cast(value, dtype, output)

    def _quantize(self, node: NodeProto) -> None:
        dtype = self._type(self._source.graph.types[node.output[0]])
        value = self._plain(node.input[0])
        if self._source.graph.types.get(node.input[0]) != self._code("float32"):
            value = self._cast(value, "float32")
        value = self._node("Div", value, self._parameter(node, node.input[1]))
        self._saturated(value, self._zero(node), dtype, self._plain(node.output[0]))

    def _saturated(self, value: str, zero: str | None, dtype: str, output: str) -> None:
        limits = np.iinfo(dtype)
        value = self._node("Round", value)
        if zero is not None:
            value = self._node("Add", value, zero)
        least, most = float(limits.min), float(limits.max)
        if self._source.opset < 11:
            clipped = self._node("Clip", value, min=least, max=most)
        else:
            clipped = self._node("Clip", value, self._constant(least), self._constant(most))
        self._cast(clipped, dtype, output)  # not Max and Min, which TVM imports as a reduction of stacked tensors

    def _dynamic(self, node: NodeProto) -> None:
        """The scale is the range of the data and 0 over 255, and 1 where all are 0, as ONNX Runtime has it."""
        data, outputs, nothing = self._plain(node.input[0]), [self._plain(name) for name in node.output], self._constant(0.0)
        most = self._node("Max", self._node("ReduceMax", data, keepdims=0), nothing)
        least = self._node("Min", self._node("ReduceMin", data, keepdims=0), nothing)
        step = self._node("Div", self._node("Sub", most, least), self._constant(float(_LEVELS)))
        scale = self._node("Where", self._node("Equal", step, nothing), self._constant(1.0), step, output=outputs[1])
        begin = self._node("Round", self._node("Div", self._node("Sub", nothing, least), scale))
        zero = self._node("Min", self._node("Max", begin, nothing), self._constant(float(_LEVELS)))
        self._cast(zero, "uint8", outputs[2])
        self._saturated(self._node("Div", data, scale), zero, "uint8", outputs[0])
