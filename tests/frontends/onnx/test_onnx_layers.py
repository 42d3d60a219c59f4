"""Reading convolutions from ONNX: the nine graphs that the onnx package carries, and small graphs for every rule."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from im2win.frontends.onnx.layers import ModelError, ModelLayers, Skipped, layers_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite

onnx = pytest.importorskip("onnx")
helper, FLOAT, FLOAT16, INT64 = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def tensor(name: str, shape: list[Any], dtype: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def weights(name: str, *shape: int, dtype: type = np.float32) -> Any:
    return onnx.numpy_helper.from_array(np.ones(shape, dtype), name)


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), outputs.split(), name=f"{operator}_{outputs.split()[0]}", **attributes)


def model(nodes: list[Any], inputs: list[Any], initializers: list[Any], outputs: tuple[str, ...] = ("y",), opset: int = 17) -> Any:
    graph = helper.make_graph(nodes, "small", inputs, [onnx.ValueInfoProto(name=name) for name in outputs], initializers)
    domains = [helper.make_opsetid("custom", 1)] if any(n.domain == "custom" for n in nodes) else []
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), *domains])


def one(x: tuple[Any, ...], w: tuple[int, ...], bias: bool = False, **attributes: Any) -> Any:
    """A model of a single Conv with input shape x and filter shape w."""
    initializers = [weights("w", *w), *([weights("b", w[0])] if bias else [])]
    return model([node("Conv", "x w b" if bias else "x w", "y", **attributes)], [tensor("x", list(x))], initializers)


def only(found: ModelLayers) -> Conv2d:
    assert not found.skipped
    [layer] = found
    return layer.conv


def reason(found: ModelLayers) -> str:
    assert not found.layers
    [skipped] = found.skipped
    return skipped.reason


# --- real graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes", "distinct"),  # nodes: occurrences of Conv in the file
    [
        *(("bvlc_alexnet", 5, 5), ("densenet121", 121, 67), ("inception_v1", 57, 49), ("inception_v2", 69, 38), ("resnet50", 53, 23)),
        *(("shufflenet", 49, 14), ("squeezenet", 26, 18), ("vgg19", 16, 9), ("zfnet512", 5, 4)),
    ],
)
def test_light_graphs_are_read_whole(name: str, nodes: int, distinct: int) -> None:
    path = LIGHT / f"light_{name}.onnx"
    found = layers_of(path)
    operators = [n.op_type for n in onnx.load(path).graph.node]
    assert sum(layer.count for layer in found) == operators.count("Conv") == nodes
    assert (len(found), found.skipped) == (distinct, ())


def test_no_light_graph_is_forgotten() -> None:
    assert len(list(LIGHT.glob("*.onnx"))) == 9


def test_resnet50_is_the_suite_layer_by_layer() -> None:
    found = layers_of(str(LIGHT / "light_resnet50.onnx"))
    assert [(layer.conv, layer.count) for layer in found] == [(layer.conv, layer.count) for layer in suite("resnet50")]
    assert sum(layer.count * layer.conv.flops for layer in found) == pytest.approx(8.17e9, rel=1e-3)


def test_vgg19_with_epilogues_has_the_shapes_of_the_vgg16_suite() -> None:
    assert [layer.conv for layer in layers_of(LIGHT / "light_vgg19.onnx", epilogues=True)] == [layer.conv for layer in suite("vgg16")]


def test_resnet50_with_epilogues_fuses_every_addition_once() -> None:
    found = layers_of(LIGHT / "light_resnet50.onnx", epilogues=True)
    assert all(layer.conv.bias for layer in found)  # 53 batch normalisations
    assert sum(layer.count for layer in found if layer.conv.residual) == 16  # 16 blocks
    # All but the four expansions that stand before a shortcut's convolution: that one fuses the Add.
    assert sum(layer.count for layer in found if layer.conv.activation == "relu") == 49


def test_fixed_batch_is_scaled() -> None:
    assert {layer.conv.batch for layer in layers_of(LIGHT / "light_shufflenet.onnx", batch=8)} == {8}


# --- attributes ----------------------------------------------------------------------------------------------------


def test_absent_attributes_have_the_defaults_of_the_specification() -> None:
    assert only(layers_of(one((2, 3, 9, 7), (4, 3, 3, 2)))) == Conv2d(2, 3, 9, 7, 4, (3, 2))


def test_all_attributes() -> None:
    source = one((1, 8, 20, 21), (6, 4, 3, 5), True, kernel_shape=[3, 5], strides=[2, 3], pads=[1, 2, 3, 4], dilations=[2, 1], group=2)
    assert only(layers_of(source)) == Conv2d(1, 8, 20, 21, 6, (3, 5), (2, 3), (1, 2, 3, 4), (2, 1), groups=2, bias=True)


def test_depthwise() -> None:
    assert only(layers_of(one((1, 8, 5, 5), (8, 1, 3, 3), group=8))).depthwise


@pytest.mark.parametrize(
    ("auto_pad", "size", "kernel", "stride", "dilation", "padding"),
    [
        ("VALID", 9, 3, 2, 1, (0, 0)),
        ("SAME_UPPER", 9, 3, 1, 1, (1, 1)),
        ("SAME_UPPER", 8, 3, 2, 1, (0, 1)),  # the odd element goes after
        ("SAME_LOWER", 8, 3, 2, 1, (1, 0)),  # and before
        ("SAME_LOWER", 8, 2, 1, 1, (1, 0)),
        ("SAME_UPPER", 8, 1, 2, 1, (0, 0)),  # a stride that skips pixels asks for no padding
        ("SAME_UPPER", 8, 3, 1, 2, (2, 2)),
    ],
)
def test_auto_pad(auto_pad: str, size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int]) -> None:
    attributes = {"strides": [stride] * 2, "dilations": [dilation] * 2}
    source = one((1, 1, size, size), (1, 1, kernel, kernel), auto_pad=auto_pad, **attributes)
    conv = only(layers_of(source))
    assert conv.padding == (padding[0], padding[0], padding[1], padding[1])
    if dilation > 1:
        return  # ONNX Runtime refuses to pad for a dilated window; the numbers above follow the specification
    # ONNX Runtime is the judge: these numbers as explicit pads give what auto_pad gives (small integers, so exactly).
    runtime = pytest.importorskip("onnxruntime")
    x = {"x": np.arange(size * size, dtype=np.float32).reshape(1, 1, size, size)}
    explicit = one((1, 1, size, size), (1, 1, kernel, kernel), pads=list(conv.padding), **attributes)
    for made in (source, explicit):
        made.ir_version = 10
        made.graph.output[0].CopyFrom(tensor("y", [None] * 4))
    given, ours = (runtime.InferenceSession(made.SerializeToString()).run(None, x)[0] for made in (source, explicit))
    np.testing.assert_array_equal(given, ours)
    assert given.shape == conv.output_shape


def test_notset_keeps_pads() -> None:
    assert only(layers_of(one((1, 1, 5, 5), (1, 1, 3, 3), auto_pad="NOTSET", pads=[0, 1, 2, 0]))).padding == (0, 1, 2, 0)


# --- where shapes come from ----------------------------------------------------------------------------------------


def test_filter_from_constant_node_and_from_graph_input() -> None:
    constant = helper.make_node("Constant", [], ["v"], value=weights("v", 5, 4, 1, 1))
    chain = [constant, node("Conv", "x w", "h"), node("Conv", "h v", "y")]
    found = layers_of(model(chain, [tensor("x", [1, 3, 8, 8]), tensor("w", [4, 3, 3, 3])], []), batch=2)
    assert [layer.conv for layer in found] == [Conv2d(2, 3, 8, 8, 4, 3), Conv2d(2, 4, 6, 6, 5, 1)]


@pytest.mark.parametrize("leading", ["N", None, -1])
@pytest.mark.parametrize("batch", [None, 4])
def test_symbolic_batch(leading: Any, batch: int | None) -> None:
    source = one((leading, 3, 8, 8), (4, 3, 3, 3))
    assert only(layers_of(source, batch)).batch == (batch or 1)
    assert source == one((leading, 3, 8, 8), (4, 3, 3, 3))  # the caller's model is left as it is


def test_symbolic_batch_goes_through_computed_shapes() -> None:
    """Shape -> Gather -> Concat -> Reshape is how PyTorch exports ``x.view(x.size(0) * 2, ...)``-like code."""
    numbers = [helper.make_tensor(name, INT64, [1], [value]) for name, value in (("zero", 0), ("six", 6), ("eight", 8), ("rest", -1))]
    nodes = [
        *(node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "n six eight rest", "t", axis=0)),
        *(node("Reshape", "x t", "r"), node("Conv", "r w", "y")),
    ]
    source = model(nodes, [tensor("x", ["N", 3, 16, 8])], [*numbers, weights("w", 2, 6, 3, 3)])
    assert only(layers_of(source, batch=4)) == Conv2d(4, 6, 8, 8, 2, 3)


def test_second_input_of_fixed_batch_does_not_scale_a_symbolic_one() -> None:
    nodes = [node("Conv", "x w", "y"), node("Relu", "state", "z")]
    source = model(nodes, [tensor("x", ["N", 3, 8, 8]), tensor("state", [1, 2, 2, 2])], [weights("w", 4, 3, 3, 3)], ("y", "z"))
    assert only(layers_of(source, batch=8)).batch == 8


def test_batch_lost_behind_an_unknown_operator_is_the_callers() -> None:
    nodes = [helper.make_node("Mystery", ["x"], ["h"], domain="custom"), node("Conv", "h w", "y")]
    source = model(nodes, [tensor("x", ["N", 3, 8, 8])], [weights("w", 4, 3, 3, 3)])
    assert reason(layers_of(source)) == "the shape of its input 'h' is unknown"
    source.graph.value_info.append(tensor("h", ["unknown", 3, 8, 8]))
    assert only(layers_of(source, batch=5)).batch == 5
    source.graph.input[0].CopyFrom(tensor("x", [2, 3, 8, 8]))
    assert only(layers_of(source, batch=6)).batch == 6


def test_functions_are_inlined() -> None:
    body = helper.make_function("custom", "Block", ["a", "f"], ["o"], [node("Conv", "a f", "o")], [helper.make_opsetid("", 17)])
    source = model([helper.make_node("Block", ["x", "w"], ["y"], domain="custom")], [tensor("x", [1, 3, 8, 8])], [weights("w", 4, 3, 3, 3)])
    source.functions.append(body)
    assert only(layers_of(source)) == Conv2d(1, 3, 8, 8, 4, 3)


def test_float16() -> None:
    source = model([node("Conv", "x w", "y")], [tensor("x", [1, 3, 8, 8], FLOAT16)], [weights("w", 4, 3, 3, 3, dtype=np.float16)])
    assert only(layers_of(source)).dtype == "float16"


def test_external_weights_need_not_be_there(tmp_path: Path) -> None:
    source = one((1, 3, 8, 8), (4, 3, 3, 3))
    path = tmp_path / "split.onnx"
    onnx.save(source, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    assert only(layers_of(path)) == Conv2d(1, 3, 8, 8, 4, 3)


def test_equal_problems_are_counted_under_the_first_name() -> None:
    chain = [node("Conv", "x w", "a", pads=[1] * 4), node("Conv", "a v", "b"), helper.make_node("Conv", ["a", "w"], ["y"], pads=[1] * 4)]
    source = model(chain, [tensor("x", [1, 3, 8, 8])], [weights("w", 3, 3, 3, 3), weights("v", 2, 3, 1, 1)], ("y", "b"))
    assert [(layer.name, layer.count) for layer in layers_of(source)] == [("Conv_a", 2), ("Conv_b", 1)]
    source.graph.node[0].name = ""  # an unnamed node goes by its output
    assert layers_of(source).layers[0].name == "a"


# --- epilogues -----------------------------------------------------------------------------------------------------

CONV = node("Conv", "x w", "c", pads=[1] * 4)
BATCH_NORM = node("BatchNormalization", "c s s s s", "n")
PLAIN = Conv2d(1, 3, 8, 8, 3, 3, padding=1)


def fused(*tail: Any, outputs: tuple[str, ...] = ("y",), opset: int = 17, extra: tuple[Any, ...] = ()) -> Conv2d:
    """What a Conv from x to c becomes with these nodes behind it."""
    constants = [weights("w", 3, 3, 3, 3), weights("s", 3), weights("k", 3, 1, 1), *extra]
    constants += [helper.make_tensor("zero", FLOAT, [], [0.0]), helper.make_tensor("six", FLOAT, [1], [6.0])]
    source = model([CONV, *tail], [tensor("x", [1, 3, 8, 8]), tensor("other", [1, 3, 8, 8])], constants, outputs, opset)
    assert only(layers_of(source)) == PLAIN  # without the option nothing is fused
    return only(layers_of(source, epilogues=True))


SILU = (node("Sigmoid", "c", "g"), node("Mul", "c g", "y"))
ADD = node("Add", "c other", "a")


@pytest.mark.parametrize(
    ("tail", "changes"),
    [
        ((node("Relu", "c", "y"),), {"activation": "relu"}),
        ((node("Clip", "c zero six", "y"),), {"activation": "relu6"}),
        ((node("Clip", "c zero", "y"),), {"activation": "relu"}),
        ((node("Clip", "c six", "y"),), {}),
        ((node("Clip", "c six six", "y"),), {}),
        ((node("LeakyRelu", "c", "y"),), {"activation": "leaky_relu0.01"}),
        (SILU, {"activation": "silu"}),
        ((SILU[0], node("Mul", "g c", "y")), {"activation": "silu"}),
        ((SILU[0], node("Mul", "g other", "z"), node("Mul", "c z", "y")), {}),  # gates another tensor
        ((BATCH_NORM, node("Relu", "n", "y")), {"bias": True, "activation": "relu"}),
        ((BATCH_NORM, node("Identity", "n", "y")), {"bias": True}),
        ((node("Relu", "c", "n"), node("BatchNormalization", "n s s s s", "y")), {"activation": "relu"}),
        ((node("BatchNormalization", "c s s s s", "y m v", training_mode=1),), {}),
        ((ADD, node("Relu", "a", "y")), {"residual": True, "activation": "relu"}),
        ((node("Sum", "other c", "a"), node("Relu", "a", "y")), {"residual": True, "activation": "relu"}),
        ((ADD, node("Sigmoid", "a", "g"), node("Mul", "a g", "y")), {"residual": True, "activation": "silu"}),
        ((BATCH_NORM, node("Add", "other n", "a"), node("Relu", "a", "y")), {"bias": True, "residual": True, "activation": "relu"}),
        ((node("Add", "c other", "y"),), {"residual": True}),
        ((node("Add", "c c", "a"), node("Relu", "a", "y")), {}),  # doubles it
        ((node("Add", "c zero", "a"), node("Relu", "a", "y")), {"bias": True, "activation": "relu"}),
        ((node("Mul", "c zero", "a"), node("Relu", "a", "y")), {"activation": "relu"}),
        ((node("Mul", "c k", "a"), node("Add", "a k", "y")), {"bias": True}),  # by channel, as Caffe's Scale
        ((node("Add", "c s", "a"), node("Relu", "a", "y")), {}),  # by column
        ((node("Sub", "zero c", "a"), node("Relu", "a", "y")), {}),
        ((BATCH_NORM, node("Neg", "k", "u"), node("Mul", "n u", "y")), {"bias": True}),
        ((node("Sum", "c other other", "a"), node("Relu", "a", "y")), {}),
    ],
    ids=lambda value: "-".join(n.op_type for n in value) if isinstance(value, tuple) else "+".join(value) or "nothing",
)
def test_epilogue(tail: tuple[Any, ...], changes: dict[str, Any]) -> None:
    assert fused(*tail) == PLAIN.with_(**changes)


def test_constant_nodes_bound_clip() -> None:
    bounds = (helper.make_node("Constant", [], ["low"], value_float=0.0), helper.make_node("Constant", [], ["high"], value_float=6.0))
    assert fused(*bounds, node("Clip", "c low high", "y")).activation == "relu6"


def test_attributes_bound_clip_in_old_operator_sets() -> None:
    assert fused(node("Clip", "c", "y", min=0.0, max=6.0), opset=9).activation == "relu6"
    assert fused(node("Clip", "c", "y", max=6.0), opset=9).activation == "none"


def test_swish_is_silu() -> None:
    assert fused(node("Swish", "c", "y"), opset=24).activation == "silu"
    assert fused(node("Swish", "c", "y", alpha=1.5), opset=24).activation == "none"


def test_value_that_others_read_is_not_fused_away() -> None:
    relu = node("Relu", "c", "y")
    assert fused(relu, outputs=("y", "c")) == PLAIN  # an output of the model
    assert fused(relu, node("Abs", "c", "z"), outputs=("y", "z")) == PLAIN  # a second node
    branch = helper.make_graph([node("Abs", "c", "inner")], "branch", [], [tensor("inner", [1, 3, 8, 8])])
    choice = node("If", "flag", "z", then_branch=branch, else_branch=branch)
    flag = helper.make_tensor("flag", onnx.TensorProto.BOOL, [], [True])
    assert fused(relu, choice, outputs=("y", "z"), extra=(flag,)) == PLAIN  # a node in a branch


def test_two_convolutions_in_one_add_fuse_it_once() -> None:
    nodes = [CONV, node("Conv", "x w b", "d", pads=[1] * 4), node("Add", "c d", "a"), node("Relu", "a", "y")]
    source = model(nodes, [tensor("x", [1, 3, 8, 8])], [weights("w", 3, 3, 3, 3), weights("b", 3)])
    later = PLAIN.with_(bias=True, residual=True, activation="relu")
    assert [layer.conv for layer in layers_of(source, epilogues=True)] == [PLAIN, later]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, "n2-c6x1x20-k4x1x3-g2"),
        ({"strides": [2], "pads": [1, 2], "dilations": [3]}, "n2-c6x1x20-k4x1x3-s1x2-p0.1.0.2-d1x3-g2"),
        ({"auto_pad": "SAME_LOWER", "strides": [2]}, "n2-c6x1x20-k4x1x3-s1x2-p0.1.0.0-g2"),
        ({"kernel_shape": [3], "pads": [1, 1]}, "n2-c6x1x20-k4x1x3-p0x1-g2"),
    ],
)
def test_a_1d_convolution_is_a_2d_one_of_one_row(attributes: dict[str, Any], expected: str) -> None:
    (layer,) = layers_of(one((2, 6, 20), (4, 3, 3), group=2, **attributes))
    assert layer.conv == Conv2d.parse(expected)


def test_what_is_fused_with_a_1d_convolution() -> None:
    nodes = [node("Pad", "x sides", "p"), node("Conv", "p w", "a"), node("Add", "a b", "c"), node("Add", "c r", "d")]
    nodes += [node("Relu", "d", "y")]
    stored = [weights("w", 3, 3, 3), weights("b", 3, 1), helper.make_tensor("sides", onnx.TensorProto.INT64, [6], [0, 0, 2, 0, 0, 0])]
    source = model(nodes, [tensor("x", [1, 3, 8]), tensor("r", [1, 3, 8])], stored)
    (layer,) = layers_of(source, epilogues=True)
    assert str(layer.conv) == "n1-c3x1x8-k3x1x3-p0.2.0.0-bias-add-relu"


# --- what is skipped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (one((1, 3, "l"), (4, 3, 3)), r"\[1, 3, 1, l\]; height and width must be fixed"),
        (one((1, 3, 8, 8, 8), (4, 3, 3, 3, 3)), "a 3-D convolution; only 1-D and 2-D"),
        (one((1, 3, "h", 8), (4, 3, 3, 3)), r"\[1, 3, h, 8\]; height and width must be fixed"),
        (one((1, 3, 8, None), (4, 3, 3, 3)), r"height and width must be fixed"),
        (one((1, 4, 8, 8), (4, 3, 3, 3)), "input has 4 channels and its filter takes 3 in each of 1 groups"),
        (one((1, 3, 8, 8), (4, 3, 3, 3), kernel_shape=[5, 5]), r"kernel_shape \[5, 5\] is not that of its filter \[4, 3, 3, 3\]"),
        (one((1, 3, 8, 8), (4, 3, 3, 3), pads=[-1, 0, 0, 0]), r"`padding` \(=-1\) must be at least 0"),
        (one((1, 3, 2, 2), (4, 3, 3, 3)), r"must fit the padded `height` \(=2\)"),
        (one((1, 6, 8, 8), (4, 2, 3, 3), group=3), r"`groups` \(=3\) must divide `out_channels` \(=4\)"),
        (one((1, 3, 8, 8), (4, 3, 3, 3), auto_pad="SAME"), "auto_pad 'SAME' is none of NOTSET, VALID, SAME_UPPER, SAME_LOWER"),
    ],
)
def test_skipped_with_its_reason(source: Any, words: str) -> None:
    assert re.search(words, reason(layers_of(source)))


def test_unsupported_dtype_is_skipped() -> None:
    double = onnx.TensorProto.DOUBLE
    source = model([node("Conv", "x w", "y")], [tensor("x", [1, 3, 8, 8], double)], [weights("w", 4, 3, 3, 3, dtype=np.float64)])
    assert reason(layers_of(source)) == "dtype double is not supported; only float32 and float16 and bfloat16 are"


def test_other_convolution_operators_are_skipped_beside_the_supported() -> None:
    odd = helper.make_node("Conv", ["x", "w"], ["z"], "odd", domain="custom")
    nodes = [node("ConvTranspose", "x t", "h"), node("Conv", "h w", "y"), odd]
    source = model(nodes, [tensor("x", [1, 3, 8, 8])], [weights("t", 3, 3, 3, 3), weights("w", 4, 3, 3, 3)], ("y", "z"))
    found = layers_of(source)
    assert [layer.conv for layer in found] == [Conv2d(1, 3, 10, 10, 4, 3)]
    assert found.skipped == (
        Skipped("ConvTranspose_h", "operator ConvTranspose is not supported; only Conv is"),
        Skipped("odd", "operator custom.Conv is not supported; only Conv is"),
    )


def test_convolution_in_a_subgraph_is_skipped() -> None:
    branch = helper.make_graph([node("Conv", "x w", "inner")], "branch", [], [tensor("inner", [1, 4, 6, 6])])
    other = helper.make_graph([node("Identity", "z", "same")], "other", [], [tensor("same", [1, 4, 6, 6])])
    choice = helper.make_node("If", ["flag"], ["y"], "choice", then_branch=branch, else_branch=other)
    inputs = [tensor("x", [1, 3, 8, 8]), tensor("z", [1, 4, 6, 6]), tensor("flag", [], onnx.TensorProto.BOOL)]
    found = layers_of(model([choice], inputs, [weights("w", 4, 3, 3, 3)]))
    assert found == ModelLayers((), (Skipped("Conv_inner", "it is in a subgraph of the If node 'choice'; only the main graph is read"),))


def test_batch_that_does_not_scale_is_skipped() -> None:
    nodes = [node("Reshape", "x t", "r"), node("Conv", "r w", "y")]
    shape = helper.make_tensor("t", INT64, [4], [3, 2, 8, 8])
    source = model(nodes, [tensor("x", [2, 3, 8, 8])], [shape, weights("w", 4, 2, 3, 3)])
    assert only(layers_of(source, batch=4)).batch == 6
    assert reason(layers_of(source, batch=1)) == "its batch 3 cannot be scaled from the model's 2 to 1"


# --- bad models ----------------------------------------------------------------------------------------------------


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.onnx", tmp_path):
        with pytest.raises(ModelError, match=rf"`source` \(='{path}'\) must be an existing file"):
            layers_of(path)


@pytest.mark.parametrize("content", [b"", b"plain text, no model at all", b"\x89PNG\r\n\x1a\n" + bytes(64), b"\0" * 64])
def test_not_an_onnx_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.onnx'\) must be a whole ONNX model; it is of another format or cut short"):
        layers_of(path)


def test_file_cut_anywhere(tmp_path: Path) -> None:
    """The operator set is written last, so that no beginning of a file passes for a whole one."""
    content = one((1, 3, 8, 8), (2, 3, 1, 1)).SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match="cut short"):
            layers_of(path)


def test_no_convolution() -> None:
    with pytest.raises(ModelError, match=r"`source` \(='small'\) must have a convolution; it has none among its 1 nodes"):
        layers_of(model([node("Relu", "x", "y")], [tensor("x", [1, 3, 8, 8])], []))


@pytest.mark.parametrize("batch", [0, -1, True, 2.0])
def test_bad_batch(batch: Any) -> None:
    with pytest.raises(ModelError, match=rf"`batch` \(={batch!r}\) must be an integer, at least 1"):
        layers_of(one((1, 3, 8, 8), (4, 3, 3, 3)), batch)


def test_failing_shape_inference_is_named() -> None:
    source = one((1, 3, 8, 8), (4, 3, 3, 3))
    source.opset_import[0].domain = "custom"  # and none for Conv
    with pytest.raises(ModelError, match="must pass ONNX shape inference; it fails"):
        layers_of(source)


def test_damaged_bytes_give_a_model_error_or_a_reading(tmp_path: Path) -> None:
    whole = (LIGHT / "light_squeezenet.onnx").read_bytes()
    path, random, failures = tmp_path / "damaged.onnx", np.random.default_rng(0), 0
    for _ in range(200):
        content = bytearray(whole)
        for position in random.integers(len(content), size=3):
            content[position] = random.integers(256)
        path.write_bytes(content)
        try:
            layers_of(path, epilogues=True)
        except ModelError as error:
            failures += 1
            assert "damaged.onnx" in str(error)
    assert 0 < failures < 200


def test_names_that_are_no_text() -> None:
    content = one((1, 3, 8, 8), (4, 3, 3, 3)).SerializeToString().replace(b"Conv", b"C\xff\xffv")
    with pytest.raises(ModelError, match="must follow the ONNX specification; reading it fails"):
        layers_of(onnx.load_model_from_string(content))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()  # a missing file is said before a missing package
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"install the extra im2win\[onnx\]"):
        layers_of(tmp_path / "model.onnx")
