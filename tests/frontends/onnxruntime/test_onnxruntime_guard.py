"""ONNX Runtime keeps what im2win does not compute faster there: comparisons in a process of its own, and what is written after them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from compiled_c import needs_compiler  # noqa: E402
from model_graphs import batch_norm, graph, helper, integers, node, norm, peer  # noqa: E402

import im2win  # noqa: E402
from im2win.frontends.onnxruntime import guard  # noqa: E402
from im2win.frontends.onnxruntime.timing import Found, Pair  # noqa: E402

pytestmark = needs_compiler
FASTER, SLOWER = Found(1e-3, 2e-3, faster=True), Found(2e-3, 1e-3, slower=True)
X = {"x": integers(1, 8, 12, 12)}


def two() -> Any:
    """Two layers; the first with a normalisation, an addition and an activation."""
    nodes = [
        node("Conv", "x w0", "a", pads=[1, 1, 1, 1]), batch_norm("a", "b", "n0"), node("Add", "b x", "c"), node("Relu", "c", "d"),
        node("Conv", "d w1", "y"),
    ]  # fmt: skip
    return graph(nodes, {"x": (1, 8, 12, 12)}, {"w0": integers(8, 8, 3, 3), "w1": integers(4, 8, 1, 1), **norm(8, "n0")})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Callable[..., list[int]]:
    """Sets what comparisons find, in the order of the pairs. Returns how many pairs each was asked for."""

    def use(*found: Found) -> list[int]:
        asked: list[int] = []
        left = list(found)

        def compared(pairs: list[Pair], library: Path, threads: int, step: Any) -> list[Found]:
            asked.append(len(pairs))
            assert library.is_file() and all(Path(pair.original).is_file() and Path(pair.ours).is_file() for pair in pairs)
            return [left.pop(0) for _ in pairs]

        monkeypatch.setattr(guard, "compared", compared)
        return asked

    return use


def rewritten(folder: Path, **options: Any) -> Any:
    return im2win.for_onnxruntime(two(), folder / "ours.onnx", **options)


def domains(path: Path) -> list[str]:
    return [one.domain or one.op_type for one in onnx.load(path).graph.node]


def test_the_process_compares_layers_and_the_whole(cache: Path, tmp_path: Path) -> None:
    model = two()
    made = im2win.for_onnxruntime(model, tmp_path / "ours.onnx")
    assert set(made.times) == {"Conv_a", "Conv_y"} and all(one.ours_s > 0 and one.theirs_s > 0 for one in made.times.values())
    faster = [name for name, one in made.times.items() if one.faster]
    assert made.note or [one.name for one in made.layers] == faster
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(made.library))
    ours = ort.InferenceSession(made.path, options, providers=["CPUExecutionProvider"]).run(None, X)
    assert np.allclose(ours[0], peer(model, X)[0], rtol=1e-4, atol=1e-3)


def test_the_slower_layer_stays(finds: Any, tmp_path: Path) -> None:
    asked = finds(SLOWER, FASTER, FASTER)
    made = rewritten(tmp_path)
    assert asked == [2, 1] and [one.name for one in made.layers] == ["Conv_y"] and made.whole == FASTER
    assert domains(made.path) == ["Conv", "BatchNormalization", "Add", "Relu", "im2win"]
    assert any("ONNX Runtime is as fast or faster (1.000 ms, im2win 2.000 ms)" in line for line in made.skipped)


def test_nothing_faster_writes_the_original(finds: Any, tmp_path: Path) -> None:
    finds(SLOWER, Found(1e-3, 1e-3))
    made = rewritten(tmp_path)
    assert made.note.startswith("no layer is faster") and not made.layers and "im2win" not in domains(made.path)


def test_where_nothing_can_be_compared_it_is_said(finds: Any, tmp_path: Path) -> None:
    finds(Found(failed="it crashed"), Found(failed="it crashed"))
    assert rewritten(tmp_path).note == "nothing could be compared (it crashed): the model is the original"


def test_an_older_onnxruntime_has_threads_for_each_session(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from im2win.frontends.onnxruntime import timing

    monkeypatch.delattr(ort, "set_global_thread_pool_sizes")
    seen: list[Any] = []
    monkeypatch.setattr(timing, "_compared", lambda library, pair, threads: seen.append(threads) or Found())
    timing.main({"threads": 2, "library": "none.so", "pairs": [{"original": "a", "ours": "b"}]})
    assert seen == [2] and json.loads(capsys.readouterr().out)["failed"] == ""


def test_slower_as_a_whole_writes_the_original(finds: Any, tmp_path: Path) -> None:
    finds(FASTER, FASTER, SLOWER)
    made = rewritten(tmp_path)
    assert made.note.startswith("slower as a whole (2.000 ms, ONNX Runtime 1.000 ms)") and made.growth == 0
    assert "im2win" not in domains(made.path)


@pytest.mark.parametrize(
    ("wrong", "differs"), [(0, False), (1, False), (2, True), (100, True)], ids=["equal", "a tie of a hundred", "more", "all"]
)
def test_indices_may_differ_where_rounding_decides_a_tie(wrong: int, differs: bool) -> None:
    from im2win.frontends.onnxruntime import timing

    expected = np.arange(100, dtype=np.int64)
    found = np.where(expected < wrong, expected + 1, expected)
    assert timing._differ(found, expected) is differs
    assert not timing._differ(expected[:0], expected[:0]) and timing._differ(expected > 0, expected > 2)


def test_other_outputs_are_not_used(finds: Any, tmp_path: Path) -> None:
    finds(Found(failed="its outputs differ from ONNX Runtime's"), FASTER, FASTER)
    assert [one.name for one in rewritten(tmp_path).layers] == ["Conv_y"]


def test_comparisons_are_kept_and_disturbed_ones_are_not(finds: Any, tmp_path: Path) -> None:
    finds(Found(1e-3, 2e-3, faster=True, disturbed=True), FASTER, FASTER)
    rewritten(tmp_path)
    asked = finds(FASTER, FASTER)
    rewritten(tmp_path)
    assert asked == [1, 1]  # one layer, and the whole


def test_the_whole_is_kept_for_equal_models_on_equal_inputs(finds: Any, tmp_path: Path) -> None:
    model = two()
    finds(FASTER, FASTER, FASTER)
    made = im2win.for_onnxruntime(model, tmp_path / "ours.onnx")
    asked = finds()
    again = im2win.for_onnxruntime(model, tmp_path / "ours.onnx")
    assert asked == [0] and again.whole == made.whole == FASTER and [one.conv for one in again.layers] == [one.conv for one in made.layers]
    asked = finds(FASTER)
    im2win.for_onnxruntime(model, tmp_path / "ours.onnx", inputs=X)
    assert asked == [0, 1]
    asked = finds(SLOWER)
    assert rewritten(tmp_path).whole == SLOWER and asked == [0, 1], "other weights"


def test_without_a_guard_or_onnxruntime_nothing_is_compared(finds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = finds()
    assert len(rewritten(tmp_path, guard=False).layers) == 2
    monkeypatch.setattr("im2win.frontends.onnxruntime.operators.missing", lambda: "onnxruntime is not installed")
    made = rewritten(tmp_path)
    assert asked == [] and len(made.layers) == 2 and made.note == "onnxruntime is not installed"


def test_a_process_that_dies_costs_its_pair_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models do not exist: each pair fails by itself; a library that is none ends nothing either."""
    found = guard.compared([Pair("none.onnx", "none.onnx")] * 2, tmp_path / "none.so", 1, lambda done, of: None)
    assert len(found) == 2 and all(one.failed for one in found)
    monkeypatch.setattr(guard.sys, "executable", "/bin/false")
    found = guard.compared([Pair("none.onnx", "none.onnx")] * 2, tmp_path / "none.so", 1, lambda done, of: None)
    assert [one.failed for one in found] == ["ONNX Runtime's process ended with status 1"] * 2


def test_what_it_meets_is_tuned(finds: Any, tmp_path: Path) -> None:
    finds(FASTER, FASTER, FASTER)
    made = rewritten(tmp_path, trials=2, logs=tmp_path / "logs")
    assert [one.tier for one in made.layers] == ["exact", "exact"]


def test_the_command_prints_json(finds: Any, tmp_path: Path, command: Any) -> None:
    finds(FASTER, SLOWER, FASTER)
    onnx.save(two(), tmp_path / "model.onnx")
    done = command("onnxruntime", tmp_path / "model.onnx", "--out", tmp_path / "ours.onnx", "--json")
    values = json.loads(done.out)
    assert done.status == 0 and [one["name"] for one in values["layers"]] == ["Conv_a"] and values["times"]["Conv_y"]["slower"]
    finds(SLOWER)
    done = command("onnxruntime", tmp_path / "model.onnx", "--out", tmp_path / "ours.onnx", "--no-guard")
    assert done.status == 0 and "2 convolutions on im2win" in done.out and "2 layers have no tuning record" in done.out


def test_a_whole_that_cannot_be_compared_is_a_warning(finds: Any, tmp_path: Path) -> None:
    finds(FASTER, FASTER, Found(failed="its input x has no one shape"))
    made = rewritten(tmp_path)
    assert made.note == "not compared as a whole: its input x has no one shape" and len(made.layers) == 2


def test_a_whole_that_fails_writes_the_original(finds: Any, tmp_path: Path) -> None:
    finds(FASTER, FASTER, Found(failed="ONNX Runtime's process ended with status -11"))
    made = rewritten(tmp_path)
    assert "status -11): the model is the original" in made.note and not made.layers and "im2win" not in domains(made.path)


def test_the_report_says_what_is_fused_and_what_share_is_left(finds: Any, tmp_path: Path, command: Any) -> None:
    finds(FASTER, SLOWER, FASTER)
    made = rewritten(tmp_path)
    first, second = made.operators
    assert first.ours and first.fused == ("BatchNormalization", "Add", "Relu") and first.unfused == "" and not second.ours
    assert first.flops == 2 * 8 * 144 * 72 and second.flops == 2 * 4 * 144 * 8
    assert made.as_dict()["share_left"] == second.flops / (first.flops + second.flops)
    onnx.save(two(), tmp_path / "model.onnx")
    done = command("onnxruntime", tmp_path / "model.onnx", "--out", tmp_path / "ours.onnx", "--no-guard")
    assert "0.0% of the flops of convolutions and products are not im2win's" in done.out and "its output is the" in done.out


def test_the_whole_is_compared_on_given_inputs(cache: Path, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input whose name numpy could not store, and an index that random numbers would not reach."""
    nodes = [node("Gather", "table file", "r"), node("Conv", "r w", "y")]
    value, kinds = helper.make_tensor_value_info, onnx.TensorProto
    weights = [onnx.numpy_helper.from_array(integers(5, 8, 12, 12), "table"), onnx.numpy_helper.from_array(integers(4, 8, 1, 1), "w")]
    body = helper.make_graph(nodes, "g", [value("file", kinds.INT64, [2])], [value("y", 1, [2, 4, 12, 12])], weights)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    monkeypatch.setattr("im2win.frontends.onnxruntime.writing.of_layers", lambda model, layers, *_: [FASTER] * len(layers))
    made = im2win.for_onnxruntime(model, tmp_path / "out.onnx", inputs={"file": np.array([4, 2])})
    assert made.whole is not None and not made.whole.failed
    with pytest.raises(ValueError, match=r"`inputs` \(=x\) must name each input of the model once: file"):
        im2win.for_onnxruntime(model, tmp_path / "out.onnx", inputs={"x": 1})
    onnx.save(model, tmp_path / "model.onnx")
    np.save(tmp_path / "index.npy", np.array([7, 2]))  # out of range
    done = command("onnxruntime", tmp_path / "model.onnx", "--out", tmp_path / "out.onnx", "--input", f"file={tmp_path / 'index.npy'}")
    assert done.status == 0 and "indices element out of data bounds" in done.err


def test_lines_are_compared_with_their_own_shapes(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 1-D convolution is a problem of images with one row; the models that are compared have its tensors, which lack the row."""
    nodes = [node("Conv", "x w", "a", pads=[1, 1], strides=[2]), node("Add", "a z", "b"), node("Relu", "b", "y")]
    model = graph(nodes, {"x": (2, 8, 31), "z": (2, 16, 16)}, {"w": integers(16, 8, 3)})
    seen: list[Any] = []

    def compared(pairs: list[Pair], library: Path, threads: int, step: Any) -> list[Found]:
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library.resolve()))
        given = {"x": integers(2, 8, 31), "z": integers(2, 16, 16)}
        for one in pairs:
            theirs, ours = (ort.InferenceSession(path, options).run(None, given)[0] for path in (one.original, one.ours))
            assert theirs.shape == (2, 16, 16) and np.array_equal(ours, theirs)
        seen.extend(pairs)
        return [FASTER] * len(pairs)

    monkeypatch.setattr(guard, "compared", compared)
    made = im2win.for_onnxruntime(model, tmp_path / "ours.onnx")
    assert [layer.conv for layer in made.layers] == ["n2-c8x1x31-k16x1x3-s1x2-p0x1-add-relu"] and not made.skipped
    assert len(seen) == 2  # the layer, and the whole
