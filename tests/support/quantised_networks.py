"""A small network of ResNet's and MobileNet's parts, quantised by onnxruntime.quantization in each of its forms."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_graphs import graph, node, onnx

quantization = pytest.importorskip("onnxruntime.quantization")
SHAPE = (3, 17, 16)


@functools.cache
def network() -> Any:
    """The parts of ResNet and MobileNet: strided, residual, depthwise and pointwise layers, pooling, a gate, a classifier."""
    random, weights = np.random.default_rng(0), {"low": np.float32(0), "high": np.float32(6)}

    def conv(inputs: str, output: str, *shape: int, operator: str = "Conv", bias: bool = True, **stated: Any) -> Any:
        names = [f"w_{output}", *([f"b_{output}"] if bias else [])]
        weights[names[0]] = (random.normal(0, 1, shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        weights[f"b_{output}"] = random.normal(0, 0.3, shape[0]).astype(np.float32)
        return node(operator, " ".join([inputs, *names]), output, **stated)

    nodes = [
        conv("x", "a", 8, 3, 3, 3, pads=[1] * 4, strides=[2, 2]), node("Relu", "a", "b"),
        node("MaxPool", "b", "c", kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4),
        conv("c", "d", 8, 8, 3, 3, pads=[1] * 4, bias=False), node("Add", "d c", "e"), node("Relu", "e", "f"),
        conv("f", "g", 16, 8, 1, 1), node("Clip", "g low high", "h"),
        conv("h", "i", 16, 1, 3, 3, pads=[1] * 4, group=16), node("Clip", "i low high", "j"),
        conv("j", "k", 12, 16, 1, 1), node("HardSigmoid", "k", "l", alpha=1 / 6), node("Mul", "k l", "m"),
        node("GlobalAveragePool", "m", "n"), node("Flatten", "n", "o"), conv("o", "y", 5, 12, operator="Gemm", transB=1),
    ]  # fmt: skip
    return graph(nodes, {"x": ("N", *SHAPE)}, {name: value for name, value in weights.items() if name != "b_d"})


def images(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (count, *SHAPE)).astype(np.float32)


@functools.cache
def quantised(form: str, activations: str, per_channel: bool) -> Any:
    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        left = iter([{"x": images(4)}])

        def get_next(self) -> Any:
            return next(self.left, None)

    kind = {"uint8": quantization.QuantType.QUInt8, "int8": quantization.QuantType.QInt8}[activations]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantised.onnx"
        onnx.save(network(), Path(folder) / "model.onnx")
        quantization.quantize_static(
            Path(folder) / "model.onnx", path, Reader(), quant_format=quantization.QuantFormat[form], per_channel=per_channel,
            activation_type=kind, weight_type=quantization.QuantType.QInt8,
        )  # fmt: skip
        return onnx.load(path)


FORMS = [("QDQ", "uint8", True), ("QDQ", "int8", False), ("QOperator", "uint8", False), ("QOperator", "int8", True)]
