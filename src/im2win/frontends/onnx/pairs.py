"""Writes ONNX's operators of integers as operators of float32 between DequantizeLinear and QuantizeLinear, from which these are defined.

QLinearConv is DequantizeLinear of its operands, Conv, QuantizeLinear; and so on. `quantised` then finds one form of quantised models. What
it fuses is computed with integers, not in float32.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from im2win.frontends.onnx.graph import attributes_of
from im2win.frontends.onnx.quantised import DEQUANTIZE, QUANTIZE

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

Array = npt.NDArray[Any]
_MICROSOFT = "com.microsoft"
_UNARY = {
    "QLinearSigmoid": "Sigmoid", "QLinearLeakyRelu": "LeakyRelu", "QLinearSoftmax": "Softmax", "QLinearAveragePool": "AveragePool",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
}  # fmt: skip
"""Operators of ONNX Runtime with the inputs X, its scale and zero, and the output's scale and zero."""
_BINARY = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
_OWN = ("channels_last", "opset")  # attributes that the plain operators do not have


def in_pairs(onnx: ModuleType, model: ModelProto) -> dict[str, str]:
    """Replaces the operators of integers of a model by plain ones between pairs of DequantizeLinear and QuantizeLinear.

    Those whose scales are computed, or whose tensors have channels last, stay as they are.

    Returns:
        For each value that a node computes afterwards, the first output of the node that it was written for.
    """
    writer = _Pairs(onnx, model)
    nodes: list[NodeProto] = []
    origins: dict[str, str] = {}
    for node in model.graph.node:
        written = writer.written(node)
        nodes += written
        origins.update((name, next(iter(node.output))) for one in written for name in one.output if name)
    if writer.changed:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return origins


class _Pairs:
    def __init__(self, onnx: ModuleType, model: ModelProto) -> None:
        self._onnx, self._graph = onnx, model.graph
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and (tensor := attributes_of(node).get("value")) is not None:
                self._weights[node.output[0]] = tensor
        self._nodes: list[NodeProto] = []
        self._output = ""
        self.changed = False

    def written(self, node: NodeProto) -> list[NodeProto]:
        """What replaces a node."""
        self._nodes, self._output = [], next(iter(node.output), "")
        copy = self._onnx.NodeProto()
        copy.CopyFrom(node)
        if node.op_type in (QUANTIZE, DEQUANTIZE) and node.domain == _MICROSOFT:
            copy.domain, self.changed = "", True
            return [copy]
        plain = {"QLinearConv": self._conv, "QLinearMatMul": self._matmul, "ConvInteger": self._sums, "MatMulInteger": self._sums}
        extra = {**dict.fromkeys(_UNARY, self._unary), **dict.fromkeys(_BINARY, self._binary)}
        extra |= {"QLinearConcat": self._concat, "QGemm": self._gemm}
        write = plain.get(node.op_type) if node.domain in ("", "ai.onnx") else extra.get(node.op_type)
        if node.domain not in ("", "ai.onnx", _MICROSOFT) or write is None or not write(node):
            return [copy]
        self.changed = True
        return self._nodes

    def _array(self, name: str) -> Array | None:
        tensor = self._weights.get(name)
        stored = tensor is not None and tensor.data_location != self._onnx.TensorProto.EXTERNAL
        return np.asarray(self._onnx.numpy_helper.to_array(tensor)) if stored else None

    def _constant(self, array: Array) -> str:
        name = f"{self._output}/integers{len(self._graph.initializer)}"
        tensor = self._onnx.numpy_helper.from_array(array, name)
        self._graph.initializer.append(tensor)
        self._weights[name] = tensor
        return name

    def _node(self, operator: str, inputs: list[str], output: str = "", name: str = "", **attributes: Any) -> str:
        output = output or f"{self._output}/pair{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(operator, inputs, [output], name, **attributes))
        return output

    def _real(self, value: str, scale: str, zero: str, axis: int = 0) -> str:
        """The real numbers that integers stand for."""
        tensor = self._weights.get(scale)
        along: dict[str, Any] = {"axis": axis} if tensor is not None and list(tensor.dims) not in ([], [1]) else {}
        return self._node(DEQUANTIZE, [value, scale, *([zero] if zero else [])], **along)

    def _whole(self, value: str, scale: str, zero: str, output: str) -> None:
        self._node(QUANTIZE, [value, scale, *([zero] if zero else [])], output)

    def _bias(self, bias: str, first: str, second: str, axis: int = 0) -> str | None:
        """A bias of int32, in units of the product of two scales; None if these are computed."""
        scales = self._array(first), self._array(second)
        if scales[0] is None or scales[1] is None:
            return None
        product = (scales[0].reshape(-1) * scales[1].reshape(-1)).astype(np.float32)
        return self._real(bias, self._constant(product if product.size > 1 else product.reshape(())), "", axis)

    def _conv(self, node: NodeProto) -> bool:
        x, sx, zx, w, sw, zw, sy, zy, b = [*node.input, ""][:9]
        operands = [self._real(x, sx, zx), self._real(w, sw, zw)]
        if b:
            bias = self._bias(b, sx, sw)
            if bias is None:
                return False
            operands.append(bias)
        value = self._node("Conv", operands, name=node.name or self._output, **attributes_of(node))
        self._whole(value, sy, zy, node.output[0])
        return True

    def _matmul(self, node: NodeProto) -> bool:
        a, sa, za, b, sb, zb, sy, zy = node.input
        matrix = self._weights.get(b)
        scale = self._weights.get(sa)
        if scale is None or list(scale.dims) not in ([], [1]):
            return False  # scales by row
        operands = [self._real(a, sa, za), self._real(b, sb, zb, 1 if matrix is None else len(matrix.dims) - 1)]
        self._whole(self._node("MatMul", operands, name=node.name or self._output), sy, zy, node.output[0])
        return True

    def _gemm(self, node: NodeProto) -> bool:
        a, sa, za, b, sb, zb, c, sy, zy = [*node.input, "", "", ""][:9]
        stated = attributes_of(node)
        if stated.get("alpha", 1.0) != 1.0:
            return False
        operands = [self._real(a, sa, za), self._real(b, sb, zb, 0 if stated.get("transB", 0) else 1)]
        if c:
            tensor = self._weights.get(c)
            bias = self._bias(c, sa, sb, 0 if tensor is None else len(tensor.dims) - 1)
            if bias is None:
                return False
            operands.append(bias)
        value = self._node("Gemm", operands, "" if sy else node.output[0], node.name or self._output, **stated)
        if sy:
            self._whole(value, sy, zy, node.output[0])
        return True

    def _unary(self, node: NodeProto) -> bool:
        x, sx, zx, sy, zy = [*node.input, ""][:5]
        stated = attributes_of(node)
        if stated.get("channels_last", 0):
            return False
        plain = {name: value for name, value in stated.items() if name not in _OWN}
        value = self._node(_UNARY[node.op_type], [self._real(x, sx, zx)], name=node.name or self._output, **plain)
        self._whole(value, sy, zy, node.output[0])
        return True

    def _binary(self, node: NodeProto) -> bool:
        a, sa, za, b, sb, zb, sy, zy = [*node.input, ""][:8]
        value = self._node(_BINARY[node.op_type], [self._real(a, sa, za), self._real(b, sb, zb)], name=node.name or self._output)
        self._whole(value, sy, zy, node.output[0])
        return True

    def _concat(self, node: NodeProto) -> bool:
        sy, zy, *rest = node.input
        parts = [self._real(*rest[place : place + 3]) for place in range(0, len(rest), 3)]
        value = self._node("Concat", parts, name=node.name or self._output, **attributes_of(node))
        self._whole(value, sy, zy, node.output[0])
        return True

    def _sums(self, node: NodeProto) -> bool:
        """ConvInteger and MatMulInteger: sums in int32 of (x - z) * w.

        A computed z is taken off the sums: conv(x, w) - z * (the sum of the filters), with a border of z around x.
        """
        x, w, zx, zw = [*node.input, "", ""][:4]
        product = node.op_type == "MatMulInteger"
        one, weights, stated = self._constant(np.array(1, np.float32)), self._array(w), attributes_of(node)
        name, operator = node.name or self._output, "MatMul" if product else "Conv"
        zeros = self._array(zw) if zw else np.zeros((), np.int64)
        if weights is None or zeros is None or (zeros.size > 1 and zeros.ndim > 1):
            if weights is None and zw and w not in self._weights:
                return self._real_sums(node, one)
            return False
        wide = zeros.astype(np.int64).reshape((-1,) + (() if product else (1,) * (weights.ndim - 1)) if zeros.size > 1 else ())
        shifted = weights.astype(np.int64) - wide
        simple = stated.get("auto_pad", b"NOTSET") == b"NOTSET"
        if zx == "" or self._array(zx) is not None or not simple or shifted.min() < -128 or shifted.max() > 127 or weights.ndim < 2:
            return self._real_sums(node, one)
        filters = self._real(self._constant(shifted.astype(np.int8)), one, "")
        pads = stated.pop("pads", [])
        integers = self._onnx.TensorProto
        zero = self._node("Cast", [zx], to=integers.INT32)
        if any(pads):
            wider = self._node("Cast", [x], to=integers.FLOAT)
            begin = self._node("Cast", [zx], to=integers.FLOAT)
            half = len(pads) // 2
            border = self._constant(np.array([0, 0, *pads[:half], 0, 0, *pads[half:]], np.int64))
            wider = self._node("Pad", [self._node("Sub", [wider, begin]), border])
            x = self._node("Cast", [self._node("Add", [wider, begin])], to=integers.UINT8)
        sums = self._node("Cast", [self._node(operator, [self._real(x, one, ""), filters], name=name, **stated)], to=integers.INT32)
        totals = shifted.sum(axis=-2) if product else shifted.reshape(len(shifted), -1).sum(axis=1).reshape(-1, *(1,) * (weights.ndim - 2))
        if product and weights.ndim > 2:
            totals = totals[..., None, :]
        less = self._node("Mul", [zero, self._constant(totals.astype(np.int32))])
        self._node("Sub", [sums, less], node.output[0])
        return True

    def _real_sums(self, node: NodeProto, one: str) -> bool:
        """The same in float32: exact up to 2**24 where nothing of it is fused."""
        x, w, zx, zw = [*node.input, "", ""][:4]
        tensor, operator = self._weights.get(zw), "MatMul" if node.op_type == "MatMulInteger" else "Conv"
        scale = one
        if tensor is not None and list(tensor.dims) not in ([], [1]):
            scale = self._constant(np.ones(tuple(tensor.dims), np.float32))
        axis = 1 if operator == "MatMul" else 0
        value = self._node(
            operator, [self._real(x, one, zx), self._real(w, scale, zw, axis)], name=node.name or self._output, **attributes_of(node)
        )
        self._node("Cast", [value], node.output[0], to=self._onnx.TensorProto.INT32)
        return True
