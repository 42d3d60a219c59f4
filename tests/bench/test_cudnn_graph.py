"""cuDNN's graph interface as a peer: the graphs that are written, and which of their plans is timed, with a stand-in for the package."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cudnn import Plan, module

from im2win.bench import cuda as cuda_bench
from im2win.bench import cuda_harness, cuda_peers
from im2win.bench.cuda_peers import GraphPlans
from im2win.bench.peers import cudnn_graph
from im2win.bench.peers.plans import Chosen, PlanError, fastest
from im2win.bench.peers.subject import PeerError
from im2win.bench.results import Result
from im2win.device.gpu import H200 as GPU
from im2win.spec.activations import ACTIVATIONS
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.spec.suites import Layer
from im2win.tuner.runners.cuda import device_tensors, reference

PLAIN = Conv2d(2, 6, 7, 9, 8, 3, padding=1)


class Fake:
    """A bench on the CPU, and the order in which calls were sampled."""

    def __init__(self, conv: Conv2d) -> None:
        self.conv, self.seed, self.poisons = conv, 0, ELEMENT_TYPES[conv.out_dtype].poisons
        self.inputs = device_tensors(conv, 0, "cpu")
        self.expected, self.scale = reference(conv, self.inputs)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What samples take, the first value first; the last one is repeated."""
    found = [1.0]

    def sample(bench: Any, call: Any) -> float:
        call()
        return found.pop(0) if len(found) > 1 else found[0]

    monkeypatch.setattr(cuda_peers, "sample", sample)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    yield found


def use(monkeypatch: pytest.MonkeyPatch, *plans: Plan) -> Any:
    fake = module(lambda operations: plans)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    return fake


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("given", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    "conv",
    [
        PLAIN,
        PLAIN.with_(stride=(2, 1), padding=(0, 1, 2, 1), dilation=(1, 2), dtype="float16"),
        PLAIN.with_(groups=2, bias=True, residual=True, activation="relu", dtype="bfloat16"),
        PLAIN.with_(dtype="int8"),
        PLAIN.with_(dtype="int8", out_dtype="int8", bias=True, residual=True, activation="relu"),
        PLAIN.with_(dtype="int8", out_dtype="float16", bias=True),
        PLAIN.with_(dtype="float8_e4m3fn", out_dtype="float8_e4m3fn", bias=True, residual=True, activation="relu"),
        PLAIN.with_(dtype="float8_e4m3fn", out_dtype="bfloat16", bias=True, activation="silu"),
    ],
    ids=str,
)
def test_graphs_compute_the_layer(conv: Conv2d, given: str, layout: str, times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layout of the tensors and in the other one; every graph of the layer."""
    fake = use(monkeypatch, Plan("eng1", workspace=64))
    conv = conv.with_(layout=given)
    bench: Any = Fake(conv)
    for kind in cudnn_graph.kinds(conv):
        layer = cudnn_graph.Layer(conv, bench.inputs, layout)
        graph = cudnn_graph.planned(fake, conv, layout, kind, "float32", handle="handle")
        layer.runner(graph, 0, "handle")()
        allowed = cuda_peers.plan_tolerance(conv, "float32", bench.scale)
        assert cuda_harness.measured_error(bench, layer.result(), allowed) <= allowed
        assert graph.names == (f"{kind}eng1",) and fake.graphs[-1].modes == ["A", "B", "FALLBACK"]
    assert GraphPlans("float32").subject(bench, layout).algorithm


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_written(name: str, times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, Plan("eng1"))
    bench: Any = Fake(PLAIN.with_(activation=name, bias=True))
    for kind in cudnn_graph.kinds(bench.conv):
        layer = cudnn_graph.Layer(bench.conv, bench.inputs, "NHWC")
        layer.runner(cudnn_graph.planned(fake, bench.conv, "NHWC", kind, "float32", handle="handle"), 0, "handle")()
        assert cuda_harness.measured_error(bench, layer.result(), 1e-5) < 1e-5


def test_what_graphs_a_layer_has() -> None:
    integer = PLAIN.with_(dtype="int8")
    assert cudnn_graph.kinds(PLAIN) == [cudnn_graph.WHOLE] == cudnn_graph.kinds(integer.with_(out_dtype="int8"))
    assert cudnn_graph.kinds(PLAIN.with_(bias=True)) == [cudnn_graph.WHOLE, cudnn_graph.ALONE]
    assert cudnn_graph.kinds(integer) == [cudnn_graph.WHOLE, cudnn_graph.COPIED]
    eight = PLAIN.with_(dtype="float8_e4m3fn")
    assert cudnn_graph.kinds(eight) == [cudnn_graph.WHOLE, cudnn_graph.ALONE]
    assert cudnn_graph.kinds(eight.with_(out_dtype="float8_e4m3fn")) == [cudnn_graph.WHOLE] and cudnn_graph.unsupported(eight) is None
    assert cudnn_graph.unsupported(PLAIN) is None
    assert "`dtype` (='uint8') must be one of float32, float16, bfloat16, int8" in str(cudnn_graph.unsupported(PLAIN.with_(dtype="uint8")))
    assert "zero point" in str(cudnn_graph.unsupported(integer.with_(zero_point=3)))


@pytest.mark.parametrize(
    ("dtype", "accuracy", "notes"),
    [
        ("float32", "exact", "DOWN_CONVERT_INPUTS TENSOR_CORE WINOGRAD FFT REDUCED_PRECISION_REDUCTION"),
        ("float32", "float32", "DOWN_CONVERT_INPUTS TENSOR_CORE"),
        ("float32", "tf32", "DOWN_CONVERT_INPUTS"),
        ("float32", "winograd", "DOWN_CONVERT_INPUTS"),
        ("float16", "exact", "DOWN_CONVERT_INPUTS WINOGRAD FFT REDUCED_PRECISION_REDUCTION"),
        ("float16", "float32", "DOWN_CONVERT_INPUTS"),
        ("int8", "float32", "DOWN_CONVERT_INPUTS"),
    ],
)
def test_what_an_accuracy_excludes(dtype: str, accuracy: Any, notes: str) -> None:
    assert " ".join(cudnn_graph.excluded_notes(PLAIN.with_(dtype=dtype), accuracy)) == notes


def test_the_fastest_right_plan_is_the_peer(times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [
        Plan("eng1_k2=3", ("WINOGRAD",)), Plan("eng2", ("TENSOR_CORE",)), Plan("eng3", does="wrong"), Plan("eng4", does="needs sm_100"),
        Plan("eng5", workspace=100), Plan("eng5", workspace=100), Plan("eng6", workspace=1 << 60),
    ]  # fmt: skip
    use(monkeypatch, *plans)
    times[:] = [5.0] * 3 + [2.0] * 3 + [2.0, 5.0] * 11  # the faster one leads the finals
    peer, bench = GraphPlans("float32"), Fake(PLAIN)
    found = peer.subject(bench)  # type: ignore[arg-type]
    assert found.algorithm == "eng5 (the fastest of 2 plans, 3 not available, 1 wrong)"
    assert found.extra_bytes == 100 and found.error < 1e-6
    times[:] = [1.0]
    again = peer.subject(bench)  # type: ignore[arg-type]
    assert again.algorithm == "eng5 (the fastest of 1 plan)"  # it is known from before
    exact = GraphPlans("exact").subject(bench)  # type: ignore[arg-type]
    assert exact.algorithm.startswith("eng5 (the fastest of 1 plan, 4 not available, 1 wrong")


def test_a_run_says_what_its_peers_chose(times: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A whole run with nothing of a GPU in it; im2win's kernel is not compiled, and one of the layers has no graph."""
    use(monkeypatch, Plan("eng5", workspace=100))
    monkeypatch.setattr(cuda_bench, "device_gpu", lambda: GPU)
    monkeypatch.setattr(cuda_bench, "set_up_peers", lambda accuracy: None)
    monkeypatch.setattr(cuda_bench, "measure_ceilings", lambda: {"fma_gflops": 1.0, "copy_gbs": 1.0})
    monkeypatch.setattr(cuda_bench, "build_all", lambda recipes, folder: dict.fromkeys(recipes, "no compiler"))
    monkeypatch.setattr(cuda_bench, "tier_of", lambda *given: "")
    monkeypatch.setattr(cuda_bench, "digests", lambda target: {})
    monkeypatch.setattr(cuda_bench, "Bench", lambda conv, seed: Fake(conv))
    monkeypatch.setattr(cuda_harness, "sample", cuda_peers.sample)
    layers = [Layer("a", PLAIN), Layer("b", PLAIN.with_(dtype="uint8"))]
    path = tmp_path / "result.json"
    mine = {"mine": lambda bench: cuda_harness.Subject(lambda: None, 0, 0.0, "what it chose")}
    cuda_bench.run(layers, against=["cudnn-graph"], rounds=2, suite="fakes", keep=lambda result: result.save(path), extra=mine)
    a, b = Result.load(path).layers
    assert a.peers == {"cudnn-graph": 1e3, "mine": 1e3} and a.peers_extra_bytes == {"cudnn-graph": 100, "mine": 0}
    assert a.peers_chosen == {"cudnn-graph": "eng5 (the fastest of 1 plan)", "mine": "what it chose"}
    assert a.failed == "no compiler" and b.peers == {"mine": 1e3} and "`dtype` (='uint8')" in b.peers_failed["cudnn-graph"]


def test_a_layer_without_a_right_plan_says_why(times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = Fake(PLAIN)
    use(monkeypatch)
    with pytest.raises(PeerError, match=r"^cudnn-graph: no plan: No valid engine configs for ConvFwd$"):
        GraphPlans("float32").subject(bench)
    use(monkeypatch, Plan("eng3", does="wrong"), Plan("eng4", does="needs sm_100"))
    with pytest.raises(PlanError, match=r"none of 2 plans is right: 1 not available \(needs sm_100\); 1 wrong \(wrong result"):
        GraphPlans("float32").subject(bench)
    with pytest.raises(PeerError, match="cudnn-graph: `dtype`"):
        GraphPlans("float32").subject(SimpleNamespace(conv=PLAIN.with_(dtype="uint8")))  # type: ignore[arg-type]


def test_a_fused_graph_without_plans_leaves_the_convolution_alone(times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = module(lambda operations: [Plan("eng1")] if operations == ["conv_fprop"] else [])
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    bench: Any = Fake(PLAIN.with_(bias=True, residual=True, activation="hardswish"))
    assert GraphPlans("float32").subject(bench).algorithm == "convolution alone: eng1 (the fastest of 1 plan)"


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(PeerError, match=r"nvidia-cudnn-frontend is not installed .*pip install 'im2win\[cudnn\]'"):
        cudnn_graph.frontend()
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="must be that of nvidia-cudnn-frontend"):
        cudnn_graph.frontend()


def chosen(seconds: dict[str, list[float]], limit_s: float, clock: list[float]) -> Chosen[str]:
    """The choice among plans with these samples (the last is repeated), by a clock that shows these seconds."""
    taken = {name: list(values) for name, values in seconds.items()}

    def sample(call: Any) -> float:
        values = taken[call()]
        return values.pop(0) if len(values) > 1 else values[0]

    plans = [(name, name) for name in seconds]
    return fastest(plans, lambda plan: lambda: plan, lambda call: "", sample, limit_s, lambda: clock.pop(0) if len(clock) > 1 else clock[0])


def test_finals_decide_between_plans_of_about_the_same_time() -> None:
    """One quick sample of the search does not win against the median of the finals."""
    found = chosen({"a": [1.0, 1.0, 0.5, 2.0], "b": [1.5], "c": [9.0]}, 60.0, [0.0])
    assert (found.name, found.seconds) == ("b", 1.5)
    assert found.timed == [("b", 1.5), ("a", 2.0), ("c", 9.0)]


def test_the_limit_leaves_the_last_plans_out_but_never_the_first() -> None:
    found = chosen({"a": [3.0], "b": [2.0], "c": [1.0], "d": [1.0]}, 60.0, [0.0, 59.0, 61.0])
    assert (found.name, found.left) == ("b", 2)
    assert found.said == "b (the fastest of 2 plans, 2 not tried for lack of time)"
    assert chosen({"a": [3.0], "b": [2.0]}, 0.0, [0.0, 1.0]).name == "a"


def test_no_plans_at_all_are_an_error() -> None:
    with pytest.raises(PlanError, match="there is no plan for this problem"):
        chosen({}, 60.0, [0.0])


H200 = {  # as cuDNN describes the device to itself
    "deviceName": "NVIDIA H200", "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0, "pciDeviceId": 0, "multiProcessorCount": 132,
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "warpSize": 32, "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448, "l2CacheSize": 62914560,
    "reservedSharedMemoryPerBlock": 1024, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "isTccDriver": 0,
    "supportCoopLaunch": 1, "totalGlobalMem": 150000000000, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
}  # fmt: skip


@pytest.mark.slow
def test_cudnn_lists_plans_for_the_graphs() -> None:
    """cuDNN plans for a described device, where there is none. (It compiles fused operations only with a driver, so they are left out.)"""
    try:
        library = cudnn_graph.frontend()
        device = library.create_device_properties(json.dumps(H200))
    except (PeerError, RuntimeError) as error:
        pytest.skip(f"cuDNN's graph interface is not there: {error}")
    layer, built = Conv2d.parse("n32-c64x56x56-k64x3x3-p1"), dict[tuple[str, str], int]()
    for dtype, layout, accuracy in itertools.product(("float32", "float16", "bfloat16", "int8"), ("NCHW", "NHWC"), ("exact", "tf32")):
        conv = layer.with_(dtype=dtype, layout=layout)
        graph = cudnn_graph.planned(library, conv, layout, cudnn_graph.WHOLE, accuracy, device_property=device)  # type: ignore[arg-type]
        for index in range(len(graph.names)):
            with contextlib.suppress(Exception):  # excluded by its notes, or compiled with a driver only
                graph.built.build_plan_at_index(index)
                built[f"{dtype} {layout}", accuracy] = built.get((f"{dtype} {layout}", accuracy), 0) + 1
        assert graph.names[0].startswith("eng") and built[f"{dtype} {layout}", accuracy]
    assert built["float32 NHWC", "exact"] < built["float32 NHWC", "tf32"]
