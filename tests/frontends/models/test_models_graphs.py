"""Whole ONNX models: small graphs of integers, whose outputs must equal ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_graphs import (
    FLOAT,
    INT64,
    RANDOM,
    batch_norm,
    check,
    compiled,
    dense,
    graph,
    helper,
    integers,
    keys,
    node,
    norm,
    numpy_helper,
    onnx,
    peer,
)

from im2win.frontends.onnx.layers import ModelError, layers_of

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


def test_an_output_that_is_constant_is_written() -> None:
    """Also where nothing else reads it."""
    k = integers(2, 2)
    made = compiled(graph([node("Identity", "k", "fixed"), node("Relu", "x", "y")], {"x": (1, 3)}, {"k": k}, "fixed y"))
    out = np.full((2, 2), np.nan, np.float32), np.full((1, 3), np.nan, np.float32)
    made(np.zeros((1, 3), np.float32), out=out)
    assert (out[0] == k).all() and (out[1] == 0).all()


# --- everything else -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(9)
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


def test_1d_convolutions_are_ours() -> None:
    """With padding, groups, strides, dilation, folded scalings, a residual and an activation, between other operators of lines."""
    nodes = [
        node("Pad", "x sides", "p"), node("Conv", "p w0 b0", "a", strides=[2]), batch_norm("a", "b", "n0"), node("Relu", "b", "c"),
        node("Conv", "c w1", "d", pads=[2, 2], dilations=[2], group=4), node("Add", "d c", "e"), node("Relu", "e", "f"),
        node("Neg", "f", "g"), node("Conv", "g w2", "h"), node("Transpose", "h", "y", perm=[0, 2, 1]),
    ]  # fmt: skip
    constants = {"w0": integers(8, 3, 5), "b0": integers(8), "w1": integers(8, 2, 3), "w2": integers(5, 8, 1), **norm(8, "n0")}
    made = check(graph(nodes, {"x": (2, 3, 21)}, {**constants, "sides": np.array([0, 0, 1, 0, 0, 3])}))
    assert [layer.conv for layer in made.manifest.layers] == [
        "n2-c3x1x21-k8x1x5-s1x2-p0.1.0.3-bias-relu", "n2-c8x1x11-k8x1x3-p0x2-d1x2-g4-add-relu", "n2-c8x1x11-k5x1x1",
    ]  # fmt: skip


def test_convolutions_that_are_left_to_tvm() -> None:
    nodes = [
        node("Unsqueeze", "x two", "b"),
        node("ConvTranspose", "b t", "c", strides=[2, 2], dilations=[2, 2]),
        node("Abs", "s", "filter"),
        node("Conv", "c filter", "y"),  # computed filters
    ]
    constants = {"two": np.array([2]), "t": integers(3, 2, 3, 3)}
    made = check(graph(nodes, {"x": (1, 3, 9), "s": (5, 2, 1, 1)}, constants))
    assert not made.manifest.layers
    text = " ".join(made.manifest.skipped)
    assert "stride [2, 2] and dilation [2, 2] are both above 1" in text and "its filters are no constants" in text
