"""What `compile` tunes and reports: layers without a record, JSON, and a model of which nothing is im2win's."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from model_graphs import graph, helper, integers, node, numpy_helper  # noqa: E402

import im2win  # noqa: E402
from im2win.bench.models import ModelRow  # noqa: E402
from im2win.cli.commands.models import untuned_text, whole_text  # noqa: E402
from im2win.frontends.models import compiler  # noqa: E402
from im2win.frontends.models.precision import Precision  # noqa: E402


def one() -> Any:
    return graph([node("Conv", "x w", "y")], {"x": (1, 4, 8, 8)}, {"w": integers(4, 4, 1, 1)})


def test_what_it_meets_is_tuned(tmp_path: Path) -> None:
    made = im2win.compile_model(one(), trials=2, logs=tmp_path / "logs")
    assert [layer.tier for layer in made.manifest.layers] == ["exact"]
    with pytest.raises(ValueError, match="`trials`"):
        im2win.compile_model(one(), trials=0)


def test_the_problems_of_its_kernels_are_tuned() -> None:
    found = {precision: str(*compiler._problems(one(), 1, precision)) for precision in get_args(Precision)}
    key = "n1-c4x8x8-k4x1x1"
    assert found == {"float32": key, "float16": f"{key}-float16-NHWC", "bfloat16": f"{key}-bfloat16-NHWC"}


def test_the_command_prints_json_and_advice(tmp_path: Path, command: Any) -> None:
    onnx.save(one(), tmp_path / "model.onnx")
    done = command("compile", tmp_path / "model.onnx", "--out", tmp_path / "model.so", "--no-compare")
    assert done.status == 0 and "ONNX Runtime" not in done.out and "1 layer has no tuning record of this device" in done.out
    done = command("compile", tmp_path / "model.onnx", "--out", tmp_path / "model.so", "--json")
    values = json.loads(done.out)
    assert done.status == 0 and values["schema"] == 1 and values["layers"][0]["conv"] == "n1-c4x8x8-k4x1x1" and values["left"] == []
    [only] = values["operators"]
    assert only == {"name": "Conv_y", "operator": "Conv", "ours": True, "flops": 2048, "fused": [], "unfused": "its output is the model's"}
    assert values["share_left"] == 0.0 and values["whole"]["ours_ms"] > 0 and values["whole"]["error"] < 1e-5


def test_the_advice_is_a_command_that_mends_it(tmp_path: Path, command: Any) -> None:
    onnx.save(one(), tmp_path / "the model.onnx")
    told = ["--logs", tmp_path / "logs", "--threads", "1", "--accuracy", "exact", "--batch", "2"]
    wanted = ["compile", tmp_path / "the model.onnx", "--out", tmp_path / "model.so", *told, "--json", "--no-compare"]
    (tmp_path / "logs").mkdir()
    advice = json.loads(command(*wanted).out)["advice"]
    count, _, said = advice.partition(": ")
    program, *arguments = shlex.split(said.removesuffix(", or --trials 64"))
    assert count == "1 layer has no tuning record of this device" and program == "im2win"
    assert command(*arguments, "--trials", "1").status == 0
    assert json.loads(command(*wanted).out)["advice"] == ""


@pytest.mark.parametrize("key", ["n1-c4x8x8-k4x1x1-float16-NHWC", "n1-c4x8x8-k4x1x1"])
def test_the_advice_tells_what_was_told(key: str) -> None:
    layers = [SimpleNamespace(conv=key, tier=tier) for tier in ("default", "nearest layer", "exact")]
    dtype = "float16" if "float16" in key else None
    text = untuned_text(layers, Path("m.onnx"), [1, 8], target="cuda", dtype=dtype, logs=None, threads=None, accuracy="float32")
    more = " --dtype float16 --layout NHWC" if dtype else ""
    commands = f"im2win tune m.onnx --target cuda{more} --batch 1 && im2win tune m.onnx --target cuda{more} --batch 8"
    assert text == f"2 layers have no tuning record of this device: {commands}, or --trials 64"
    assert untuned_text(layers[2:], Path("m.onnx"), [None]) == ""


def test_the_whole_is_compared_with_onnx_runtime() -> None:
    row = ModelRow("m.onnx", 1, ours_ms=2.0, peers={"onnxruntime": 3.0}, ratio=1.5)
    assert whole_text(row, Path("m.onnx")) == "the whole, 1 image: 2 ms, ONNX Runtime 3 ms, 1.50x"
    slower = whole_text(replace(row, batch=8, ours_ms=4.0, ratio=0.75), Path("my m.onnx"))
    assert slower.startswith("the whole, 8 images: 4 ms, ONNX Runtime 3 ms, 0.75x; ") and "`im2win onnxruntime 'my m.onnx' --out" in slower
    failed = whole_text(replace(row, ours_ms=None, ratio=None, failed="its output differs"), Path("m.onnx"))
    assert failed == "not compared with ONNX Runtime: its output differs"


def test_a_model_of_which_nothing_is_ours_is_a_warning(tmp_path: Path, command: Any) -> None:
    """A convolution whose filters are an input."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Conv", "x w", "y")], "computed", [value("x", 1, [1, 4, 8, 8]), value("w", 1, [4, 4, 1, 1])], [value("y", 1, [1, 4, 8, 8])]
    )
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "model.onnx")
    done = command("compile", tmp_path / "model.onnx", "--out", tmp_path / "model.so", "--no-compare")
    assert done.status == 0 and "im2win computes none of its convolutions" in done.err
    ours = im2win.load_model(tmp_path / "model.so").run({"x": np.ones((1, 4, 8, 8), "float32"), "w": np.ones((4, 4, 1, 1), "float32")})
    assert (next(iter(ours.values())) == 4).all()


def test_a_product_of_ours_hides_no_convolutions_that_are_not(tmp_path: Path, command: Any) -> None:
    """A float16 convolution before a float32 product, which im2win computes."""
    value, nodes = helper.make_tensor_value_info, [node("Conv", "x w", "a"), node("Cast", "a", "b", to=1), node("MatMul", "b m", "y")]
    weights = [numpy_helper.from_array(integers(4, 4, 1, 1).astype("float16"), "w"), numpy_helper.from_array(integers(8, 5), "m")]
    body = helper.make_graph(nodes, "half", [value("x", 10, [1, 4, 8, 8])], [value("y", 1, [1, 4, 8, 5])], weights)
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "model.onnx")
    done = command("compile", tmp_path / "model.onnx", "--out", tmp_path / "model.so", "--no-compare")
    assert done.status == 0 and "im2win computes none of its convolutions" in done.err and "MatMul_y" in done.out
    assert "its dtype float16 is not float32" in done.err and "% of the flops" in done.out
