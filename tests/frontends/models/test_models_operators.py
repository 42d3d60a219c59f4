"""Operators that are no convolutions, and transposed convolutions: on CPUs they have loops of their own. All against ONNX Runtime."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from model_graphs import check, compiled, graph, helper, integers, keys, node, onnx, peer

import im2win
from im2win.codegen.llvm import any_alignment, llvm_target
from im2win.device.cpu import Machine
from im2win.frontends.models import elementary, loops, pooling, products, transposes
from im2win.frontends.models.resizing import Axis
from im2win.frontends.onnx.layers import ModelError, layers_of
from im2win.runtime.tensors import ArgumentError

NAN, INF = math.nan, math.inf


def close(model: Any, feeds: dict[str, np.ndarray], rtol: float = 2e-6, atol: float = 2e-6) -> Any:
    """Compiles a model and compares its outputs for these inputs with ONNX Runtime's."""
    made = compiled(model)
    found = made.run(feeds)
    for (name, ours), theirs in zip(found.items(), peer(model, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=name)
    return made


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 3, shape).astype(np.float32)


def resize(output: str, scales: str = "", sizes: str = "", **stated: Any) -> Any:
    return helper.make_node("Resize", ["x", "", scales, sizes], [output], **stated)


# --- transposed convolutions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "filters", "stated"),
    [
        ((1, 8, 5, 6), (8, 4, 2, 2), {"strides": [2, 2]}),
        ((2, 6, 5, 6), (6, 5, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
        ((1, 4, 7, 5), (4, 3, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((1, 4, 5, 5), (4, 3, 3, 3), {}),
        ((1, 4, 5, 5), (4, 3, 3, 3), {"dilations": [2, 3], "pads": [1, 2, 0, 3]}),
        ((1, 8, 4, 5), (8, 3, 5, 3), {"strides": [3, 2], "pads": [2, 0, 1, 1], "group": 2}),
        ((1, 6, 6, 6), (6, 1, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 6}),
        ((1, 3, 4, 4), (3, 2, 2, 2), {"strides": [3, 3], "output_padding": [1, 2]}),
        ((1, 3, 4, 4), (3, 2, 1, 1), {"strides": [2, 1]}),
        ((1, 3, 9), (3, 4, 4), {"strides": [2], "pads": [1, 1]}),
    ],
)
def test_a_transposed_convolution_is_one_of_phases(shape: Any, filters: Any, stated: dict[str, Any]) -> None:
    constants = {"w": integers(*filters), "b": integers(filters[1] * stated.get("group", 1))}
    model = graph([node("ConvTranspose", "x w b", "y", **stated)], {"x": shape}, constants)
    made = check(model, accuracy="exact")
    assert not made.manifest.skipped
    assert keys(made) == [str(layer.conv) for layer in layers_of(model, epilogues=True, products=True)]


def test_what_is_fused_with_a_transposed_convolution() -> None:
    """A scaling by channel and the activation are; an addition is not, since its other operand has no phases."""
    constants = {"w": integers(4, 3, 2, 2), "b": integers(3), "s": integers(3, 1, 1)}
    nodes = [
        node("ConvTranspose", "x w b", "a", strides=[2, 2]),
        node("Mul", "a s", "c"),
        node("Relu", "c", "d"),
        node("ConvTranspose", "x w b", "e", strides=[2, 2]),
        node("Add", "d e", "y"),
    ]
    made = check(graph(nodes, {"x": (1, 4, 5, 6)}, constants), accuracy="exact")
    assert keys(made) == ["n1-c4x5x6-k12x1x1-bias-relu", "n1-c4x5x6-k12x1x1-bias"]


@pytest.mark.parametrize("stated", [{"auto_pad": "SAME_UPPER", "strides": [2, 2]}, {"strides": [2, 2], "dilations": [2, 2]}])
def test_transposed_convolutions_that_tvm_compiles(stated: dict[str, Any]) -> None:
    made = check(graph([node("ConvTranspose", "x w", "y", **stated)], {"x": (1, 3, 5, 5)}, {"w": integers(3, 2, 3, 3)}))
    assert not made.manifest.layers and len(made.manifest.skipped) == 1


@pytest.mark.parametrize("mode", ["CRD", "DCR"])
def test_depth_to_space(mode: str) -> None:
    check(graph([node("DepthToSpace", "x", "y", blocksize=3, mode=mode)], {"x": (2, 18, 4, 5)}, {}))


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [15, 16, 17, 31, 32, 197])
def test_softmax_along_the_last_axis(count: int) -> None:
    close(graph([node("Softmax", "x", "y", axis=-1)], {"x": (2, 3, count)}, {}), {"x": normal(2, 3, count)})


def test_softmax_of_numbers_without_end() -> None:
    """A masked element gets exactly 0; a row with NaN, with infinity, or with masked elements alone is NaN."""
    x = normal(5, 40)
    x[0, 3] = x[0, 39] = -INF
    x[1, 20], x[2, 5], x[3] = NAN, INF, -INF
    x[4] = np.linspace(-200, 200, 40)
    model = graph([node("Softmax", "x", "y", axis=-1)], {"x": x.shape}, {})
    found = compiled(model).run({"x": x})["y"]
    assert found[0, 3] == found[0, 39] == 0 and abs(found[0].sum() - 1) < 1e-6
    assert np.isnan(found[1:4]).all()
    np.testing.assert_allclose(found[4], peer(model, {"x": x})[0][4], rtol=1e-5, atol=1e-35)


@pytest.mark.parametrize(("shape", "axis"), [((2, 5, 7, 6), 1), ((3, 21), 0)])
def test_softmax_along_another_axis(shape: tuple[int, ...], axis: int) -> None:
    close(graph([node("Softmax", "x", "y", axis=axis)], {"x": shape}, {}), {"x": normal(*shape)})


@pytest.mark.parametrize(("shape", "axis"), [((2, 7, 96), -1), ((1, 4, 4, 33), -1), ((2, 3, 4, 5), 2)])
def test_layer_normalisation(shape: tuple[int, ...], axis: int) -> None:
    sizes = shape[axis:]
    nodes = [node("LayerNormalization", "x s b", "y", axis=axis, epsilon=1e-6)]
    model = graph(nodes, {"x": shape}, {"s": normal(*sizes), "b": normal(*sizes)}, opset=17)
    close(model, {"x": 1000 + normal(*shape)}, rtol=1e-3, atol=1e-3)


def test_group_normalisation() -> None:
    """ONNX infers no shape for its output."""
    nodes = [node("GroupNormalization", "x s b", "a", num_groups=3), node("Relu", "a", "y")]
    close(graph(nodes, {"x": (2, 6, 5, 7)}, {"s": normal(6), "b": normal(6)}, opset=21), {"x": normal(2, 6, 5, 7)}, rtol=1e-4, atol=1e-4)


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns", "depth"), [(2, 32, 3), (13, 33, 1), (197, 64, 20), (29, 197, 64), (49, 49, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_computed_matrices(rows: int, columns: int, depth: int, transposed: bool) -> None:
    right = (2, 3, columns, depth) if transposed else (2, 3, depth, columns)
    nodes = [node("Transpose", "z", "t", perm=[0, 1, 3, 2])] * transposed + [node("MatMul", "x t" if transposed else "x z", "y")]
    check(graph(nodes, {"x": (2, 3, rows, depth), "z": right}, {}))


@pytest.mark.parametrize(
    ("left", "right"), [((1, 8), (8, 40)), ((4, 8), (8, 7)), ((3, 4, 8), (8, 40)), ((2, 1, 4, 8), (3, 8, 40)), ((8,), (8, 40))]
)
def test_products_that_tvm_computes(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """One row, few columns, or factors of different counts."""
    check(graph([node("MatMul", "x z", "y")], {"x": left, "z": right}, {}))


def run(function: Any, machine: Machine, *arrays: np.ndarray) -> None:
    """Compiles a scheduled function for a machine and calls it."""
    target = tvm.target.Target({**llvm_target(machine).export(), **loops.OPTIONS})
    module = any_alignment(tvm.IRModule({"run": function.with_attr("global_symbol", "run")}), 1)
    tvm.compile(module, target)["run"](*(tvm_ffi.from_dlpack(array) for array in arrays))


@pytest.mark.parametrize(("lanes", "registers"), [(8, 16), (4, 32)])
def test_narrower_vectors(lanes: int, registers: int) -> None:
    """As AVX2 and NEON have them; the instructions are this machine's."""
    machine = replace(Machine.host(), lanes=lanes, registers=registers)
    left, right, out = integers(2, 13, 20), integers(2, 20, 21), np.full((2, 13, 21), NAN, np.float32)
    run(products.product(2, 13, 21, 20, False, machine), machine, left, right, out)
    assert (out == left @ right).all()
    turned = np.full((2, 21, 20), NAN, np.float32)
    run(transposes.transpose(2, 20, 21, lanes), machine, right, turned)
    assert (turned == right.swapaxes(1, 2)).all()


def test_a_transpose_with_other_readers_remains() -> None:
    nodes = [node("Transpose", "z", "t", perm=[0, 2, 1]), node("MatMul", "x t", "y"), node("Relu", "t", "u")]
    check(graph(nodes, {"x": (2, 5, 9), "z": (2, 33, 9)}, {}, outputs="y u"))


@pytest.mark.parametrize("rows", range(1, 40))
def test_register_tiles_fit(rows: int) -> None:
    machine = Machine.host()
    tile = products._rows_of(rows, machine)
    assert 1 <= tile <= rows and 2 * tile + 3 <= machine.registers


@pytest.mark.parametrize(
    ("shape", "axes", "matrix"),
    [
        ((2, 96, 7, 5), (0, 2, 3, 1), (2, 96, 35)),
        ((2, 7, 5, 96), (0, 3, 1, 2), (2, 35, 96)),
        ((1, 197, 3, 64), (0, 2, 1, 3), None),
        ((4, 5), (0, 1), None),
        ((1, 6, 1, 8), (3, 2, 1, 0), (1, 6, 8)),
        ((2, 3, 4, 5), (3, 2, 1, 0), None),
    ],
)
def test_which_permutations_transpose_matrices(shape: Any, axes: Any, matrix: Any) -> None:
    assert transposes.matrix_of(shape, axes) == matrix


@pytest.mark.parametrize("shape", [(2, 16, 4, 4), (1, 96, 7, 7), (3, 5, 3, 3), (2, 17, 5, 5), (1, 40, 19, 1)])
def test_between_channels_first_and_last(shape: tuple[int, ...]) -> None:
    nodes = [node("Transpose", "x", "y", perm=[0, 2, 3, 1]), node("Transpose", "y", "z", perm=[0, 3, 1, 2]), node("Relu", "z", "u")]
    check(graph(nodes, {"x": shape}, {}, outputs="y u"))


# --- pooling, resizing, slices ---------------------------------------------------------------------------------------

WINDOWS = [
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]},
    {"kernel_shape": [2, 3], "strides": [1, 2], "pads": [0, 2, 1, 1]},
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [1, 1], "strides": [2, 2]},
    {"kernel_shape": [3, 3], "strides": [4, 4], "pads": [2, 2, 2, 2]},
]


@pytest.mark.parametrize("stated", WINDOWS)
@pytest.mark.parametrize(("height", "width"), [(9, 11), (6, 5), (3, 40)])
def test_pooling(stated: dict[str, Any], height: int, width: int) -> None:
    nodes = [
        node("MaxPool", "x", "y", **stated),
        node("AveragePool", "x", "z", **stated),
        node("AveragePool", "x", "u", count_include_pad=1, **stated),
    ]
    close(graph(nodes, {"x": (2, 3, height, width)}, {}, outputs="y z u"), {"x": normal(2, 3, height, width)})


def test_rounded_up_windows() -> None:
    nodes = [node("MaxPool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)]
    check(graph(nodes, {"x": (1, 2, 8, 7)}, {}))


def test_bands_cover_all_rows() -> None:
    for rows, stride, kernel, top, height in itertools.product((1, 4, 9), (1, 2, 3), (1, 2, 5), (0, 1), (3, 9)):
        bands = list(pooling._bands(rows, stride, kernel, top, height))
        assert [row for first, last, _ in bands for row in range(first, last)] == list(range(rows))
        for first, last, inside in bands:
            for row in range(first, last):
                assert list(inside) == [u for u in range(kernel) if 0 <= row * stride - top + u < height]


@pytest.mark.parametrize(("coordinates", "rounding"), list(itertools.product(
    ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"], ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
)))  # fmt: skip
@pytest.mark.parametrize("size", [(8, 10), (9, 20), (12, 3), (1, 7)])
def test_nearest(coordinates: str, rounding: str, size: tuple[int, int]) -> None:
    stated = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    check(graph([resize("y", sizes="s", **stated)], {"x": (2, 3, 4, 5)}, {"s": np.array([2, 3, *size])}, opset=13))


@pytest.mark.parametrize("coordinates", ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"])
@pytest.mark.parametrize("size", [(8, 10), (16, 20), (9, 21), (3, 4), (1, 1), (4, 45)])
def test_linear(coordinates: str, size: tuple[int, int]) -> None:
    stated = {"mode": "linear", "coordinate_transformation_mode": coordinates}
    model = graph([resize("y", sizes="s", **stated)], {"x": (2, 3, 4, 5)}, {"s": np.array([2, 3, *size])}, opset=13)
    close(model, {"x": normal(2, 3, 4, 5)})


def test_resizing_by_scales() -> None:
    nodes = [resize("y", scales="s", mode="linear"), resize("z", scales="s", mode="nearest")]
    scales = np.array([1, 1, 2.5, 1.3], np.float32)
    close(graph(nodes, {"x": (1, 2, 5, 7)}, {"s": scales}, outputs="y z", opset=13), {"x": normal(1, 2, 5, 7)})


def test_when_an_axis_repeats() -> None:
    assert Axis((0, 0, 1, 1), (0.0,) * 4).repeats(2) == ((0, 0.0), (0, 0.0))
    assert Axis((-1, 0, 0, 1), (0.75, 0.25, 0.75, 0.25)).repeats(2) == ((-1, 0.75), (0, 0.25))
    assert Axis((0, 0, 1), (0.0,) * 3).repeats(2) is None and Axis((0, 1, 1, 1), (0.0,) * 4).repeats(2) is None


def test_slices_that_lie_side_by_side_share_memory() -> None:
    nodes = [
        node("Relu", "x", "r"),
        node("Split", "r n", "a b", axis=1),
        node("Slice", "r from to axis", "c"),
        node("Neg", "a", "y"),
        node("Add", "b c", "z"),
        node("Slice", "r one end last", "u"),  # columns: not side by side
    ]
    constants = {
        "n": np.array([2, 4]), "from": np.array([-5]), "to": np.array([-1]), "axis": np.array([1]),
        "one": np.array([1]), "end": np.array([3]), "last": np.array([3]),
    }  # fmt: skip
    check(graph(nodes, {"x": (1, 6, 3, 5)}, constants, outputs="y z u", opset=13))


def test_a_slice_with_computed_steps_is_no_view() -> None:
    """Its output may be declared with the size that steps of 1 do not give."""
    model = graph([node("Slice", "x from to axis steps", "s"), node("Relu", "s", "y")], {"x": (8, 4)}, {
        "from": np.array([0]), "to": np.array([6]), "axis": np.array([0]),
    })  # fmt: skip
    model.graph.input.append(helper.make_tensor_value_info("steps", onnx.TensorProto.INT64, [1]))
    del model.graph.value_info[:]
    model.graph.value_info.append(helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, [3, 4]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 4]))
    with pytest.raises(ModelError, match="only operators with loops of fixed size"):
        compiled(model)


def test_slices_of_inputs_and_constants() -> None:
    nodes = [node("Slice", "x from to axis", "y"), node("Slice", "k from to axis", "c"), node("Add", "x c", "z")]
    constants = {"from": np.array([1]), "to": np.array([2]), "axis": np.array([0]), "k": integers(3, 4)}
    check(graph(nodes, {"x": (3, 4)}, constants, outputs="y z"))


# --- elementary functions --------------------------------------------------------------------------------------------


def evaluated(operator: str, x: np.ndarray) -> np.ndarray:
    result: np.ndarray = compiled(graph([node(operator, "x", "y")], {"x": x.shape}, {}, opset=20)).run({"x": x})["y"]
    return result


def test_exp_reaches_zero_and_infinity() -> None:
    x = np.concatenate([np.linspace(-110, 95, 40001), [-INF, INF, NAN, 0, -87.33654, 88.72283, 88.73, -104]]).astype(np.float32)
    found = evaluated("Exp", x)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.exp(x.astype(np.float64)).astype(np.float32)
    assert found[-8] == 0 and found[-7] == INF and np.isnan(found[-6]) and found[-5] == 1 and found[-2] == INF
    usual = (expected > 1.2e-38) & (expected < INF)
    assert np.abs(found[usual] / expected[usual] - 1).max() < 4e-7
    np.testing.assert_allclose(found[expected <= 1.2e-38], expected[expected <= 1.2e-38], atol=3e-45)


@pytest.mark.parametrize(("operator", "error"), [("Tanh", 5e-7), ("Sigmoid", 3e-7), ("Erf", 5e-7), ("Gelu", 3e-6)])
def test_elementary_functions(operator: str, error: float) -> None:
    x = np.concatenate([np.linspace(-20, 20, 4001), [1e4, -1e4, NAN]]).astype(np.float32)
    model = graph([node(operator, "x", "y")], {"x": x.shape}, {}, opset=20)
    found, expected = compiled(model).run({"x": x})["y"], peer(model, {"x": x})[0]
    assert np.isnan(found[-1])
    np.testing.assert_allclose(found[:-1], expected[:-1], rtol=error, atol=error)


def test_other_types_keep_tvms_functions() -> None:
    assert set(elementary.LEGALIZATIONS) >= {"relax.exp", "relax.sigmoid"}
    x = np.linspace(-2, 2, 64).astype(np.float64)
    model = graph([node("Exp", "x", "y")], {}, {}, opset=20)
    model.graph.input.append(helper.make_tensor_value_info("x", onnx.TensorProto.DOUBLE, [64]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, [64]))
    np.testing.assert_allclose(compiled(model).run({"x": x})["y"], np.exp(x), rtol=1e-12)


# --- bound calls -----------------------------------------------------------------------------------------------------


def test_a_bound_model_reads_what_its_inputs_hold() -> None:
    made = compiled(graph([node("Relu", "x", "y")], {"x": (2, 3)}, {}))
    x, out = normal(2, 3), np.zeros((2, 3), np.float32)
    bound = made.bind(x, out=out)
    for _ in range(2):
        assert bound() is out and (out == np.maximum(x, 0)).all()
        x *= -1
    fresh = made.bind(x)
    assert (fresh() == np.maximum(x, 0)).all() and fresh.outputs is fresh()


def test_what_cannot_be_bound() -> None:
    made = im2win.compile_model(graph([node("Relu", "x", "y")], {"x": ("n", 3)}, {}), batches=[2])
    with pytest.raises(ArgumentError, match=r"3 images must be one of the batches \(2,\) to be bound"):
        made.bind(normal(3, 3))
    with pytest.raises(ArgumentError, match=r"`out` .* must not overlap"):
        x = normal(2, 3)
        made.bind(x, out=x)
