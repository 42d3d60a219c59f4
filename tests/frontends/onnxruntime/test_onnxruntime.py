"""ONNX Runtime with im2win's convolutions: graphs of integers that must give what they gave before, threads, sessions, refusals."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import light  # noqa: E402
from compiled_c import COMPILER, PROGRAMS, WARNINGS, needs_compiler, run, sanitizing  # noqa: E402
from model_graphs import FLOAT, batch_norm, graph, helper, integers, node, norm, numpy_helper, peer  # noqa: E402
from ops import host  # noqa: E402
from paths import ROOT  # noqa: E402
from recorded import fastest, fill  # noqa: E402

import im2win  # noqa: E402
from im2win.codegen import pool  # noqa: E402
from im2win.export.c_abi.header import SOURCES  # noqa: E402
from im2win.frontends.onnx.layers import ModelError, layers_of  # noqa: E402
from im2win.frontends.onnxruntime import writing  # noqa: E402
from im2win.frontends.onnxruntime.operators import Rewritten  # noqa: E402
from im2win.records.log import Log  # noqa: E402
from im2win.runtime.manifest import ArtefactError  # noqa: E402

pytestmark = needs_compiler


def rewritten(model: Any, folder: Path, **options: Any) -> Rewritten:
    return im2win.for_onnxruntime(model, folder / "ours.onnx", **{"accuracy": "exact", "guard": False, **options})


def session(made: Rewritten, threads: int = 2, spinning: bool = True, parallel: bool = False) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    options.register_custom_ops_library(str(made.library))
    return ort.InferenceSession(str(made.path), options, providers=["CPUExecutionProvider"])


def operators_of(made: Rewritten) -> list[str]:
    """The nodes of the written graph, ours as "im2win"."""
    return [one.domain or one.op_type for one in onnx.load(made.path).graph.node]


def keys(made: Rewritten) -> list[str]:
    return [layer.conv for layer in made.layers]


def check(model: Any, made: Rewritten, feeds: dict[str, np.ndarray], **options: Any) -> None:
    """The outputs of the rewritten model are those of the model."""
    found, expected = session(made, **options).run(None, feeds), peer(model, feeds)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and (ours == theirs).all()


# --- what is taken over ----------------------------------------------------------------------------------------------


def everything() -> Any:
    """Padded, strided, dilated, grouped and depthwise convolutions of one and of three channels, with all that is fused behind them."""
    nodes = [
        node("Pad", "x sides", "p"),
        node("Conv", "p w0", "a", strides=[2, 1], pads=[1, 0, 0, 2]),
        batch_norm("a", "b", "n0"),
        node("Relu", "b", "c"),
        node("Conv", "c w1 b1", "d", group=12, auto_pad="SAME_LOWER"),
        node("Clip", "d low high", "e"),
        node("Conv", "e w2", "f", group=3, dilations=[2, 1], pads=[2, 1, 2, 0]),
        node("Mul", "f k", "g"),
        node("Add", "g c", "h"),
        node("Relu", "h", "i"),
        node("MaxPool", "i", "j", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", "j w3", "l"),
        node("Neg", "l", "m"),
        node("Add", "l m2", "n"),
        node("Mul", "m two", "m2"),
        node("Conv", "j w3", "o"),
        node("Sum", "o n", "y"),
    ]
    nodes[13], nodes[14] = nodes[14], nodes[13]
    constants = {"w0": integers(12, 3, 3, 3, most=1), "w1": integers(12, 1, 3, 2), "b1": integers(12), "w2": integers(12, 4, 3, 2)}
    constants |= {"w3": integers(5, 12, 1, 1), "k": integers(12, 1, 1), "two": np.float32(2), **norm(12, "n0")}
    constants |= {"sides": np.array([0, 0, 1, 0, 0, 0, 2, 3]), "low": np.float32(0), "high": np.float32(6)}
    return graph(nodes, {"x": (2, 3, 11, 9)}, constants, "y m")


def test_exact(tmp_path: Path) -> None:
    """With a record by which one layer's kernel stores a matrix, so that there is a workspace on every CPU."""
    model, log = everything(), Log(tmp_path / "logs")
    fill(log, *fastest("n2-c12x7x12-k12x3x2-p2.1.2.0-d2x1-g3-add-relu", "im2win/stored", "exact"))
    made = rewritten(model, tmp_path, logs=log.folder)
    assert keys(made) == [
        "n2-c3x11x9-k12x3x3-s2x1-p2.0.2.5-bias-relu", "n2-c12x7x12-k12x3x2-p1.1.1.0-g12-bias-relu6",
        "n2-c12x7x12-k12x3x2-p2.1.2.0-d2x1-g3-add-relu", "n2-c12x3x6-k5x1x1", "n2-c12x3x6-k5x1x1-add",
    ]  # fmt: skip
    assert operators_of(made) == ["im2win", "im2win", "im2win", "MaxPool", "im2win", "Neg", "Mul", "Add", "im2win"]
    assert not made.skipped and made.workspace > 0
    feeds = {"x": integers(2, 3, 11, 9)}
    for threads in (1, 3):
        check(model, made, feeds, threads=threads)
        check(model, made, feeds, threads=threads, parallel=True)
    tuned = [str(layer.conv) for layer in layers_of(model, epilogues=True)]
    assert keys(made) == tuned, "im2win tune would take other layers"
    written = onnx.load(made.path)
    read = {name for one in written.graph.node for name in one.input}
    assert {tensor.name for tensor in written.graph.initializer} <= read, "weights that nobody reads"
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in written.graph.value_info}
    assert shapes["i"] == [2, 12, 7, 12] and "a" not in shapes


def test_1d_convolutions(tmp_path: Path) -> None:
    """Lines keep their three axes; the batch may be symbolic."""
    nodes = [
        node("Conv", "x w0", "a", pads=[1, 1], strides=[2]), batch_norm("a", "b", "n0"), node("Relu", "b", "c"),
        node("Conv", "c w1 b1", "d", pads=[2, 0]), node("Add", "d c", "y"),
    ]  # fmt: skip
    constants = {"w0": integers(8, 3, 3), "w1": integers(8, 8, 3), "b1": integers(8), **norm(8, "n0")}
    model = graph(nodes, {"x": ("n", 3, 17)}, constants)
    made = rewritten(model, tmp_path)
    assert keys(made) == ["n1-c3x1x17-k8x1x3-s1x2-p0x1-bias-relu", "n1-c8x1x9-k8x1x3-p0.2.0.0-bias-add"]
    for images in (1, 3):
        check(model, made, {"x": integers(images, 3, 17)})
    with pytest.raises(Exception, match=r"shape|Invalid|INVALID"):
        session(made).run(None, {"x": integers(1, 3, 18)})


def test_symbolic_batch(tmp_path: Path) -> None:
    """Any number of images that is a multiple of a call's; the batch stays symbolic, and a constant of one image is no residual."""
    nodes = [
        node("Conv", "x w0", "a", pads=[1] * 4), node("Relu", "a", "b"), node("Conv", "b w1", "c"), node("Add", "c x", "d"),
        node("Conv", "d w1", "e"), node("Add", "e one", "y"),
    ]  # fmt: skip
    constants = {"w0": integers(4, 4, 3, 3, most=1), "w1": integers(4, 4, 1, 1, most=2), "one": integers(1, 4, 6, 7)}
    model = graph(nodes, {"x": ("images", 4, 6, 7)}, constants)
    made = rewritten(model, tmp_path)
    assert keys(made) == ["n1-c4x6x7-k4x3x3-p1-relu", "n1-c4x6x7-k4x1x1-add", "n1-c4x6x7-k4x1x1"]
    for images in (1, 5, 0):
        check(model, made, {"x": integers(images, 4, 6, 7)})
    assert session(made).get_outputs()[0].shape == ["images", 4, 6, 7]
    pairs = rewritten(model, tmp_path / "pairs", batch=2)
    assert keys(pairs)[0] == "n2-c4x6x7-k4x3x3-p1-relu"
    check(model, pairs, {"x": integers(6, 4, 6, 7)})
    with pytest.raises(Exception, match=r"X has the shape \[3, 4, 6, 7\]; kernel 'n2-c4x6x7.*' takes \[2, 4, 6, 7\] or a multiple"):
        session(pairs).run(None, {"x": integers(3, 4, 6, 7)})


def test_what_is_left_to_onnx_runtime(tmp_path: Path) -> None:
    """With the reason; and control flow, which stays where it is."""
    branch = helper.make_graph([node("Conv", "x w0", "inner")], "branch", [], [helper.make_tensor_value_info("inner", FLOAT, None)])
    nodes = [
        node("Conv", "x w0", "a"),
        node("Conv", "x own", "b"),
        node("Conv", "z w0", "c"),
        node("ConvTranspose", "a w0", "d"),
        node("ReduceSum", "x", "s", keepdims=0),
        node("Cast", "s", "yes", to=9),
        node("If", "yes", "y", then_branch=branch, else_branch=branch),
        node("Cast", "x", "short", to=10),
        node("Conv", "short w1", "f"),
        node("Cast", "f", "e", to=1),
    ]
    inputs = {"x": (1, 4, 5, 5), "own": (4, 4, 1, 1), "z": (1, 4, "rows", 5)}
    weights = integers(4, 4, 1, 1)
    model = graph(nodes, inputs, {"w0": weights, "w1": weights.astype(np.float16)}, "y a b c d e")
    made = rewritten(model, tmp_path)
    assert keys(made) == ["n1-c4x5x5-k4x1x1"]
    assert [line.split(": ")[0] for line in made.skipped] == ["Conv_b", "Conv_c", "ConvTranspose_d", *["Conv_inner"] * 2, "Conv_f"]
    for reason in ("its filters or its bias are no const", "height and width must be fixed", "only Conv is", "in a subgraph", "float16"):
        assert any(reason in line for line in made.skipped), reason
    check(model, made, {"x": integers(1, 4, 5, 5), "own": integers(4, 4, 1, 1), "z": integers(1, 4, 3, 5)})


def test_only_what_is_tuned(tmp_path: Path) -> None:
    """With a record, also of another epilogue; nothing at all is an error that says so."""
    nodes = [node("Conv", "x w0", "a"), node("Relu", "a", "b"), node("Conv", "b w1", "y")]
    model = graph(nodes, {"x": (1, 4, 9, 9)}, {"w0": integers(16, 4, 1, 1), "w1": integers(8, 16, 3, 3, most=1)})
    with pytest.raises(ModelError, match=r"it has Conv_a: no record of this layer on this device, and 1 more\."):
        rewritten(model, tmp_path, logs=str(tmp_path / "logs"), untuned="keep")
    im2win.tune("n1-c16x9x9-k8x3x3-bias", trials=2, logs=tmp_path / "logs", algorithm="direct/tiled")
    made = rewritten(model, tmp_path, logs=str(tmp_path / "logs"), untuned="keep")
    assert keys(made) == ["n1-c16x9x9-k8x3x3"] and made.skipped == ("Conv_a: no record of this layer on this device",)
    assert operators_of(made) == ["Conv", "Relu", "im2win"]
    check(model, made, {"x": integers(1, 4, 9, 9)})


def test_old_files_and_computed_weights(tmp_path: Path) -> None:
    """Weights that are inputs, as before version 4 of the format, and filters that nodes compute of constants; too many for one file."""
    nodes = [
        helper.make_node("Constant", [], ["half"], value=numpy_helper.from_array(np.float32(0.5))),
        node("Mul", "w half", "v"),
        node("Identity", "v", "u"),
        node("Conv", "x u b", "y"),
        node("Mul", "x other", "z"),
    ]
    model = graph(nodes, {"x": (1, 4, 5, 5)}, {"w": 2 * integers(8, 4, 2, 2), "b": integers(8), "other": integers(4, 1, 1)}, "y z")
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, FLOAT, tensor.dims))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_MOST_WEIGHTS", 0)
        patch.setattr(writing, "_SMALL", 64)
        for _ in range(2):  # the second time replaces the first
            made = rewritten(model, tmp_path)
    assert operators_of(made) == ["im2win", "Mul"] and [one.name for one in session(made).get_inputs()] == ["x"]
    assert made.path.with_name("ours.onnx.data").stat().st_size < 2 * 8 * 4 * 2 * 2 * 4 + 4096
    check(model, made, {"x": integers(1, 4, 5, 5)})


@pytest.mark.parametrize("name", ["squeezenet"])
def test_real_graph(name: str, tmp_path: Path) -> None:
    made = im2win.for_onnxruntime(light.path(name), tmp_path / f"{name}.onnx", guard=False)
    assert not made.skipped and operators_of(made).count("im2win") == 26 and not {"Conv", "Relu"} & set(operators_of(made))
    one = session(made)
    [found] = one.run(None, {one.get_inputs()[0].name: light.stored_input(name)})
    np.testing.assert_allclose(found, light.stored_output(name), rtol=1e-3, atol=1e-7)


# --- sessions and threads ---------------------------------------------------------------------------------------------


def test_threads_and_sessions(tmp_path: Path) -> None:
    """Two sessions, each run by two threads at the same time, sessions that end meanwhile, and options that are gone."""
    model = everything()
    made = rewritten(model, tmp_path)
    feeds = [{"x": integers(2, 3, 11, 9)} for _ in range(4)]
    expected = [peer(model, feed) for feed in feeds]
    sessions = [session(made), session(made, threads=3)]
    gc.collect()

    def repeat(i: int) -> bool:
        found = [sessions[i % 2].run(None, feeds[i]) for _ in range(50)]
        return all((ours == theirs).all() for values in found for ours, theirs in zip(values, expected[i], strict=True))

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(repeat, i) for i in range(4)]
        for i in range(3):
            (ours, _), (theirs, _) = session(made).run(None, feeds[i]), expected[i]
            assert (ours == theirs).all()
        assert all(one.result() for one in running)


@pytest.mark.skipif(host().threads < 2, reason="needs two CPUs")
def test_threads_are_onnx_runtimes(tmp_path: Path) -> None:
    """Tasks run on the session's own threads, and nobody starts others."""
    model = graph([node("Conv", "x w", "y", pads=[1] * 4)], {"x": (1, 32, 48, 48)}, {"w": integers(64, 32, 3, 3, most=1)})
    made = rewritten(model, tmp_path)
    feeds = {"x": integers(1, 32, 48, 48)}
    before = set(os.listdir("/proc/self/task"))
    one = session(made, spinning=False)  # a thread that has nothing to do sleeps
    workers = set(os.listdir("/proc/self/task")) - before
    assert len(workers) == 1

    def busy() -> int:
        """Nanoseconds that the session's threads computed."""
        return sum(int(Path(f"/proc/self/task/{worker}/schedstat").read_text().split()[0]) for worker in workers)

    first, begin = busy(), time.process_time_ns()
    for _ in range(100):
        [found] = one.run(None, feeds)
    assert busy() - first > (time.process_time_ns() - begin) / 10
    assert set(os.listdir("/proc/self/task")) - before == workers
    assert (found == peer(model, feeds)[0]).all()


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_operator_alone(sanitizer: str, tmp_path: Path) -> None:
    """With stand-ins for ONNX Runtime and the kernel, many kernels made, run and destroyed at once, and everything that is refused."""
    sources = PROGRAMS / "operators.c", SOURCES / "operators.c", SOURCES / "layer.c"
    flags = *sanitizing(tmp_path, sanitizer), "-std=c11", "-O1", *WARNINGS, f"-I{SOURCES}", f"-I{pool.SOURCES}"
    run(tmp_path, COMPILER, *flags, *sources, "-pthread", "-o", "operators")
    run(tmp_path, "./operators")


# --- what goes wrong --------------------------------------------------------------------------------------------------


SMALL = [node("Conv", "x w b", "y")]


def small(channels: int = 4) -> Any:
    return graph(SMALL, {"x": (1, channels, 5, 5)}, {"w": integers(8, channels, 1, 1), "b": integers(8)})


def test_a_library_that_is_not_the_models(tmp_path: Path) -> None:
    made, other = rewritten(small(), tmp_path / "first"), rewritten(small(6), tmp_path / "second")
    shutil.copy(other.library, made.library)
    with pytest.raises(Exception, match=r"kernel 'n1-c4x5x5-k8x1x1-bias \w+' is not in this library; register the one that was written"):
        session(made)


def test_nodes_that_were_changed(tmp_path: Path) -> None:
    """A filter of another size, a bias that is gone, a filter that is an input."""
    made = rewritten(small(), tmp_path)
    whole = made.path.read_bytes()

    def changed(change: Callable[[Any], None]) -> None:
        model = onnx.load_model_from_string(whole)
        change(model.graph)
        onnx.save(model, made.path)
        session(made).run(None, {one.name: integers(*one.shape) for one in session(made).get_inputs()})

    def smaller(graph: Any) -> None:
        graph.initializer[0].CopyFrom(numpy_helper.from_array(integers(7), graph.initializer[0].name))

    def unbiased(graph: Any) -> None:
        del graph.node[0].input[2]

    def fed(graph: Any) -> None:
        tensor = graph.initializer[0]
        graph.input.append(helper.make_tensor_value_info(tensor.name, FLOAT, tensor.dims))
        del graph.initializer[0]

    for change, message in (
        (smaller, "W of kernel .* has 7 elements; it must have 32"),
        (unbiased, "B of kernel .* must be an initializer"),
        (fed, "W of kernel .* must be an initializer"),
    ):
        with pytest.raises(Exception, match=message):
            changed(change)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="must be a whole ONNX model"):
        im2win.for_onnxruntime(tmp_path / "text.onnx", tmp_path / "ours.onnx")
    with pytest.raises(ModelError, match="must be an existing file"):
        im2win.for_onnxruntime(tmp_path / "none.onnx", tmp_path / "ours.onnx")
    with pytest.raises(ModelError, match="it has none among its 1 nodes"):
        rewritten(graph([node("Neg", "x", "y")], {"x": (1,)}), tmp_path)
    with pytest.raises(ArtefactError, match="file: cannot be written"):
        rewritten(small(), tmp_path / "file")
    with pytest.raises(ValueError, match=r"`batch` \(=3\) must be left out, or 1"):
        rewritten(small(), tmp_path, batch=3)
    with pytest.raises(ValueError, match=r"`untuned` \(='no'\) must be one of default, keep"):
        rewritten(small(), tmp_path, untuned="no")
    onnx.save(small(), tmp_path / "small.onnx")
    with pytest.raises(ValueError, match="must be different files"):
        im2win.for_onnxruntime(tmp_path / "small.onnx", tmp_path / "small.onnx")
    made = rewritten(small(), tmp_path)
    with pytest.raises(ModelError, match="it has been rewritten already"):
        im2win.for_onnxruntime(made.path, tmp_path / "again.onnx")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        rewritten(small(), tmp_path)


def test_an_onnx_runtime_that_is_too_old(tmp_path: Path) -> None:
    """The library alone, with a base that has version 1 of the interface only."""
    library = ctypes.CDLL(str(rewritten(small(), tmp_path).library))
    said: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def create_status(code: int, message: bytes) -> int:
        said.append(message)
        return 1

    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    def api(version: int) -> int | None:
        return ctypes.addressof(table) if version == 1 else None

    text = ctypes.create_string_buffer(b"1.16.3")

    @ctypes.CFUNCTYPE(ctypes.c_void_p)
    def release() -> int:
        return ctypes.addressof(text)

    base = (ctypes.c_void_p * 2)(ctypes.cast(api, ctypes.c_void_p), ctypes.cast(release, ctypes.c_void_p))
    library.RegisterCustomOps.restype = ctypes.c_void_p
    assert library.RegisterCustomOps(None, base) == 1
    assert said == [b"im2win: needs ONNX Runtime 1.17 or newer; this is 1.16.3."]


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_the_library_needs_nothing(tmp_path: Path) -> None:
    """One symbol is visible, and all that it asks for are the C library's."""
    library = rewritten(small(), tmp_path).library
    names = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in names.splitlines() if " T " in line] == ["RegisterCustomOps"]
    assert not re.search(r"Ort|TVM|tvm|_Z", names)


# --- the command line and the text ---------------------------------------------------------------------------------------


def test_command(tmp_path: Path, command: Callable[..., Any]) -> None:
    onnx.save(everything(), tmp_path / "model.onnx")
    out, library = tmp_path / "new" / "ours.onnx", tmp_path / "lib" / "libours.so"
    words = "-o", out, "--library", library, "--accuracy", "exact", "--threads", 1, "--no-guard"
    done = command("onnxruntime", tmp_path / "model.onnx", *words)
    assert done.status == 0, done.err
    assert "5 convolutions on im2win" in done.out and "default tile" in done.out and str(library) in done.out
    feeds = {"x": integers(2, 3, 11, 9)}
    check(onnx.load(tmp_path / "model.onnx"), Rewritten(out, library, (), (), 0, 0), feeds)
    assert command("onnxruntime", tmp_path / "model.onnx", "-o", tmp_path / "model.onnx").status == 2


@pytest.mark.slow
def test_the_benchmark_takes_it_in(tmp_path: Path) -> None:
    """Its time beside ours; an output that is not ONNX Runtime's is no time."""
    from im2win.bench.models import measure
    from im2win.reports.deploy import models_table

    onnx.save(small(), tmp_path / "small.onnx")
    im2win.compile_model(tmp_path / "small.onnx", tmp_path / "small.so", threads=1)
    made = rewritten(small(), tmp_path, threads=1)
    row = measure("small", tmp_path / "small.onnx", tmp_path / "small.so", ["onnxruntime"], 1, 1, 0.01, made)
    assert row.inside_failed is not None and "differs from ONNX Runtime's" in row.inside_failed  # weights are random
    made = im2win.for_onnxruntime(tmp_path / "small.onnx", tmp_path / "ours.onnx", threads=1, guard=False)
    row = measure("small", tmp_path / "small.onnx", tmp_path / "small.so", ["onnxruntime"], 1, 1, 0.01, made)
    assert row.inside_ms and not row.inside_failed and list(row.peers) == ["onnxruntime"]
    facts = {"brand": "b", "device": "d", "threads": 1, "batch": 1, "versions": {}, "date": "2026-01-01T00:00:00", "commit": "c"}
    assert "ours in ONNX Runtime ms" in models_table([{"study": "models", **facts, "models": [row.as_dict()]}])


def test_the_guides_program_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "onnx.md").read_text(encoding="utf-8")
    part = re.search(r"^## Inside ONNX Runtime\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert part is not None
    [block] = re.findall(r"^```python\n(.*?)^```$", part[1], re.DOTALL | re.MULTILINE)
    rewritten(small(), tmp_path)
    assert "ours.onnx" in block and "./ours.so" in block
    place = {"image": integers(1, 4, 5, 5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(block, place)
    assert place["y"].shape == (1, 8, 5, 5)
