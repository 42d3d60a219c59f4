"""Whole ONNX models: small graphs of integers, whose outputs must equal ONNX Runtime's, and real ones; batches, files and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import light  # noqa: E402
from conftest import ROOT  # noqa: E402

import im2win  # noqa: E402
from im2win.machine import Machine  # noqa: E402
from im2win.models.bench import with_random_weights  # noqa: E402
from im2win.models.convolutions import Job, build, in_processes  # noqa: E402
from im2win.models.parts import take_apart  # noqa: E402
from im2win.models.source import at_batch, read  # noqa: E402
from im2win.onnx_layers import ModelError, layers_of  # noqa: E402
from im2win.runtime import ArtefactError  # noqa: E402

helper, numpy_helper, FLOAT, INT64 = onnx.helper, onnx.numpy_helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
RANDOM = np.random.default_rng(7)


def integers(*shape: int, most: int = 3) -> np.ndarray:
    return RANDOM.integers(-most, most + 1, shape).astype(np.float32)


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), outputs.split(), name=f"{operator}_{outputs.split()[0]}", **attributes)


def graph(
    nodes: list[Any], inputs: dict[str, tuple[Any, ...]], constants: dict[str, Any] | None = None, outputs: str = "y", opset: int = 17
) -> Any:
    constants = constants or {}
    body = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(name, FLOAT, list(shape)) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    made = helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)  # fills in the outputs' shapes


def peer(model: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def compiled(model: Any, **options: Any) -> Any:
    return im2win.compile_model(model, **{"accuracy": "exact", **options})


def check(model: Any, exact: bool = True, **options: Any) -> Any:
    """Compiles a model of fixed shapes and compares all its outputs with ONNX Runtime's."""
    made = compiled(model, **options)
    feeds = {port.name: integers(*port.shape) for port in made.inputs}
    found = made.run(feeds)
    expected = peer(model, feeds)
    assert list(found) == [value.name for value in model.graph.output]
    for (name, ours), theirs in zip(found.items(), expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
        if exact:
            assert (ours == theirs).all(), f"{name}: {np.abs(ours - theirs).max()}"
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)
    return made


def keys(made: Any) -> list[str]:
    return [layer.conv for layer in made.manifest.layers]


def norm(channels: int, name: str) -> dict[str, np.ndarray]:
    """Statistics whose scale is exact in binary: gamma / sqrt(variance) is a power of two."""
    return {
        f"{name}g": RANDOM.choice([0.5, 1, 2], channels).astype(np.float32),
        f"{name}b": integers(channels),
        f"{name}m": integers(channels),
        f"{name}v": RANDOM.choice([1, 4], channels).astype(np.float32),
    }


def batch_norm(value: str, output: str, name: str) -> Any:
    return node("BatchNormalization", f"{value} {name}g {name}b {name}m {name}v", output, epsilon=0.0)


# --- what is fused -------------------------------------------------------------------------------------------------


def test_residual_block() -> None:
    nodes = [
        node("Conv", "x w0", "a", pads=[1] * 4),
        batch_norm("a", "b", "n0"),
        node("Relu", "b", "c"),
        node("Conv", "c w1", "d", pads=[1] * 4),
        batch_norm("d", "e", "n1"),
        node("Add", "e x", "f"),
        node("Relu", "f", "y"),
    ]
    constants = {"w0": integers(8, 8, 3, 3, most=1), "w1": integers(8, 8, 3, 3, most=1), **norm(8, "n0"), **norm(8, "n1")}
    made = check(graph(nodes, {"x": (1, 8, 9, 7)}, constants))
    assert keys(made) == ["n1-c8x9x7-k8x3x3-p1-bias-relu", "n1-c8x9x7-k8x3x3-p1-bias-add-relu"]


def test_inverted_residual() -> None:
    """Depthwise, ReLU6, and an addition without activation."""
    nodes = [
        node("Conv", "x w0", "a"),
        batch_norm("a", "b", "n0"),
        node("Clip", "b low high", "c"),
        node("Conv", "c w1", "d", pads=[1] * 4, group=12),
        batch_norm("d", "e", "n1"),
        node("Clip", "e low high", "f"),
        node("Conv", "f w2 b2", "g"),
        node("Add", "x g", "y"),
    ]
    constants = {"w0": integers(12, 4, 1, 1), "w1": integers(12, 1, 3, 3), "w2": integers(4, 12, 1, 1), "b2": integers(4)}
    constants |= {**norm(12, "n0"), **norm(12, "n1"), "low": np.float32(0), "high": np.float32(6)}
    made = check(graph(nodes, {"x": (1, 4, 10, 10)}, constants))
    assert keys(made)[1:] == ["n1-c12x10x10-k12x3x3-p1-g12-bias-relu6", "n1-c12x10x10-k4x1x1-bias-add"]


def test_scalings_by_channel() -> None:
    """Caffe's Scale, a factor, a shift: all of them in filters and bias; what stands before a convolution is not."""
    nodes = [
        node("Conv", "x w", "a"),
        node("Mul", "a k", "b"),
        node("Identity", "b", "bb"),
        node("Add", "k bb", "c"),
        node("Sub", "c two", "d"),
        node("Div", "d two", "e"),
        batch_norm("e", "f", "n"),
        node("Mul", "f k", "y"),
        batch_norm("x", "z", "m"),
    ]
    constants = {"w": integers(8, 4, 1, 1), "k": integers(8, 1, 1), "two": np.float32(2), **norm(8, "n"), **norm(4, "m")}
    made = check(graph(nodes, {"x": (1, 4, 5, 5)}, constants, "y z"))
    assert keys(made) == ["n1-c4x5x5-k8x1x1-bias"]


def test_bounds_and_padding_that_nodes_state() -> None:
    """As TensorFlow's and PyTorch's exporters write them: a Pad before the convolution, Constant nodes."""
    nodes = [
        helper.make_node("Constant", [], ["low"], value_float=0.0),
        helper.make_node("Constant", [], ["high"], value_float=6.0),
        helper.make_node("Constant", [], ["sides"], value=numpy_helper.from_array(np.array([0, 0, 1, 0, 0, 0, 2, 3]))),
        node("Pad", "x sides", "p"),
        node("Conv", "p w", "a", pads=[0, 1, 0, 0], strides=[2, 2]),
        node("Clip", "a low high", "b"),
        node("Pad", "b sides one", "q"),  # not with zeros
        node("Conv", "q v", "y"),
    ]
    model = graph(nodes, {"x": (1, 3, 6, 7)}, {"w": integers(4, 3, 3, 3), "v": integers(2, 4, 1, 1), "one": np.float32(1)})
    made = check(model)
    assert keys(made) == ["n1-c3x6x7-k4x3x3-s2-p1.1.2.3-relu6", "n1-c4x7x8-k2x1x1"]
    assert keys(made) == [str(layer.conv) for layer in layers_of(model, epilogues=True, products=True)]


@pytest.mark.parametrize(
    "attributes",
    [
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 3]},
        {"auto_pad": "VALID"},
        {"pads": [0, 1, 2, 0], "strides": [2, 1]},
        {"dilations": [2, 3], "pads": [2, 3, 2, 3], "group": 2},
    ],
    ids=str,
)
def test_padding_stride_dilation(attributes: dict[str, Any]) -> None:
    w = integers(6, 4 // attributes.get("group", 1), 3, 3)
    check(graph([node("Conv", "x w b", "y", **attributes)], {"x": (1, 4, 11, 8)}, {"w": w, "b": integers(6)}))


def test_two_convolutions_meet_in_one_addition() -> None:
    nodes = [node("Conv", "x w0", "a"), node("Conv", "x w1", "b"), node("Add", "a b", "c"), node("Relu", "c", "y")]
    made = check(graph(nodes, {"x": (1, 4, 6, 6)}, {"w0": integers(4, 4, 1, 1), "w1": integers(4, 4, 1, 1)}))
    assert keys(made) == ["n1-c4x6x6-k4x1x1", "n1-c4x6x6-k4x1x1-add-relu"]


def test_what_others_read_is_not_fused_away() -> None:
    nodes = [node("Conv", "x w", "a"), node("Relu", "a", "y"), node("Neg", "a", "z")]
    made = check(graph(nodes, {"x": (1, 4, 6, 6)}, {"w": integers(4, 4, 1, 1)}, "y z a"))
    assert keys(made) == ["n1-c4x6x6-k4x1x1"]


# --- products ------------------------------------------------------------------------------------------------------


def test_products() -> None:
    nodes = [
        node("Flatten", "x", "a"),
        node("Gemm", "a w0 b0", "b", transB=1, alpha=0.5, beta=2.0),
        node("Relu", "b", "c"),
        node("MatMul", "c w1", "d"),
        node("Add", "b1 d", "e"),
        node("Gemm", "e w2 b2", "y"),
    ]
    constants = {
        "w0": integers(9, 24),
        "b0": integers(9),
        "w1": integers(9, 33),
        "b1": integers(33),
        "w2": integers(33, 2),
        "b2": integers(1, 2),
    }
    made = check(graph(nodes, {"x": (3, 6, 2, 2)}, constants))
    assert keys(made) == ["n1-c24x1x3-k9x1x1-NHWC-bias-relu", "n1-c9x1x3-k33x1x1-NHWC-bias", "n1-c33x1x3-k2x1x1-NHWC-bias"]


def test_products_that_tvm_computes() -> None:
    """Of two computed matrices, of one turned, and of a stack of them."""
    nodes = [node("Gemm", "x w b", "y", transA=1), node("MatMul", "x t", "z"), node("Transpose", "x", "t"), node("MatMul", "s w", "u")]
    constants = {"w": integers(5, 4), "b": integers(6, 4)}
    made = check(graph([nodes[0], nodes[2], nodes[1], nodes[3]], {"x": (5, 6), "s": (2, 3, 5)}, constants, "y z u"))
    assert keys(made) == ["n1-c5x1x6-k4x1x1-NHWC"]


# --- concatenation, views, outputs -------------------------------------------------------------------------------------


def dense(batch: int) -> Any:
    """Blocks that grow by concatenation; of each value every use that can forbid to compute it in its place."""
    nodes = [
        node("Conv", "x w0", "a"),
        node("Concat", "x a", "b", axis=1),  # an input must be copied
        node("Conv", "b w1", "c"),
        node("Concat", "b c", "d", axis=1),
        node("Conv", "d w2", "e"),
        node("Concat", "e d k e", "f", axis=1),  # a constant, and one value twice
        node("Relu", "f", "y"),
        node("Concat", "c e", "g", axis=2),
        node("Neg", "g", "z"),
    ]
    constants = {"w0": integers(3, 2, 1, 1), "w1": integers(3, 5, 1, 1), "w2": integers(3, 8, 1, 1), "k": integers(batch, 2, 4, 5)}
    return graph(nodes, {"x": (batch, 2, 4, 5)}, constants, "y z e")


@pytest.mark.parametrize("batch", [1, 2])
def test_concatenations(batch: int) -> None:
    check(dense(batch))


def test_concatenations_are_computed_in_place() -> None:
    """DenseNet's blocks at batch 1: nothing is copied, and the workspace holds every value once."""
    nodes = [node("Conv", "x w0", "a"), node("Conv", "a w1", "b"), node("Concat", "a b", "c", axis=1), node("Conv", "c w2", "d")]
    nodes += [node("Concat", "c d", "e", axis=1), node("Conv", "e w3", "y")]
    constants = {"w0": integers(16, 1, 1, 1), "w1": integers(16, 16, 1, 1), "w2": integers(32, 32, 1, 1), "w3": integers(1, 64, 1, 1)}
    made = check(graph(nodes, {"x": (1, 1, 8, 8)}, constants))
    assert made.manifest.buckets[0].workspace == 64 * 8 * 8 * 4


def test_outputs_of_every_kind() -> None:
    """An input, a constant, a view of an input, of a value and of another output, the same value twice, a part of a concatenation."""
    nodes = [
        node("Identity", "x", "same"),
        node("Identity", "k", "fixed"),
        node("Flatten", "x", "flat"),
        node("Conv", "x w", "a"),
        node("Reshape", "a shape", "b"),
        node("Relu", "a", "c"),
        node("Concat", "a c", "d", axis=1),
        node("Identity", "a", "again"),
        node("Sigmoid", "d", "e"),
    ]
    constants = {"w": integers(2, 3, 1, 1), "k": integers(2, 2), "shape": np.array([0, -1], np.int64)}
    check(graph(nodes, {"x": (1, 3, 4, 4)}, constants, "same fixed flat a b again c d e"), exact=False)


# --- everything else -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nodes",
    [
        [node("MaxPool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])],
        [node("MaxPool", "x", "y", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1)],
        [node("MaxPool", "x", "y", kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER")],
        [node("MaxPool", "x", "y", kernel_shape=[2, 2], auto_pad="SAME_LOWER")],
        [node("MaxPool", "x", "y", kernel_shape=[2, 2], dilations=[2, 2])],
        [node("AveragePool", "x", "y", kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_LOWER")],
        [node("AveragePool", "x", "y", kernel_shape=[2, 2], strides=[2, 2])],
        [node("AveragePool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)],
        [node("AveragePool", "x", "y", kernel_shape=[3, 3], pads=[1, 0, 1, 1], count_include_pad=1)],
        [node("AveragePool", "x", "a", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]), node("Relu", "a", "y")],
        [node("GlobalAveragePool", "x", "a"), node("Flatten", "a", "b"), node("Softmax", "b", "y")],
        [node("LRN", "x", "y", size=5, alpha=0.5, beta=0.75, bias=1.0)],
        [node("LRN", "x", "y", size=3, alpha=0.5, beta=0.6, bias=2.0)],
        [node("Softmax", "x", "y", axis=1)],
        [node("Reshape", "x shape", "a"), node("Transpose", "a", "b", perm=[0, 2, 1, 3, 4]), node("Reshape", "b back", "y")],
        [node("HardSigmoid", "x", "a"), node("Mul", "a x", "b"), node("ReduceMean", "b", "y", axes=[2, 3], keepdims=0)],
        [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Reshape", "x whole", "a"), node("Tanh", "a", "y")],
        [node("Split", "x", "a b", axis=1), node("Sub", "a b", "y")],
    ],
    ids=lambda nodes: "-".join(one.op_type for one in nodes),
)
def test_other_operators(nodes: list[Any]) -> None:
    constants = {"shape": np.array([1, 3, 4, 9, 11]), "back": np.array([1, 12, 9, 11]), "zero": np.array(0), "whole": np.array([0, -1])}
    used = {name: array for name, array in constants.items() if any(name in one.input for one in nodes)}
    check(graph(nodes, {"x": (1, 12, 9, 11)}, used), exact=False)


def test_shapes_that_the_graph_computes() -> None:
    """As PyTorch's exporter writes a split in two halves and a flattening: what stands behind is found, by tuning too."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s one", "c"),
        node("Div", "c two", "h"),
        node("Unsqueeze", "h zero", "half"),
        node("Slice", "x zero half one1", "a"),
        node("Conv", "a w", "b"),
        node("Shape", "b", "t"),
        node("Gather", "t zero0", "n"),
        node("Unsqueeze", "n zero", "n1"),
        node("Concat", "n1 rest", "target", axis=0),
        node("Reshape", "b target", "d"),
        node("Gemm", "d g", "y"),
    ]
    constants = {"one": np.array(1), "two": np.array(2), "zero": np.array([0]), "one1": np.array([1]), "zero0": np.array(0)}
    constants |= {"rest": np.array([-1]), "w": integers(5, 4, 1, 1), "g": integers(5 * 3 * 3, 2)}
    model = graph(nodes, {"x": ("n", 8, 3, 3)}, constants)
    made = compiled(model, batches=[2])
    assert keys(made) == ["n2-c4x3x3-k5x1x1", "n1-c45x1x2-k2x1x1-NHWC"]
    assert keys(made) == [str(layer.conv) for layer in layers_of(model, batch=2, epilogues=True, products=True)]
    x = integers(2, 8, 3, 3)
    assert (made(x) == peer(model, {"x": x})[0]).all()


def test_integers_and_several_inputs() -> None:
    """An embedding of words, and a mask."""
    nodes = [node("Gather", "table words", "e"), node("Mul", "e mask", "f"), node("ReduceMax", "f", "y", axes=[1], keepdims=0)]
    nodes += [node("ArgMax", "f", "z", axis=2, keepdims=0), node("Greater", "f mask", "b")]
    model = graph(nodes, {"mask": ("n", 6, 1)}, {"table": integers(11, 7)}, "y z b")
    model.graph.input.append(helper.make_tensor_value_info("words", INT64, ["n", 6]))
    del model.graph.output[1:]
    model.graph.output.append(helper.make_tensor_value_info("z", INT64, None))
    model.graph.output.append(helper.make_tensor_value_info("b", onnx.TensorProto.BOOL, None))
    made = compiled(model, batches=[1, 3])
    feeds = {"mask": integers(4, 6, 1), "words": RANDOM.integers(0, 11, (4, 6))}
    found = made.run(feeds)
    for ours, theirs in zip(found.values(), peer(model, feeds), strict=True):
        assert ours.dtype == theirs.dtype and (ours == theirs).all()
    with pytest.raises(ValueError, match="the same number of images"):
        made.run({**feeds, "words": feeds["words"][:2]})


def test_control_flow_is_refused() -> None:
    branch = helper.make_graph([node("Abs", "x", "inner")], "branch", [], [helper.make_tensor_value_info("inner", FLOAT, [2])])
    nodes = [
        node("ReduceSum", "x", "s", keepdims=0),
        node("Cast", "s", "b", to=9),
        node("If", "b", "y", then_branch=branch, else_branch=branch),
    ]
    with pytest.raises(ModelError, match="must have no control flow; node 'If_y' is of type If"):
        compiled(graph(nodes, {"x": (2,)}))


def test_large_loops_are_parallel() -> None:
    """Those that outweigh waking the threads; each against ONNX Runtime, since a wrong split shows only here."""
    nodes = [
        node("MaxPool", "x", "a", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("LRN", "a", "b", size=5),
        node("AveragePool", "b", "c", kernel_shape=[3, 3], pads=[1] * 4),
        node("Mul", "c k", "d"),
        node("Concat", "d a", "e", axis=1),
        node("Transpose", "e", "y", perm=[0, 2, 3, 1]),
        node("GlobalAveragePool", "e", "z"),
        node("Softmax", "e", "s", axis=1),
    ]
    check(graph(nodes, {"x": (2, 16, 61, 67)}, {"k": integers(16, 1, 1)}, "y z s"), exact=False)


def test_convolutions_that_are_left_to_tvm() -> None:
    nodes = [
        node("Conv", "x w", "a"),  # one axis
        node("Unsqueeze", "a two", "b"),
        node("ConvTranspose", "b t", "c"),
        node("Abs", "s", "filter"),
        node("Conv", "c filter", "y"),  # computed filters
    ]
    constants = {"w": integers(4, 3, 3), "two": np.array([2]), "t": integers(4, 2, 3, 3)}
    made = check(graph(nodes, {"x": (1, 3, 9), "s": (5, 2, 1, 1)}, constants))
    assert not made.manifest.layers
    text = " ".join(made.manifest.skipped)
    assert "1-D convolution" in text and "ConvTranspose" in text and "its filters are no constants" in text


# --- batches -------------------------------------------------------------------------------------------------------


def classifier(batch: Any) -> Any:
    nodes = [
        node("Conv", "x w b", "a", pads=[1] * 4, strides=[2, 2]),
        node("Relu", "a", "c"),
        node("Reshape", "c shape", "d"),
        node("Gemm", "d g", "y"),
    ]
    rows = batch if isinstance(batch, int) else -1
    constants = {"w": integers(8, 3, 3, 3), "b": integers(8), "shape": np.array([rows, 8 * 4 * 4]), "g": integers(128, 5)}
    return graph(nodes, {"x": (batch, 3, 8, 8)}, constants)


@pytest.fixture(scope="module")
def buckets() -> tuple[Any, Any]:
    model = classifier("n")
    return model, compiled(model, batches=[4, 1, 2])


@pytest.mark.parametrize("images", range(1, 12))
def test_any_number_of_images(buckets: tuple[Any, Any], images: int) -> None:
    """Exactly one of the batches, the next larger, and more than the largest."""
    model, made = buckets
    assert made.batches == (1, 2, 4)
    x = integers(images, 3, 8, 8)
    [expected] = peer(model, {"x": x})
    assert (made(x) == expected).all()
    out = np.full((images, 5), np.nan, np.float32)
    assert made(x, out=out) is out and (out == expected).all()


def test_torch_tensors(buckets: tuple[Any, Any]) -> None:
    torch = pytest.importorskip("torch")
    model, made = buckets
    x = integers(3, 3, 8, 8)
    y = made(torch.from_numpy(x))
    assert isinstance(y, torch.Tensor) and (y.numpy() == peer(model, {"x": x})[0]).all()


def test_many_threads_on_one_model(buckets: tuple[Any, Any]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model, made = buckets
    images = [integers(1 + i % 5, 3, 8, 8) for i in range(24)]
    expected = [peer(model, {"x": x})[0] for x in images]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(made, images))
    assert all((ours == theirs).all() for ours, theirs in zip(found, expected, strict=True))


def test_another_batch_than_the_models_own() -> None:
    """Shapes that Reshape is given hold the old batch."""
    made = compiled(classifier(2), batches=[3])
    x = integers(3, 3, 8, 8)
    model = classifier(3)
    for tensor, other in zip(model.graph.initializer, classifier(2).graph.initializer, strict=True):
        assert tensor.name == other.name
    with pytest.raises(ValueError, match="`x` has shape"):
        made(x[:, :, :7])
    assert made(x).shape == (3, 5) and made.batches == (3,)


def test_a_model_whose_output_does_not_grow() -> None:
    model = graph([node("ReduceSum", "x", "y", keepdims=0)], {"x": ("n", 4)})
    made = compiled(model, batches=[2])
    x = integers(2, 4)
    assert made(x) == x.sum()
    with pytest.raises(ValueError, match=r"1 images must be one of the batches .*'y' does not grow with the batch"):
        made(x[:1])


def test_what_was_tuned_is_used(tmp_path: Path) -> None:
    """With the nearest layer's tile where another batch was tuned."""
    [conv, product] = [layer.conv for layer in layers_of(classifier("n"), epilogues=True, products=True)]
    im2win.tune(conv, trials=2, logs=tmp_path)
    made = compiled(classifier("n"), batches=[1, 2], logs=tmp_path)
    rungs = {layer.conv: layer.rung for layer in made.manifest.layers}
    assert rungs[str(conv)] == "exact" and rungs[str(conv.with_(batch=2))] == "nearest layer" and rungs[str(product)] == "default"


# --- compilation -----------------------------------------------------------------------------------------------------


def test_worker_processes_make_the_same_code(tmp_path: Path) -> None:
    machine = Machine.host()
    convs = [im2win.Conv2d.parse(key) for key in ("n1-c3x8x8-k8x3x3-bias-relu", "n1-c4x4x4-k4x1x1", "n1-c6x5x5-k6x3x3-g6")]
    jobs = [Job(conv, f"conv_{i}", machine, None, "exact", tmp_path / f"{i}.o") for i, conv in enumerate(convs)]
    alone = [build(job) for job in jobs]
    objects = [job.path.read_bytes() for job in jobs]
    assert in_processes(jobs, 1) == alone and [job.path.read_bytes() for job in jobs] == objects
    impossible = Job(convs[0].with_(dtype="int8"), "conv", machine, None, "exact", tmp_path / "x.o")
    with pytest.raises(ValueError, match="n1-c3x8x8-k8x3x3-int8-bias-relu: no algorithm computes"):
        in_processes([impossible], 1)


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_model_whose_images_do_not_lie_on_the_first_axis() -> None:
    model = graph([node("Reshape", "x flat", "y")], {"x": ("n", 4)}, {"flat": np.array([-1])})
    assert compiled(model, batches=[3])(integers(3, 4)).shape == (12,)
    with pytest.raises(ModelError, match=r"must hold the images of 'y' on its first axis alone .* shape \[12\] at batch 3"):
        compiled(model, batches=[1, 3])


def test_wrong_tensors(buckets: tuple[Any, Any]) -> None:
    _, made = buckets
    x = integers(1, 3, 8, 8)
    with pytest.raises(ValueError, match="`x` has dtype float64; it must be float32"):
        made(x.astype(np.float64))
    with pytest.raises(ValueError, match=r"`x` has shape \(1, 3, 8, 9\); it must be \(1, 3, 8, 8\)"):
        made(integers(1, 3, 8, 9))
    with pytest.raises(ValueError, match="not contiguous"):
        made(integers(1, 3, 8, 16)[..., ::2])
    with pytest.raises(ValueError, match="at least 1; they hold x: 0"):
        made(x[:0])
    with pytest.raises(ValueError, match=r"takes 1 inputs \(x\), not 2"):
        made(x, x)
    with pytest.raises(ValueError, match=r"inputs \(z\) must be exactly those of the model: x"):
        made.run({"z": x})
    with pytest.raises(ValueError, match=r"`x` .* must be a numpy array"):
        made([1.0])
    with pytest.raises(ValueError, match="`out` must have 1 tensors"):
        made(x, out=(x, x))
    with pytest.raises(ValueError, match=r"`y` has shape \(2, 5\)"):
        made(x, out=np.empty((2, 5), np.float32))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: graph([node("Relu", "x", "y")], {"x": (1, "h")}), r"must have fixed shapes but for the batch; 'x' has the shape \[1, h\]"),
        (lambda: graph([node("Conv", "x w", "y")], {"x": (1, 3, "h", 8)}, {"w": integers(2, 3, 1, 1)}), "must have fixed shapes"),
        (lambda: graph([node("Det", "x", "y")], {"x": (3, 3)}), "must have operators that TVM imports"),
        (lambda: graph([node("NonZero", "x", "y")], {"x": (3, 3)}), "must"),
    ],
)
def test_models_that_cannot_be_compiled(model: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        compiled(model())


@pytest.mark.parametrize("batches", [[], [0], [1.5], [True]])
def test_batches_out_of_range(batches: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"`batches` .* must be 1 to 64 integers, each at least 1"):
        compiled(classifier("n"), batches=batches)


def test_missing_weights(tmp_path: Path) -> None:
    model = classifier("n")
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    assert compiled(tmp_path / "m.onnx")(integers(1, 3, 8, 8)).shape == (1, 5)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(ModelError, match="must lie beside its external weights"):
        compiled(tmp_path / "m.onnx")


# --- files ---------------------------------------------------------------------------------------------------------


def test_export_and_load(buckets: tuple[Any, Any], tmp_path: Path) -> None:
    model, made = buckets
    path = made.export(tmp_path / "folder" / "model.so")
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.so", "model.so.json", "model.so.weights"]
    loaded = im2win.load_model(path, verify=True)
    x = integers(5, 3, 8, 8)
    assert (loaded(x) == peer(model, {"x": x})[0]).all()
    assert keys(loaded) == keys(made) and "batches 1, 2, 4" in repr(loaded)
    assert loaded.export(path) == path  # onto itself


def test_files_that_are_not_whole(buckets: tuple[Any, Any], tmp_path: Path) -> None:
    path = buckets[1].export(tmp_path / "model.so")
    manifest, weights = tmp_path / "model.so.json", tmp_path / "model.so.weights"
    good = {file: file.read_bytes() for file in (path, manifest, weights)}

    def fails(words: str, **options: Any) -> None:
        with pytest.raises(ArtefactError, match=words):
            im2win.load_model(path, **options)
        for file, content in good.items():
            file.write_bytes(content)

    weights.write_bytes(good[weights][:-1])
    fails("truncated, or not the weights")
    weights.write_bytes(bytes(len(good[weights])))
    fails("not the weights", verify=True)
    weights.unlink()
    fails("no weights there")
    path.write_bytes(good[path][:-1])
    fails("checksums differ")
    manifest.unlink()
    fails("no manifest there; `im2win compile` writes it")
    manifest.write_text("{")
    fails("not a readable manifest")
    manifest.write_text(json.dumps({**json.loads(good[manifest]), "schema": 99}))
    fails("schema 99 is not 1")
    manifest.write_text(json.dumps({**json.loads(good[manifest]), "odd": 1}))
    fails("not a manifest of im2win")
    manifest.write_text(json.dumps({**json.loads(good[manifest]), "isa": "neon9"}))
    fails("built for neon9")
    with pytest.raises(ArtefactError, match="load_model` loads it"):
        im2win.load(path)
    assert im2win.load_model(path).batches == (1, 2, 4)


ALONE = """
    import sys
    import numpy as np
    import im2win
    path, x, y = sys.argv[1:]
    model = im2win.load_model(path)
    results = model(np.load(x))
    np.savez(y, *(results if isinstance(results, tuple) else (results,)))
    assert not {"tvm", "onnx", "onnxruntime"} & set(sys.modules), "the runtime must do"
    assert "libtvm_compiler" not in open("/proc/self/maps").read()
"""


def in_new_process(path: Path, x: np.ndarray, folder: Path) -> list[np.ndarray]:
    """The outputs of an exported model in a process that has no compiler."""
    np.save(folder / "x.npy", x)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-c", textwrap.dedent(ALONE), str(path), str(folder / "x.npy"), str(folder / "y.npz")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "y.npz") as stored:
        return list(stored.values())


def test_without_the_compiler(buckets: tuple[Any, Any], tmp_path: Path) -> None:
    model, made = buckets
    x = integers(2, 3, 8, 8)
    [y] = in_new_process(made.export(tmp_path / "model.so"), x, tmp_path)
    assert (y == peer(model, {"x": x})[0]).all()


def test_the_texts_c_program_runs(buckets: tuple[Any, Any], tmp_path: Path) -> None:
    import importlib.util
    import re

    model, made = buckets
    text = (ROOT / "docs" / "deploy.md").read_text()
    [code] = (one for one in re.findall(r"^```cpp\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if "int main" in one)
    ffi, tvm = (Path(str(importlib.util.find_spec(name).origin)).parent for name in ("tvm_ffi", "tvm"))
    (tmp_path / "run.cc").write_text(code)
    [command] = re.findall(r"^// (g\+\+ .*)$", code, re.MULTILINE)
    words = command.replace("$FFI", str(ffi)).replace("$TVM", str(tvm)).split()
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    x = integers(1, 3, 8, 8)
    x.tofile(tmp_path / "x")
    library = made.export(tmp_path / "model.so")
    workspace = made.manifest.buckets[0].workspace
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{ffi / 'lib'}:{tvm / 'lib'}"}
    words = ["./run", str(library), str(workspace), "x", "y", str(x.size), "5"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert (np.fromfile(tmp_path / "y", np.float32).reshape(1, 5) == peer(model, {"x": x})[0]).all()


# --- real graphs ---------------------------------------------------------------------------------------------------

SMALL = {"shufflenet": "stored", "squeezenet": "random"}  # all of both with IM2WIN_ALL_MODELS=1: 10 to 80 seconds each


@pytest.mark.parametrize(("name", "batch"), [*((name, None) for name in light.NAMES), ("shufflenet", 4), ("inception_v2", 4)])
def test_tuned_are_exactly_the_layers_that_are_looked_up(name: str, batch: int | None) -> None:
    label, model = read(light.path(name))
    parts = take_apart(at_batch(model, label, batch), batch or 1)
    tuned = layers_of(light.path(name), batch=batch, epilogues=True, products=True)
    looked_up = [one.conv for one in parts.convolutions]
    assert {layer.conv: layer.count for layer in tuned} == {conv: looked_up.count(conv) for conv in looked_up}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", light.NAMES)
def test_real_models(name: str, tmp_path: Path) -> None:
    """With random weights, against ONNX Runtime; with the stored ones, against the stored output; both without the compiler."""
    everything = bool(os.environ.get("IM2WIN_ALL_MODELS"))
    if not everything and name not in SMALL:
        pytest.skip("set IM2WIN_ALL_MODELS=1")
    if everything or SMALL[name] == "random":
        random = with_random_weights(light.path(name))
        made = im2win.compile_model(random, tmp_path / "random.so")
        assert not made.manifest.skipped
        x = np.random.default_rng(1).normal(size=made.inputs[0].shape).astype(np.float32)
        for ours, theirs in zip(in_new_process(tmp_path / "random.so", x, tmp_path), peer(random, {made.inputs[0].name: x}), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
    if everything or SMALL[name] == "stored":
        im2win.compile_model(light.path(name), tmp_path / "stored.so")
        [y] = in_new_process(tmp_path / "stored.so", light.stored_input(name), tmp_path)
        np.testing.assert_allclose(y, light.stored_output(name), rtol=1e-3, atol=1e-7)  # as the package's own tests


# --- the command line, and the benchmark ---------------------------------------------------------------------------------


def test_compile_and_run(command: Any, tmp_path: Path) -> None:
    model, library = classifier("n"), tmp_path / "out" / "model.so"
    onnx.save(model, tmp_path / "model.onnx")
    done = command("compile", tmp_path / "model.onnx", "--out", library, "--batch", "1,4")
    assert done.status == 0, done.err
    assert "n4-c3x8x8-k8x3x3-s2-p1-bias-relu" in done.out and "batches 1, 4; tiles: 4 the model's tile" in done.out
    x = integers(2, 3, 8, 8)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.pb").write_bytes(numpy_helper.from_array(x).SerializeToString())
    [expected] = peer(model, {"x": x})
    for source, out in (("x.npy", "y.npy"), ("x.pb", "y.npz")):
        before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        done = command("run", library, "--input", f"x={tmp_path / source}", "--out", tmp_path / out, "--repeat", 1)
        assert before is None or os.sched_getaffinity(0) == before, "whoever counts CPUs afterwards counts all"
        assert done.status == 0 and "(2, 5)" in done.out and "median of 1" in done.out, done.err
    assert (np.load(tmp_path / "y.npy") == expected).all() and (np.load(tmp_path / "y.npz")["y"] == expected).all()
    (tmp_path / "text.pb").write_text("no tensor")
    (tmp_path / "text.npy").write_text("no array")
    for words, message in (
        (["run", library], "must name each input of the model once: x float32 [1, 3, 8, 8]"),
        (["run", library, "--input", "x"], "`--input` (='x') must be NAME=FILE"),
        (["run", library, "--input", f"x={tmp_path / 'text.npy'}"], "is no array of numpy"),
        (["run", library, "--input", f"x={tmp_path / 'text.pb'}"], "text.pb"),
        (["run", library, "--input", f"x={tmp_path / 'x.txt'}"], "must end in .npy or .pb"),
        (["run", library, "--input", f"x={tmp_path / 'x.npy'}", "--out", "y.csv"], "must end in .npz or .npy"),
        (["run", tmp_path / "nosuch.so"], "no manifest there"),
        (["compile", tmp_path / "model.onnx", "--out", library, "--batch", "one"], "must be integers with commas between them"),
        (["compile", tmp_path / "nosuch.onnx", "--out", library], "must be an existing file"),
    ):
        done = command(*words)
        assert done.status == 2 and message in done.err and done.err.count("\n") == 1, done.err


def test_the_benchmark_measures_and_judges(tmp_path: Path) -> None:
    from im2win.models.bench import measure

    onnx.save(classifier("n"), tmp_path / "model.onnx")
    im2win.compile_model(tmp_path / "model.onnx", tmp_path / "model.so", batches=[2], threads=1)
    row = measure("classifier", tmp_path / "model.onnx", tmp_path / "model.so", threads=1, rounds=1, warmup=0.01)
    assert not row.failed and not row.peers_failed and row.error is not None and row.error < 1e-6
    assert set(row.peers) == {"onnxruntime", "torch"} and row.ratio == row.peers[str(row.best_peer)] / row.ours_ms
    wrong = classifier("n")
    wrong.graph.initializer[0].CopyFrom(numpy_helper.from_array(integers(8, 3, 3, 3), "w"))
    onnx.save(wrong, tmp_path / "model.onnx")
    row = measure("classifier", tmp_path / "model.onnx", tmp_path / "model.so", ["onnxruntime"], 1, rounds=1, warmup=0.01)
    assert row.failed is not None and "differs from ONNX Runtime's" in row.failed and row.ratio is None
    with pytest.raises(ValueError, match="must be one of onnxruntime, torch"):
        measure("classifier", tmp_path / "model.onnx", tmp_path / "model.so", ["tensorrt"])
