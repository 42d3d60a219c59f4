"""Float16 and bfloat16 models on a CPU: every convolution is im2win's, and outputs equal ONNX Runtime's but for roundings to the type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16 by its name
import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from model_graphs import classifier, compiled, graph, integers, keys, node, norm, numpy_helper, peer, typed  # noqa: E402

from im2win.frontends.models.precision import NARROW, widened  # noqa: E402
from im2win.frontends.onnx.layers import layers_of  # noqa: E402

ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # of the largest number: what one rounding may be off
RANDOM = np.random.default_rng(3)
in_both = pytest.mark.parametrize("dtype", NARROW)


def check(model: Any, dtype: str, roundings: int, **options: Any) -> Any:
    """Compares a model in a narrow type with ONNX Runtime's outputs for the same weights in float32; no convolution is left out.

    Args:
        roundings: half units in the last place of the largest output that they may differ by.
    """
    narrow = typed(model, dtype)
    made = compiled(narrow, **options)
    feeds = {port.name: (RANDOM.integers(-8, 9, port.shape) / 8).astype(np.float32) for port in made.inputs}
    found = made.run({port.name: feeds[port.name].astype(port.dtype) for port in made.inputs})
    assert not made.manifest.skipped and all(f"-{dtype}-NHWC" in key for key in keys(made))
    for port, ours, theirs in zip(made.outputs, found.values(), peer(widened(narrow)[0], feeds), strict=True):
        assert port.dtype == dtype and ours.dtype.name == dtype and ours.shape == theirs.shape
        wrong = float(np.abs(ours.astype(np.float64) - theirs).max())
        assert wrong <= roundings * ROUNDED[dtype] * float(np.abs(theirs).max()), port.name
    return made


def residual_network() -> Any:
    """A ResNet of two blocks: a stem with pooling, identity and strided shortcuts, batch normalisation, mean, product."""
    nodes: list[Any] = []
    constants: dict[str, np.ndarray] = {}

    def conv(data: str, inputs: int, outputs: int, kernel: int, stride: int, relu: bool = True) -> str:
        number = len(constants)
        filters = RANDOM.standard_normal((outputs, inputs, kernel, kernel)) / np.sqrt(inputs * kernel**2)
        constants[f"w{number}"] = filters.astype(np.float32)
        nodes.append(node("Conv", f"{data} w{number}", f"c{number}", strides=[stride] * 2, pads=[kernel // 2] * 4))
        constants.update(norm(outputs, f"n{number}"))
        names = " ".join(f"n{number}{letter}" for letter in "gbmv")
        nodes.append(node("BatchNormalization", f"c{number} {names}", f"d{number}"))
        if relu:
            nodes.append(node("Relu", f"d{number}", f"r{number}"))
        return f"{'r' if relu else 'd'}{number}"

    last = conv("x", 3, 16, 7, 2)
    nodes.append(node("MaxPool", last, "pooled", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    last, channels = "pooled", 16
    for block, outputs in enumerate((16, 24)):
        stride = 1 if outputs == channels else 2
        inner = conv(conv(last, channels, outputs, 3, stride), outputs, outputs, 3, 1, relu=False)
        shortcut = last if outputs == channels else conv(last, channels, outputs, 1, stride, relu=False)
        nodes += [node("Add", f"{inner} {shortcut}", f"s{block}"), node("Relu", f"s{block}", f"b{block}")]
        last, channels = f"b{block}", outputs
    nodes += [node("GlobalAveragePool", last, "mean"), node("Flatten", "mean", "row"), node("Gemm", "row m b", "y")]
    constants |= {"m": RANDOM.standard_normal((24, 10)).astype(np.float32), "b": integers(10)}
    return graph(nodes, {"x": (1, 3, 48, 40)}, constants)


@in_both
def test_a_residual_network(dtype: str) -> None:
    """Its six convolutions and its product, with what follows them fused: what remains is pooling and conversions."""
    made = check(residual_network(), dtype, roundings=16)
    assert len(keys(made)) == 7 and sum("-add-relu" in key for key in keys(made)) == 2


@in_both
def test_operators_that_tvm_computes(dtype: str) -> None:
    """In float32, rounded where they are stored: elementary functions, a gate, maxima and means at borders, a response, a join."""
    nodes = [
        node("Conv", "x w0", "a", pads=[1] * 4), node("Erf", "a", "b"), node("Mul", "a b", "c"), node("Conv", "c w1", "d"),
        node("GlobalAveragePool", "d", "e"), node("Conv", "e w2", "f"), node("Sigmoid", "f", "g"), node("Mul", "d g", "h"),
        node("AveragePool", "h", "i", kernel_shape=[3, 3], pads=[1] * 4), node("MaxPool", "h", "j", kernel_shape=[3, 3], pads=[1] * 4),
        node("Concat", "i j", "k", axis=1), node("LRN", "k", "l", size=3), node("Softmax", "l", "n", axis=1),
        node("Conv", "n w3", "y", group=2), node("Exp", "d", "z"),
    ]  # fmt: skip
    weights = {"w0": (6, 3, 3, 3), "w1": (6, 6, 1, 1), "w2": (6, 6, 1, 1), "w3": (4, 6, 1, 1)}
    constants = {name: (RANDOM.integers(-4, 5, shape) / 8).astype(np.float32) for name, shape in weights.items()}
    check(graph(nodes, {"x": (2, 3, 7, 9)}, constants, "y z"), dtype, roundings=24)


@in_both
def test_a_float32_model_may_be_compiled_in_a_narrow_type(dtype: str, tmp_path: Path, command: Any) -> None:
    """Inputs and outputs keep their types; the command names the records that it lacks, which `im2win tune` makes."""
    model = classifier(2)
    made = compiled(model, dtype=dtype)
    assert [port.dtype for port in (*made.inputs, *made.outputs)] == ["float32"] * 2 and all(f"-{dtype}-NHWC" in key for key in keys(made))
    feeds = {port.name: integers(*port.shape, most=1) for port in made.inputs}
    [ours], [theirs] = made.run(feeds).values(), peer(model, feeds)
    assert np.abs(ours - theirs).max() <= 8 * ROUNDED[dtype] * np.abs(theirs).max()
    onnx.save(model, tmp_path / "model.onnx")
    done = command("compile", tmp_path / "model.onnx", "--out", tmp_path / "model.so", "--dtype", dtype, "--no-compare")
    assert done.status == 0 and f"--dtype {dtype} --layout NHWC" in done.out


def test_layers_of_a_float16_model() -> None:
    """What `im2win layers` and `im2win tune MODEL --layout NHWC` read are the layers that compiling looks up."""
    model = typed(classifier(2), "float16")
    read = {str(layer.conv.with_(layout="NHWC")) for layer in layers_of(model, epilogues=True, products=True)}
    assert read == set(keys(compiled(model)))
    assert numpy_helper.to_array(model.graph.initializer[0]).dtype == np.float16
