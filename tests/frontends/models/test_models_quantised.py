"""Quantised ONNX models, as onnxruntime.quantization writes them: what is computed with integers, and outputs against ONNX Runtime's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_graphs import check, compiled, graph, helper, keys, node, numpy_helper, onnx, peer
from quantised_networks import FORMS, images, network, quantised, quantization

from im2win.frontends.onnx.coverage import coverage
from im2win.frontends.onnx.layers import layers_of

U8, S8 = np.uint8, np.int8
THREE, NOTHING = U8(3), S8(0)
SIX = {"l": np.float32(0), "h": np.float32(6)}


@pytest.mark.parametrize(("form", "activations", "per_channel"), FORMS)
def test_layers_are_requantising_convolutions(form: str, activations: str, per_channel: bool) -> None:
    model = quantised(form, activations, per_channel)
    layers = layers_of(model, epilogues=True, products=True)
    assert not layers.skipped
    assert all((one.conv.dtype, one.conv.out_dtype) == (activations, activations) for one in layers)
    assert [one.conv.layout for one in layers] == ["NCHW"] * 5 + ["NHWC"]
    plain = [one.conv for one in layers_of(model)]
    assert all(one.dtype == activations and one.out_dtype == "int32" for one in plain)
    listed = coverage(model, 1, {one.name for one in layers}, products=True)
    assert all(one.ours and "QuantizeLinear" in one.fused for one in listed)


@pytest.mark.parametrize(
    ("form", "activations", "per_channel"), [FORMS[0], FORMS[3], *(pytest.param(*one, marks=pytest.mark.slow) for one in FORMS[1:3])]
)
def test_outputs_are_within_a_step_of_onnxruntimes(form: str, activations: str, per_channel: bool) -> None:
    model = quantised(form, activations, per_channel)
    made = compiled(model)
    assert not made.manifest.skipped
    assert sorted(keys(made)) == sorted(str(one.conv) for one in layers_of(model, epilogues=True, products=True))
    [step] = [numpy_helper.to_array(one) for one in model.graph.initializer if one.name == "y_scale"]
    for seed in (1, 2):
        x = images(1, seed)
        found, expected = made.run({"x": x})["y"], peer(model, {"x": x})[0]
        assert np.abs(found - expected).max() <= 1.001 * step
        assert np.abs(expected).max() > 10 * step


# --- single patterns -------------------------------------------------------------------------------------------------


def layer(
    behind: list[Any], constants: dict[str, Any] | None = None, *, sy: float = 1.0, zy: Any = THREE, opset: int = 17, output: str = "v",
    wz: Any = NOTHING, **stated: Any,
) -> Any:  # fmt: skip
    """Integers exact in float32: x in units of 1, quantised, convolved, then `behind`, which reads `c` and `r` and ends in `output`."""
    random = np.random.default_rng(3)
    wtype = wz.dtype
    low, high = (-4, 4) if wtype == np.int8 else (int(wz) - 4, int(wz) + 4)
    weights = {
        "one": np.float32(1), "zx": U8(5), "w": random.integers(low, high, (6, 4, 3, 3)).astype(wtype), "sw": np.float32(0.5), "zw": wz,
        "b": random.integers(-20, 20, 6).astype(np.int32), "sb": np.float32(0.5), "sy": np.float32(sy), "zy": zy, **(constants or {}),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x one zx", "xq"), node("DequantizeLinear", "xq one zx", "xr"), node("DequantizeLinear", "w sw zw", "wr"),
        node("DequantizeLinear", "b sb", "br"), node("Conv", "xr wr br", "c", **{"pads": [1] * 4, **stated}), *behind,
        node("QuantizeLinear", f"{output} sy zy", "q"), node("DequantizeLinear", "q sy zy", "y"),
    ]  # fmt: skip
    return graph(nodes, {"x": (1, 4, 6, 7)}, weights, opset=opset)


RESIDUAL = [node("QuantizeLinear", "c2 sr zr", "rq"), node("DequantizeLinear", "rq sr zr", "r"), node("Add", "c r", "v")]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (layer([], output="c"), "uint8-out.uint8-zero5-outzero3-bias"),
        (layer([node("Relu", "c", "v")]), "uint8-out.uint8-zero5-outzero3-bias-relu"),
        (layer([node("Relu", "c", "v")], zy=U8(0)), "uint8-out.uint8-zero5-bias"),
        (layer([node("Relu", "c", "v")], zy=S8(-128)), "uint8-out.int8-zero5-outzerom128-bias"),
        (layer([node("Clip", "c l h", "v")], SIX, sy=6 / 252), "uint8-out.uint8-zero5-outzero3-bias-relu"),
        (layer([node("Clip", "c l h", "v")], SIX), "uint8-out.float32-zero5-bias-relu6"),
        (layer([node("HardSwish", "c", "v")]), "uint8-out.float32-zero5-bias-hardswish"),
        (layer([node("Relu", "c", "v")], wz=U8(128)), "uint8-out.uint8-zero5-outzero3-bias-relu"),
        (layer([], output="c", zy=np.uint16(3), opset=21), "uint8-out.float32-zero5-bias"),
    ],
    ids=["plain", "relu", "saturated", "saturated-int8", "clip", "clip-below", "hardswish", "uint8-filters", "uint16"],
)  # fmt: skip
def test_activations_before_quantisation(model: Any, expected: str) -> None:
    made = check(model, exact=False)
    assert keys(made) == [f"n1-c4x6x7-k6x3x3-p1-{expected}"]


@pytest.mark.parametrize(
    ("scale", "zero", "expected"),
    [(1.0, 0, "uint8-out.uint8-zero5-outzero3-bias-add"), (1.0, 2, "uint8-out.uint8-zero5-outzero1-bias-add"),
     (1.0, 9, "uint8-out.uint8-zero5-outzero3-bias-addsteps"), (0.5, 0, "uint8-out.uint8-zero5-outzero3-bias-addsteps")],
)  # fmt: skip
def test_residuals(scale: float, zero: int, expected: str) -> None:
    behind = [node("Slice", "x from to axis", "s"), node("Concat", "x s", "c2", axis=1), *RESIDUAL]
    constants = {"from": [0], "to": [2], "axis": [1], "sr": np.float32(scale), "zr": U8(zero)}
    made = check(layer(behind, constants), exact=False)
    assert keys(made) == [f"n1-c4x6x7-k6x3x3-p1-{expected}"]


OWN = [node("QuantizeLinear", "c sc zc", "cq"), node("DequantizeLinear", "cq sc zc", "cr"), *RESIDUAL[:2]]
WIDER = [node("Slice", "x from to axis", "s"), node("Concat", "x s", "c2", axis=1)]


@pytest.mark.parametrize(
    ("behind", "zc", "zr", "zy", "expected"),
    [
        ([node("Add", "cr r", "v")], U8(9), U8(3), U8(100), "uint8-out.uint8-zero5-outzero100-bias-addsteps"),
        ([node("Add", "r cr", "a"), node("Relu", "a", "v")], S8(-9), U8(0), U8(0), "uint8-out.uint8-zero5-bias-addsteps"),
        ([node("Add", "r cr", "a"), node("Relu", "a", "v")], U8(128), S8(7), S8(5), "uint8-out.int8-zero5-outzero5-bias-addsteps-relu"),
        ([node("Add", "cr r", "v")], U8(9), S8(3), U8(100), "uint8-out.uint8-zero5-outzero9-bias"),
        ([node("Add", "cr cr", "v")], U8(9), U8(3), U8(100), "uint8-out.uint8-zero5-outzero9-bias"),
        ([node("Mul", "cr r", "v")], U8(9), U8(3), U8(100), "uint8-out.uint8-zero5-outzero9-bias"),
    ],
    ids=["plain", "relu", "int8", "other-type", "itself", "product"],
)  # fmt: skip
def test_additions_of_tensors_with_steps_of_their_own(behind: list[Any], zc: Any, zr: Any, zy: Any, expected: str) -> None:
    """A convolution that saturates in its own steps before the addition, as its QuantizeLinear does; scales are powers of two."""
    constants = {
        "from": [0], "to": [2], "axis": [1], "sc": np.float32(0.125), "zc": zc, "sr": np.float32(0.5), "zr": zr,
    }  # fmt: skip
    made = check(layer([*WIDER, *OWN, *behind], constants, sy=0.25, zy=zy))
    assert keys(made) == [f"n1-c4x6x7-k6x3x3-p1-{expected}"]


@pytest.mark.parametrize("last", ["c d", "d c"])
def test_two_convolutions_meet_in_an_addition(last: str) -> None:
    """The later one adds what the earlier one wrote."""
    random = np.random.default_rng(3)
    weights = {
        "one": np.float32(1), "zx": U8(5), "w": random.integers(-4, 4, (6, 4, 3, 3)).astype(S8),
        "v": random.integers(-4, 4, (6, 4, 1, 1)).astype(S8), "half": np.float32(0.5), "zw": S8(0), "zy": U8(128),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x one zx", "xq"), node("DequantizeLinear", "xq one zx", "xr"), node("DequantizeLinear", "w half zw", "wr"),
        node("DequantizeLinear", "v half zw", "vr"), node("Conv", "xr wr", "a", pads=[1] * 4), node("QuantizeLinear", "a half zx", "aq"),
        node("DequantizeLinear", "aq half zx", "c"), node("Conv", "xr vr", "b"), node("QuantizeLinear", "b one zy", "bq"),
        node("DequantizeLinear", "bq one zy", "d"), node("Add", last, "e"), node("QuantizeLinear", "e half zy", "q"),
        node("DequantizeLinear", "q half zy", "y"),
    ]  # fmt: skip
    made = check(graph(nodes, {"x": (1, 4, 6, 7)}, weights))
    first, second = "n1-c4x6x7-k6x3x3-p1-uint8-out.uint8-zero5-outzero5", "n1-c4x6x7-k6x1x1-uint8-out.uint8-zero5-outzero128-addsteps"
    assert keys(made) == [first, second]


def test_a_computed_filter_and_others_are_computed_as_onnx_says() -> None:
    model = layer([node("Sigmoid", "c", "s"), node("Mul", "s s", "v")], sy=0.01, zy=S8(-7), wz=U8(250))
    assert keys(check(model, exact=False)) == ["n1-c4x6x7-k6x3x3-p1-uint8-out.float32-zero5-bias-sigmoid"]


@pytest.mark.parametrize("per_channel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_dynamic_quantisation(per_channel: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(network(), Path(folder) / "model.onnx")
        quantization.quantize_dynamic(
            Path(folder) / "model.onnx", Path(folder) / "out.onnx", per_channel=per_channel, weight_type=quantization.QuantType.QInt8
        )
        model = onnx.load(Path(folder) / "out.onnx")
    made, x = compiled(model), images(1)
    assert all("uint8" in key and "out" not in key for key in keys(made)) and len(keys(made)) == 6
    np.testing.assert_allclose(made.run({"x": x})["y"], peer(model, {"x": x})[0], rtol=0, atol=1e-5)


def test_products_of_integers() -> None:
    random = np.random.default_rng(5)
    constants = {
        "one": np.float32(1), "za": U8(4), "b": random.integers(-5, 5, (7, 9)).astype(S8), "sb": (np.arange(9) + 1).astype(np.float32) / 8,
        "zb": np.zeros(9, S8), "sy": np.float32(2), "zy": U8(100), "w": random.integers(-5, 5, (9, 3)).astype(S8), "zw": S8(0),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x one za", "a"), node("QLinearMatMul", "a one za b sb zb sy zy", "q"),
        node("MatMulInteger", "q w zy zw", "s"), helper.make_node("Cast", ["s"], ["y"], to=onnx.TensorProto.FLOAT),
    ]  # fmt: skip
    made = check(graph(nodes, {"x": (5, 7)}, constants))
    assert keys(made) == ["n1-c7x1x5-k9x1x1-uint8-out.uint8-zero4-outzero100-NHWC", "n1-c9x1x5-k3x1x1-uint8-zero100-NHWC"]
