"""The list of a model's convolutions and products: flops of every kind, what is fused, and why nothing more is."""

from __future__ import annotations

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from model_graphs import graph, helper, integers, node  # noqa: E402

from im2win.frontends.onnx.coverage import Covered, coverage, share_left  # noqa: E402


def covered(nodes: list[Any], inputs: dict[str, tuple[Any, ...]], weights: dict[str, Any], ours: str = "", **options: Any) -> list[Covered]:
    outputs = options.pop("outputs", "y")
    return list(coverage(graph(nodes, inputs, weights, outputs), options.pop("batch", None), set(ours.split()), products=True))


@pytest.mark.parametrize(
    ("operator", "data", "filters", "flops"),
    [
        ("Conv", (1, 4, 9), (6, 4, 3), 2 * 6 * 7 * 12),  # 1-D: 7 outputs a channel
        ("Conv", (2, 4, 5, 5), (6, 2, 3, 3), 2 * 2 * 6 * 9 * 18),  # two groups
        ("Conv", (1, 2, 4, 4, 4), (3, 2, 3, 3, 3), 2 * 3 * 8 * 54),
        ("ConvTranspose", (1, 4, 5, 5), (4, 3, 2, 2), 2 * 100 * 12),  # each of 100 inputs meets 3 x 2 x 2 weights
        ("MatMul", (5, 7), (7, 3), 2 * 5 * 3 * 7),
        ("Gemm", (5, 7), (7, 3), 2 * 5 * 3 * 7),
    ],
)
def test_flops_of_every_kind(operator: str, data: tuple[int, ...], filters: tuple[int, ...], flops: int) -> None:
    groups = {"group": data[1] // filters[1]} if operator == "Conv" else {}
    [one] = covered([node(operator, "x w", "y", **groups)], {"x": data}, {"w": integers(*filters)})
    assert (one.operator, one.ours, one.flops, one.fused, one.unfused) == (operator, False, flops, (), "")


def test_a_transposed_left_matrix_has_its_sums_on_the_first_axis() -> None:
    [one] = covered([node("Gemm", "x w", "y", transA=1)], {"x": (7, 5)}, {"w": integers(7, 3)})
    assert one.flops == 2 * 5 * 3 * 7


def test_integer_convolutions_are_listed() -> None:
    value, kinds = helper.make_tensor_value_info, onnx.TensorProto
    weights = [helper.make_tensor("w", kinds.INT8, [3, 2, 1, 1], [1] * 6)]
    body = helper.make_graph(
        [node("ConvInteger", "x w", "y")], "g", [value("x", kinds.INT8, [1, 2, 4, 4])], [value("y", kinds.INT32, None)], weights
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    [one] = coverage(model, None, set(), products=True)
    assert one.operator == "ConvInteger" and one.flops == 2 * 3 * 16 * 2


WEIGHTS = {"w": integers(4, 4, 1, 1), "v": integers(4, 4, 1, 1)}
X = {"x": (1, 4, 8, 8)}


def test_why_fusion_ends() -> None:
    nodes = [node("Conv", "x w", "a"), node("Relu", "a", "b"), node("MaxPool", "b", "y", kernel_shape=[2, 2])]
    [one] = covered(nodes, X, WEIGHTS, "Conv_a")
    assert one.ours and one.fused == ("Relu",) and one.unfused == "MaxPool is not fused"
    nodes = [node("Conv", "x w", "a"), node("Conv", "a v", "y"), node("Conv", "a w", "z")]
    first, *others = covered(nodes, X, WEIGHTS, "Conv_a Conv_y Conv_z", outputs="y z")
    assert first.unfused == "2 nodes read its output" and {each.unfused for each in others} == {"its output is the model's"}
    first, second = covered([node("Conv", "x w", "a"), node("Conv", "a v", "y")], X, WEIGHTS, "Conv_a Conv_y")
    assert first.unfused == "" and second.ours


def test_an_addition_belongs_to_one_convolution() -> None:
    nodes = [node("Conv", "x w", "a"), node("Conv", "x v", "b"), node("Add", "a b", "y")]
    first, second = covered(nodes, X, WEIGHTS, "Conv_a Conv_b")
    assert second.fused == ("Add",) and first.fused == () and first.unfused == "Add is fused with Conv_b"


def test_the_share_of_what_is_left() -> None:
    some, more, unknown = Covered("a", "Conv", True, 300), Covered("b", "Conv", False, 100), Covered("c", "Conv", False, None)
    assert share_left([some, more]) == 0.25 and share_left([some]) == 0.0
    assert share_left([some, unknown]) is None and share_left([]) is None


def test_a_symbolic_batch_and_what_is_computed_of_constants_alone() -> None:
    nodes = [node("Conv", "c w", "folded"), node("Conv", "x w", "y")]
    [one] = covered(nodes, {"x": ("N", 4, 8, 8)}, {**WEIGHTS, "c": integers(1, 4, 8, 8)}, batch=3)
    assert one.name == "Conv_y" and one.flops == 2 * 3 * 4 * 64 * 4


def test_convolutions_in_subgraphs_are_listed() -> None:
    value = helper.make_tensor_value_info
    branch = helper.make_graph([node("Conv", "x w", "inner")], "branch", [], [value("inner", 1, [1, 4, 8, 8])])
    choice = helper.make_node("If", ["flag"], ["z"], "choice", then_branch=branch, else_branch=branch)
    inputs = [value("x", 1, [1, 4, 8, 8]), value("flag", onnx.TensorProto.BOOL, [])]
    weights = [onnx.numpy_helper.from_array(integers(4, 4, 1, 1), "w")]
    body = helper.make_graph([node("Conv", "x w", "y"), choice], "g", inputs, [value("y", 1, None), value("z", 1, None)], weights)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    first, *others = coverage(model, None, {"Conv_y"}, products=True)
    assert first.ours and others == [Covered("Conv_inner", "Conv", False, None)] * 2
    assert share_left([first, *others]) is None
