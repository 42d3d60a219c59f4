"""Activations of the table in ONNX graphs: as one operator, as we write them, and taken apart as exporters do it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from im2win.bench.peers.cpu import OnnxRuntime, Torch  # noqa: E402
from im2win.bench.peers.subject import Tensors  # noqa: E402
from im2win.frontends.onnx.activations import onnx_nodes  # noqa: E402
from im2win.frontends.onnx.layers import layers_of  # noqa: E402
from im2win.numerics.reference import error  # noqa: E402
from im2win.spec.activations import ACTIVATIONS  # noqa: E402
from im2win.spec.conv2d import Conv2d  # noqa: E402

WORDS = [row.key() for row in ACTIVATIONS.values()] + ["leaky_relu0.2"]
PLAIN = Conv2d(1, 3, 8, 8, 3, 3, padding=1)


def fused(nodes: list[Any], numbers: dict[str, float], dtype: str = "float32", outputs: tuple[str, ...] = ("y",)) -> Conv2d:
    """What a Conv from x to c becomes with these nodes behind it, the last one's output called y."""
    kind = TensorProto.FLOAT if dtype == "float32" else TensorProto.FLOAT16
    inputs = [helper.make_tensor_value_info(name, kind, [1, 3, 8, 8]) for name in ("x", "other")]
    constants = [numpy_helper.from_array(np.ones((3, 3, 3, 3), dtype), "w")]
    constants += [numpy_helper.from_array(np.array(value, dtype), name) for name, value in numbers.items()]
    conv = helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4)
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    model = helper.make_model(
        helper.make_graph([conv, *nodes], "small", inputs, results, constants), opset_imports=[helper.make_opsetid("", 20)]
    )
    [layer] = layers_of(model, epilogues=True)
    return layer.conv


def chain(text: str, dtype: str = "float32", outputs: tuple[str, ...] = ("y",)) -> Conv2d:
    """`fused` behind nodes written as "y = Mul c 0.5; ..."."""
    nodes, numbers = [], {}
    for line in text.split(";"):
        output, _, operator, *inputs = line.split()
        names = [f"n{one}" if one[0] in "-0123456789" else one for one in inputs]
        numbers |= {name: float(name[1:]) for name in names if name[1:2] in "-0123456789" and name[0] == "n" and len(name) > 1}
        nodes.append(helper.make_node(operator, names, [output]))
    return fused(nodes, numbers, dtype, outputs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("word", WORDS)
def test_what_is_written_is_read(word: str, dtype: str) -> None:
    steps, numbers, _ = onnx_nodes(word, "c", 0)
    last = len(steps) - 1
    nodes = [helper.make_node(kind, names, ["y" if i == last else f"step{i}"], **fields) for i, (kind, names, fields) in enumerate(steps)]
    assert fused(nodes or [helper.make_node("Identity", ["c"], ["y"])], numbers, dtype) == PLAIN.with_(activation=word, dtype=dtype)


@pytest.mark.parametrize("word", WORDS)
def test_peers_compute_it(word: str) -> None:
    conv = Conv2d.parse("n1-c4x8x8-k4x3x3-p1-bias-add").with_(activation=word)
    tensors = Tensors.random(conv, seed=3)
    for peer, package in ((Torch(), "torch"), (OnnxRuntime(), "onnxruntime")):
        pytest.importorskip(package)
        trial = peer.prepare(conv, tensors, 1)
        trial.call()
        assert error(trial.read(), tensors.expected(conv)) <= 1e-5


ROOT = math.sqrt(2)
APART = {
    "gelu": [
        f"a = Div c {ROOT}; b = Erf a; d = Add b 1; e = Mul c d; y = Mul e 0.5",
        f"a = Mul c {1 / ROOT}; b = Erf a; d = Add 1 b; h = Mul 0.5 c; y = Mul d h",
        f"a = Div c {ROOT}; b = Erf a; d = Add b 1; e = Mul d 0.5; y = Mul c e",
    ],
    "gelu_tanh": [
        "a = Pow c 3; b = Mul a 0.044715; d = Add c b; e = Mul d 0.7978845608; f = Tanh e; g = Add f 1; h = Mul c 0.5; y = Mul h g",
        "a = Mul c c; k = Mul a c; b = Mul 0.044715 k; d = Add c b; e = Mul 0.797884561 d; f = Tanh e; g = Add 1 f; h = Mul c g; "
        "y = Mul h 0.5",
    ],
    "silu": ["a = Sigmoid c; y = Mul c a", "a = Neg c; b = Exp a; d = Add b 1; y = Div c d"],
    "hardswish": [
        "a = Add c 3; b = Clip a 0 6; d = Div b 6; y = Mul c d",
        "a = Add c 3; b = Clip a 0 6; d = Mul c b; y = Div d 6",
        f"a = Add 3 c; b = Clip a 0 6; d = Mul b {1 / 6}; y = Mul d c",
    ],
    "hardsigmoid": ["a = Add c 3; b = Clip a 0 6; y = Div b 6", "a = Add c 3; b = Clip a 0 6; d = Div b 6; y = Mul other d"],
    "sigmoid": ["a = Sigmoid c; y = Mul a other", "a = Neg c; b = Exp a; d = Add b 1; y = Reciprocal d"],
    "leaky_relu0.25": ["a = Mul c 0.25; y = Max a c"],
    "relu": ["y = Max c 0", "y = Clip c 0"],
    "relu6": ["a = Max c 0; y = Min a 6"],
    "none": [
        "a = Mul c 1.702; b = Sigmoid a; y = Mul c b",  # another approximation of GELU
        "a = Sigmoid c; b = Mul a other; y = Mul b c",
        f"a = Div c {ROOT}; b = Erf a; d = Add b 1.1; e = Mul c d; y = Mul e 0.5",
        "a = Sigmoid c; y = Div c a",
        "a = Softplus c; b = Tanh a; y = Mul c b",
    ],
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("word", "text"), [(word, text) for word, texts in APART.items() for text in texts])
def test_taken_apart(word: str, text: str, dtype: str) -> None:
    assert chain(text, dtype) == PLAIN.with_(activation=word, dtype=dtype)


def test_what_others_read_stays() -> None:
    text = "a = Add c 3; b = Clip a 0 6; d = Div b 6; y = Mul c d"
    assert chain(text, outputs=("y", "d")) == PLAIN and chain(text, outputs=("y", "c")) == PLAIN
    assert chain(f"{text}; z = Abs b", outputs=("y", "z")) == PLAIN


def test_scalings_before_an_activation_are_folded() -> None:
    assert chain("a = Mul c 2; b = Add a 1; y = HardSwish b") == PLAIN.with_(bias=True, activation="hardswish")
    assert chain("a = Add c 1; b = Add a 3; d = Clip b 0 6; y = Div d 6") == PLAIN.with_(bias=True, activation="hardsigmoid")


def test_other_attributes_are_other_functions() -> None:
    def one(operator: str, **attributes: Any) -> str:
        return fused([helper.make_node(operator, ["c"], ["y"], **attributes)], {}).activation

    assert one("HardSigmoid") == "none", "its alpha is 0.2 by default"
    assert one("LeakyRelu") == "leaky_relu0.01" and one("LeakyRelu", alpha=1.5) == "none" and one("LeakyRelu", alpha=-0.5) == "none"
    assert one("Gelu") == "gelu" and one("Gelu", approximate="tanh") == "gelu_tanh"
    assert one("Elu") == "none"
