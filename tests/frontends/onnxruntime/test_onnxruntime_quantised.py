"""Quantised models in ONNX Runtime with im2win's convolutions of integers: what is taken over, and outputs within a step of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_c import needs_compiler
from model_graphs import graph, helper, node, numpy_helper, onnx, ort, peer
from quantised_networks import FORMS, images, network, quantised, quantization

import im2win
from im2win.device.cpu import Machine
from im2win.frontends.onnxruntime import timing, writing
from im2win.frontends.onnxruntime.operators import Rewritten
from im2win.frontends.onnxruntime.timing import Found

pytestmark = needs_compiler
U8, S8 = np.uint8, np.int8


def rewritten(model: Any, folder: Path, **options: Any) -> Rewritten:
    return im2win.for_onnxruntime(model, folder / "ours.onnx", **{"accuracy": "exact", "guard": False, **options})


def run(made: Rewritten, feeds: dict[str, np.ndarray], threads: int = 2) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(made.library))
    return ort.InferenceSession(str(made.path), options, providers=["CPUExecutionProvider"]).run(None, feeds)


def ours_of(made: Rewritten) -> list[str]:
    return [one.op_type for one in onnx.load(made.path).graph.node if one.domain == "im2win"]


def keys(made: Rewritten) -> list[str]:
    return [layer.conv for layer in made.layers]


def same(made: Rewritten, model: Any, feeds: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    found, expected = run(made, feeds), peer(model, feeds)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert np.abs(ours.astype(np.float64) - theirs).max() <= tolerance
        assert np.unique(theirs).size > 4


# --- networks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "activations", "per_channel"), [FORMS[0], FORMS[3], *(pytest.param(*one, marks=pytest.mark.slow) for one in FORMS[1:3])]
)
def test_networks(form: str, activations: str, per_channel: bool, tmp_path: Path) -> None:
    """Every convolution is one node of integers, at any number of images; no pair of its own nodes is left around it."""
    model = quantised(form, activations, per_channel)
    made = rewritten(model, tmp_path)
    assert not made.skipped and ours_of(made) == [f"Conv_{activations}_{activations}"] * 5
    left = onnx.load(made.path)
    assert not any("Conv" in one.op_type for one in left.graph.node if one.domain != "im2win")
    read = {name for one in left.graph.node for name in one.input}
    assert {tensor.name for tensor in left.graph.initializer} <= read, "weights that nobody reads"
    convolutions = [one for one in made.operators if "Conv" in one.operator]
    assert len(convolutions) == 5 and all(one.ours and "QuantizeLinear" in one.fused for one in convolutions)
    [step] = [numpy_helper.to_array(one) for one in model.graph.initializer if one.name == "y_scale"]
    for count in (1, 3):
        same(made, model, {"x": images(count, 5)}, 1.001 * float(step))


def test_sums_of_dynamic_models_stay(tmp_path: Path) -> None:
    """Their zero points are computed in every run, and kernels have constant ones."""
    onnx.save(network(), tmp_path / "model.onnx")
    quantization.quantize_dynamic(tmp_path / "model.onnx", tmp_path / "dynamic.onnx", weight_type=quantization.QuantType.QInt8)
    with pytest.raises(ValueError, match="its zero points, or its output's scale, are no constants"):
        rewritten(tmp_path / "dynamic.onnx", tmp_path)


def test_the_guard_compares_layers_and_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path / "cache"))
    made = rewritten(quantised("QDQ", "uint8", True), tmp_path, guard=True)
    assert len(made.times) == 5 and not any(one.failed for one in made.times.values())
    assert all(one.ours_s > 0 and one.theirs_s > 0 for one in made.times.values())
    saturated = [name for name, one in made.times.items() if one.saturated]
    assert not saturated if {"avx512vnni", "avxvnni"} & set(Machine.host().features) else "Conv_a" in saturated
    assert made.whole is None or not made.whole.failed
    assert made.note or [one.name for one in made.layers] == [name for name, one in made.times.items() if one.faster]


def test_of_a_mixture_and_all_layers_the_faster_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between layers of both, ONNX Runtime transposes; a layer whose outputs differ stays with it in any case."""
    faster, slower, wrong = Found(1e-3, 2e-3, faster=True), Found(2e-3, 1e-3, slower=True), Found(failed="its outputs differ")
    monkeypatch.setattr(writing, "of_layers", lambda *_: [faster, slower, wrong, faster, faster])
    wholes: list[Found] = []
    monkeypatch.setattr(writing, "of_models", lambda *_, quantised: wholes.pop(0) if quantised else wrong)
    for found, layers in (([Found(1e-3, 2e-3, faster=True), slower], 4), ([Found(2e-3, 1e-3, slower=True), faster], 3)):
        wholes[:] = found
        made = rewritten(quantised("QOperator", "int8", True), tmp_path, guard=True)
        assert len(made.layers) == len(ours_of(made)) == layers and made.whole in found and not made.note
        assert len(made.skipped) == 5 - layers and "its outputs differ" in made.skipped[-1]
        run(made, {"x": images(1)})  # with the library that was written for it


# --- single patterns -------------------------------------------------------------------------------------------------


def patterns() -> tuple[Any, list[str]]:
    """A graph with one convolution for each row, of exact integers, and the problems that they become."""
    random = np.random.default_rng(3)
    constants: dict[str, Any] = {
        "one": np.float32(1), "half": np.float32(0.5), "two": np.float32(2), "low": np.float32(0), "high": np.float32(6),
        "zx": U8(5), "zs": S8(-3), "zw": S8(0), "zy": U8(100), "zn": S8(-8), "zi": U8(130),
        "w": random.integers(-4, 5, (6, 4, 3, 3)).astype(S8), "wu": random.integers(126, 135, (6, 4, 3, 3)).astype(U8),
        "wf": random.integers(-4, 5, (6, 4, 3, 3)).astype(np.float32), "b": random.integers(-20, 20, 6).astype(np.int32),
        "scales": np.array([0.5, 1, 2, 0.25, 0.5, 1], np.float32), "zeros": np.zeros(6, S8),
    }  # fmt: skip
    sides: dict[str, Any] = {"pads": [1] * 4}
    nodes = [
        node("QuantizeLinear", "x one zx", "u"), node("QuantizeLinear", "x one zs", "s"),
        node("DequantizeLinear", "u one zx", "ur"), node("DequantizeLinear", "s one zs", "sr"),
        node("DequantizeLinear", "w half zw", "wr"), node("DequantizeLinear", "b half", "br"),
        # what is added has the scale of the output: one node with a residual, from uint8 to int8
        node("Conv", "ur wr br", "c0", **sides), node("QuantizeLinear", "r two zn", "rq"), node("DequantizeLinear", "rq two zn", "rr"),
        node("Add", "c0 rr", "a0"), node("QuantizeLinear", "a0 two zn", "y0"),
        # an activation that is no saturation: float32 outputs
        node("Conv", "sr wr br", "c1", **sides), node("Clip", "c1 low high", "y1"),
        # one operator, with scales by channel
        node("QLinearConv", "s one zs w scales zeros two zn b", "y2", **sides),
        # sums
        node("ConvInteger", "u w zx zw", "y3", **sides),
        # filters of uint8 that fit int8, and filters that are quantised in the graph
        node("QLinearConv", "u one zx wu half zi two zy", "y4", **sides),
        node("QuantizeLinear", "wf half zw", "wq"), node("DequantizeLinear", "wq half zw", "wqr"), node("Conv", "sr wqr", "c5", **sides),
        node("Relu", "c5", "a5"), node("QuantizeLinear", "a5 two zy", "y5"),
    ]  # fmt: skip
    base = graph(nodes, {"x": (2, 4, 6, 7), "r": (2, 6, 6, 7)}, constants, "y1")
    kinds = onnx.TensorProto
    outputs = {"y0": kinds.INT8, "y2": kinds.INT8, "y3": kinds.INT32, "y4": kinds.UINT8, "y5": kinds.UINT8}
    base.graph.output.extend(helper.make_tensor_value_info(name, code, [2, 6, 6, 7]) for name, code in outputs.items())
    begin = "n2-c4x6x7-k6x3x3-p1"
    ends = [
        "uint8-out.int8-zero5-bias-add", "int8-out.float32-zerom3-bias-relu6", "int8-out.int8-zerom3-outzerom8-bias", "uint8-zero5",
        "uint8-out.uint8-zero5-outzero100", "int8-out.uint8-zerom3-outzero100-relu",
    ]  # fmt: skip
    return base, [f"{begin}-{end}" for end in ends]


def test_patterns(tmp_path: Path) -> None:
    model, expected = patterns()
    made = rewritten(model, tmp_path)
    assert keys(made) == expected and not made.skipped
    kinds = ["uint8_int8", "int8_float32", "int8_int8", "uint8_int32", "uint8_uint8", "int8_uint8"]
    assert ours_of(made) == [f"Conv_{kind}" for kind in kinds]
    random = np.random.default_rng(1)
    feeds = {"x": random.integers(-5, 6, (2, 4, 6, 7)).astype(np.float32), "r": random.integers(-40, 41, (2, 6, 6, 7)).astype(np.float32)}
    found, theirs = run(made, feeds), peer(model, feeds)
    for name, one, other in zip([value.name for value in model.graph.output], found, theirs, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        assert np.abs(one.astype(np.float64) - other).max() <= (1 if one.dtype in (U8, S8) else 0), name


def test_filters_that_do_not_fit_stay(tmp_path: Path) -> None:
    """uint8 filters that minus their zero point exceed int8."""
    constants = {
        "one": np.float32(1), "z": U8(0), "w": np.full((2, 2, 1, 1), 200, U8), "v": np.ones((2, 2, 1, 1), S8), "zs": S8(0),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x one z", "u"), node("QLinearConv", "u one z w one z one z", "a"),
        node("QLinearConv", "a one z v one zs one z", "b"), node("DequantizeLinear", "b one z", "y"),
    ]  # fmt: skip
    made = rewritten(graph(nodes, {"x": (1, 2, 3, 3)}, constants), tmp_path)
    assert len(made.layers) == 1 and made.skipped == ("QLinearConv_a: im2win cannot compute it with its integers",)


# --- comparisons -----------------------------------------------------------------------------------------------------


def test_integers_of_8_bits_may_differ_by_one() -> None:
    expected = np.arange(200, dtype=U8)
    assert not timing._differ(expected + U8(1), expected, share=0.0)
    wrong = expected.copy()
    wrong[7] = 9
    assert timing._differ(wrong, expected, share=0.0) and not timing._differ(wrong, expected)
    assert not timing._differ(expected + U8(7), expected, timing.QUANTISED_TOLERANCE)
    assert timing._differ(expected + U8(8), expected, timing.QUANTISED_TOLERANCE)
    sums = expected.astype(np.int32)
    assert timing._differ(sums + 1, sums, share=0.0)


def test_random_inputs_fill_the_range() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kinds = onnx.TensorProto
        value = helper.make_tensor_value_info
        body = helper.make_graph(
            [helper.make_node("Cast", ["x"], ["y"], to=kinds.FLOAT)], "g", [value("x", kinds.INT8, [4, 200])], [value("y", 1, [4, 200])]
        )
        path = Path(folder) / "cast.onnx"
        onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        feeds = timing._feeds(ort.InferenceSession(path, providers=["CPUExecutionProvider"]), 1)
    assert feeds["x"].dtype == S8 and feeds["x"].min() < -100 and feeds["x"].max() > 100
