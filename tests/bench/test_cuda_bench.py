"""The benchmark on a GPU, as far as it needs none: what rounds time, what rows note, and how a layer runs its transform alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_module import Module

from im2win.bench import cuda as cuda_bench
from im2win.bench import cuda_builds, cuda_harness
from im2win.bench.cpu import spreads
from im2win.bench.cuda import TRANSFORM, _note, with_transform
from im2win.bench.cuda_harness import Subject, interleaved
from im2win.bench.peers.subject import PeerError
from im2win.bench.results import OURS, UNTUNED, Result, Row
from im2win.cli.commands.bench import _finish, _reporter
from im2win.device.gpu import H200
from im2win.packing.mma_fragments import CudaPack
from im2win.runtime import cuda as cuda_runtime
from im2win.runtime.cuda import CudaLayer, Kernels
from im2win.runtime.tensors import ArgumentError
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer

CONV = Conv2d(2, 8, 9, 9, 16, 3)
LIMITS = {"fma_gflops": 50e3, "f16_gflops": 700e3, "copy_gbs": 4000.0}


def call(seconds: float) -> Callable[[], float]:
    return lambda: seconds


@pytest.mark.parametrize("transform", [None, call(0.25)])
def test_a_transform_is_a_part_of_ours_and_no_peer(transform: Callable[[], float] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[float] = []
    monkeypatch.setattr(cuda_harness, "sample", lambda bench, timed: order.append(timed()) or timed())
    ready = {
        OURS: Subject(call(1.0), 64, 1e-7, "im2win/stored", True, transform, {"width": 8}),
        UNTUNED: Subject(call(3.0), 64, 1e-7, "direct/tiled", False, None, {"width": 4}),
        "torch_nchw": Subject(call(2.0), 0, 1e-7),
    }
    samples = interleaved(None, with_transform(ready), 3)  # type: ignore[arg-type]
    each = [1.0, 3.0, 2.0, 0.25] if transform else [1.0, 3.0, 2.0]
    rounds = [order[first : first + len(each)] for first in range(0, len(order), len(each))]
    assert rounds[0] == each  # once before the rounds
    assert all(sorted(one) == sorted(each) for one in rounds) and len(rounds) == 4 and any(one != each for one in rounds)
    row = Row("conv1", str(CONV))
    row.spread = spreads(samples)
    _note(row, CONV, ready, LIMITS, "float32")
    assert row.ours_ms == pytest.approx(1e3) and row.transform_ms == (pytest.approx(250.0) if transform else None)
    assert row.peers == {"torch_nchw": pytest.approx(2e3)} and row.best_peer == "torch_nchw" and row.ratio == pytest.approx(2.0)
    assert row.untuned_ms == pytest.approx(3e3)
    assert (row.tile, row.untuned_algorithm, row.untuned_tile) == ({"width": 8}, "direct/tiled", {"width": 4})
    assert (TRANSFORM in row.spread) == (transform is not None)


def test_what_is_built_before_anything_is_timed() -> None:
    layers = [Layer("a", CONV), Layer("b", CONV), Layer("c", CONV.with_(stride=(2, 2)))]
    made = cuda_bench.recipes(layers, H200, None, "direct/tiled", "exact", True)
    assert list(made) == [(layer.conv, name) for layer in layers[1:] for name in (OURS, UNTUNED)]
    assert [recipe.recorded for recipe in made.values()] == [True, False] * 2
    with pytest.raises(cuda_builds.BuildError, match="no compiler"):
        cuda_bench._ours(None, H200, "exact", "no compiler")  # type: ignore[arg-type]


def test_a_layer_that_tvm_does_not_get_or_find_is_an_error_for_this_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(conv=CONV.with_(stride=(2, 2)))
    failed = {CONV: "tvm: searching: no result within 9 s"}
    monkeypatch.setattr("im2win.bench.peers.tvm_searches.search_all", lambda convs, *rest, **more: failed)
    default = "im2win.bench.peers.tvm_default.compiled"
    monkeypatch.setattr(default, lambda *given: pytest.fail("searched") if CONV in given else lambda *tensors: None)
    monkeypatch.setattr(cuda_harness, "verify", lambda bench, call, allowed: ("", 1e-7))
    prepare = cuda_harness.tvm_searched([CONV, found.conv], H200, 8, tmp_path, None)["tvm"]
    with pytest.raises(PeerError, match="no result within 9 s"):
        prepare(SimpleNamespace(conv=CONV))  # type: ignore[arg-type]
    with pytest.raises(cuda_harness.WrongError, match="the plain convolution in NCHW"):
        prepare(SimpleNamespace(conv=CONV.with_(bias=True)))  # type: ignore[arg-type]
    found.inputs, found.output = {"data": None, "filter": None}, None
    assert prepare(found).error == 1e-7  # type: ignore[arg-type]


def test_the_command_says_which_layers_to_tune() -> None:
    printed: list[str] = []
    console = SimpleNamespace(print=lambda text, **_: printed.append(text))
    times = {"conv1": 1.0, "conv2": 1.04, "conv3": 2.0}
    rows = [Row(name, str(CONV), ours_ms=ms, untuned_ms=1.0, peers={"a": 1.0}, ratio=1 / ms) for name, ms in times.items()]
    result = Result("papers12", "float32", 2, "gpu", "A GPU", 1, {}, "", "2026-01-01", {}, rows)
    how = {"batch": 2, "dtype": None, "target": "cuda"}
    _finish(console, result, None, "papers12", how)  # type: ignore[arg-type]
    slower = "conv2,conv3: more than 3% slower than the default tile; tune them: "
    assert printed[1:] == [slower + "im2win tune papers12 --layers conv2,conv3 --batch 2 --target cuda"]
    printed.clear()
    result.layers = rows[:1]
    _finish(console, result, None, "papers12", how)  # type: ignore[arg-type]
    assert len(printed) == 1


def test_the_line_of_a_layer_says_the_tier_that_chose_it() -> None:
    printed: list[str] = []
    console = SimpleNamespace(print=lambda text, **_: printed.append(text))
    for tier in ("default", "nearest layer"):
        _reporter(console, 5)(1, 1, Row("conv1", str(CONV), ours_ms=1.0, algorithm="im2win/stored", tier=tier))  # type: ignore[arg-type]
    assert "im2win / stored (untuned);" in printed[0] and "im2win / stored (untuned, nearest layer);" in printed[1]


def test_the_tier_is_that_of_the_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = SimpleNamespace(tier="nearest layer")
    monkeypatch.setattr(cuda_bench, "choose", lambda conv, gpu, names, logs, accuracy: choice if logs is None and names else None)
    assert cuda_bench.tier_of(CONV, H200, None, "auto", "exact") == "nearest layer"
    assert cuda_bench.tier_of(CONV, H200, tmp_path, "auto", "exact") == "default"
    assert cuda_bench.tier_of(CONV.with_(groups=2), H200, None, "winograd/tiled", "exact") == ""


@pytest.mark.parametrize("transform_ms", [None, 0.125])
def test_the_command_prints_it(transform_ms: float | None) -> None:
    printed: list[str] = []
    console = SimpleNamespace(print=lambda text, **_: printed.append(text))
    row = Row("conv1", str(CONV), ours_ms=1.0, algorithm="im2win/stored", tuned=True, gflops=1.0, transform_ms=transform_ms)
    _reporter(console, 5)(1, 1, row)  # type: ignore[arg-type]
    assert ("im2win / stored, transform 0.125 ms; no peer" in printed[0]) == (transform_ms is not None)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudaLayer]:
    """Binds zeros to a library of these functions; tensors stay where they are, and scratch is "made"."""
    monkeypatch.setattr(cuda_runtime, "_current_device", lambda: 0)
    monkeypatch.setattr(cuda_runtime, "_upload", lambda array, device: "filters")
    monkeypatch.setattr(cuda_runtime, "_check", lambda *_: None)
    monkeypatch.setattr(cuda_runtime, "_empty", lambda count, dtype, device: "made")

    def bind(module: Module, made: int) -> CudaLayer:
        manifest = SimpleNamespace(made=made, pack=CudaPack("rows", 16, "uvc", 1))
        op: Any = SimpleNamespace(conv=CONV, method="im2win/stored", manifest=manifest, kernels=Kernels(module, bool(made)))
        return CudaLayer(op, np.zeros(CONV.filter_shape, np.float32), None)

    return bind


@pytest.mark.parametrize("name", ["transform", "transform_parts"])
def test_a_layer_runs_its_transform_alone(bound: Callable[..., CudaLayer], name: str) -> None:
    module = Module("conv2d", name)
    layer = bound(module, 100)
    assert layer.transforms and layer.transform("x") == "made" and module.calls == [(name, "x", "made")]
    module.calls.clear()
    layer("x", out="y")
    whole = [("transform", "x", "made"), ("conv2d", "made", "filters", "y")]
    assert module.calls == (whole if name == "transform" else [("conv2d", "x", "made", "filters", "y")])


@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_stays(bound: Callable[..., CudaLayer], monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    """As it was, whatever TVM makes of it, and on the layer's own no time is lost for that."""
    at, entered = [current], []

    class Entered:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *reason: object) -> None:
            at[0] = current

    cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: at[0], device=Entered)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, Tensor=int))  # type: ignore[arg-type]
    layer = bound(Module("conv2d", "transform"), 100)
    monkeypatch.setattr(layer._kernels, "product", lambda *tensors: at.__setitem__(0, layer.device))
    layer("x", out="y")
    layer.transform("x")
    layer.run("x", None, "y", like=SimpleNamespace(new_empty=lambda count: "made"))
    assert at == [current] and entered == [0] * (3 if current else 0)


def test_a_layer_without_a_transform_says_so(bound: Callable[..., CudaLayer]) -> None:
    module = Module("conv2d")
    layer = bound(module, 0)
    layer("x", out="y")
    assert not layer.transforms and module.calls == [("conv2d", "x", "filters", "y")]
    with pytest.raises(ArgumentError, match="im2win/stored takes windows from the input: there is no transform to run alone"):
        layer.transform("x")
