"""The peers of a run on a GPU: their names, what PyTorch Inductor is asked for, and which earlier rows lack peers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

from im2win.bench import cuda as cuda_bench
from im2win.bench import cuda_peers, inductor_worker
from im2win.bench.cuda_harness import interleaved
from im2win.bench.cuda_peers import Inductor, Peers, expanded
from im2win.bench.inductor_worker import Compile, Compiled, Handler, Sample
from im2win.bench.peers import inductor
from im2win.bench.peers.subject import PeerError
from im2win.bench.results import Result, Row
from im2win.device.gpu import H200
from im2win.reports import subjects
from im2win.spec.conv2d import Conv2d

torch = pytest.importorskip("torch")
CONV = Conv2d(2, 4, 9, 9, 8, 3, padding=1)
GENERATED = """
triton_tem_fused_convolution_relu_0 = async_compile.triton('triton_tem_fused_convolution_relu_0', ''' ... ''')
triton_unused_1 = async_compile.triton('triton_unused_1', ''' ... ''')
class Runner:
    def call(self, args):
        buf0 = extern_kernels.convolution(arg1_1, arg0_1, stride=(1, 1), padding=(1, 1))
        triton_poi_fused_add_12.run(buf0, arg2_1, 1024, stream=stream0)
        extern_kernels.mm(reinterpret_tensor(arg1_1, (64, 32)), buf1, out=buf2)
        triton_tem_fused_convolution_relu_0.run(arg1_1, arg0_1, buf3, grid=grid0, stream=stream0)
        triton_tem_fused_convolution_relu_3.run(arg1_1, arg0_1, buf3, grid=grid0, stream=stream0)
"""


def test_names() -> None:
    assert expanded(["torch", "cudnn-graph", "torch_nhwc"]) == ["torch_nchw", "torch_nhwc", "cudnn-graph"]
    assert expanded(["inductor", "cudnn", "tvm"]) == ["inductor_nchw", "inductor_nhwc", "cudnn", "tvm"]
    assert expanded([]) == [] and set(expanded(cuda_peers.SINGLE)) == set(cuda_peers.SINGLE)
    with pytest.raises(ValueError, match=r"`against` \(='openvino'\) must be of torch, inductor, .*tvm, or none, on a GPU"):
        expanded(["torch", "openvino"])


def test_the_peers_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Each is prepared with its layout; the algorithms by name come last, and count as no name that every row has."""
    asked: list[Any] = []
    monkeypatch.setattr(cuda_peers, "torch_subject", lambda bench, layout: asked.append(("torch", layout)))
    monkeypatch.setattr(cuda_peers.GraphPlans, "subject", lambda self, bench, layout: asked.append((self.limit_s, layout)))
    monkeypatch.setattr(cuda_peers, "tvm_searched", lambda convs, *rest: {"tvm": lambda bench: asked.append(("tvm", convs))})

    class Named:
        def __enter__(self) -> Any:
            return iter([("cudnn_gemm", lambda: asked.append("gemm"))])

        def __exit__(self, *reason: object) -> None:
            asked.append("closed")

    monkeypatch.setattr(cuda_peers, "cudnn_subjects", lambda bench, accuracy: Named())
    names = ["torch_nhwc", "cudnn", "cudnn-graph", "cudnn-graph_nchw", "tvm"]
    mine = {"mine": lambda bench: asked.append("mine")}
    with Peers(names, "float32", H200, plan_s=3.0, tvm_trials=2, tvm_cache=tmp_path, extra=mine) as peers:  # type: ignore[arg-type]
        assert peers.names == ["torch_nhwc", "cudnn-graph", "cudnn-graph_nchw", "mine", "tvm"] and peers.by_name
        peers.search([CONV])
        with peers.of(SimpleNamespace(conv=CONV)) as prepared:  # type: ignore[arg-type]
            for _, prepare in prepared:
                prepare()
    assert asked == [("torch", "NHWC"), (3.0, None), (3.0, "NCHW"), "mine", ("tvm", [CONV]), "gemm", "closed"]
    assert peers.names == ["torch_nhwc", "cudnn-graph", "cudnn-graph_nchw", "mine", "tvm"]


def test_rows_without_the_algorithms_by_name_are_measured_again() -> None:
    """Where cuDNN has them: it has none for a layer with an epilogue."""
    rows = [
        Row("a", str(CONV), peers={"torch_nchw": 1.0}),
        Row("b", str(CONV), peers={"cudnn_gemm": 1.0}),
        Row("c", str(CONV), peers_failed={"cudnn_fft": "refused"}),
        Row("d", str(CONV.with_(bias=True)), peers={"torch_nchw": 1.0}),
        Row("e", str(CONV), peers={"cudnn-graph": 1.0}),
    ]
    result = Result("mine", "float32", 2, "gpu", "A GPU", 1, {}, "", "2026-01-01", {}, rows)
    assert [row.layer for row in cuda_bench.with_algorithms(result, "float32").layers] == ["b", "c", "d"]


def test_reports_have_a_name_for_every_peer() -> None:
    assert {*cuda_peers.SINGLE, "cutlass"} <= subjects.TITLES.keys() and {*cuda_peers.SINGLE, "cutlass"} <= subjects.COLOURS.keys()
    times = {"cudnn_gemm": 3.0, "cudnn_fft": 2.0, "cudnn-graph": 1.0, "inductor_nhwc": 4.0, "cutlass": 5.0}
    row = Row("a", str(CONV), ours_ms=1.0, peers=times, best_peer="cudnn-graph", peers_chosen={"cutlass": "tile 1"})
    result = Result("mine", "float32", 2, "gpu", "A GPU", 1, {}, "", "2026-01-01", {}, [row])
    assert subjects.subjects(subjects.gathered(result)) == ["cudnn", "cudnn-graph", "inductor_nhwc", "cutlass"]


def test_the_table_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import peers_table

    times = {"torch_nchw": 0.3, "torch_nhwc": 0.2, "cudnn_gemm": 0.4, "cudnn-graph": 0.1}
    rows = [
        Row("a", str(CONV), ours_ms=0.1, peers=times, peers_chosen={"cudnn-graph": "eng1"}),
        Row("b", str(CONV), peers={"torch_nhwc": 0.2}, failed="no", peers_failed={"cudnn_gemm": "no", "cudnn-graph": "no plan"}),
    ]
    result = Result("mine", "float32", 2, "gpu", "A GPU", 1, {}, "", "2026-01-01", {}, rows)
    assert list(peers_table.lines(result)) == [
        "mine, float32, batch 2, A GPU: us",
        "layer             ours        PyTorch  cuDNN by name    cuDNN graph",
        "a                100.0          200.0          400.0          100.0; eng1",
        "b               failed          200.0              -              -; cudnn-graph: no plan",
        "PyTorch over ours, geometric mean of 1 layers: 2.000",
        "cuDNN by name over ours, geometric mean of 1 layers: 4.000",
        "cuDNN graph over ours, geometric mean of 1 layers: 1.000",
    ]


class Process:
    """Stands in for a worker process: answers from a list, and records the jobs."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.jobs, self.closed = list(answers), list[Any](), False

    def call(self, job: Any, timeout_s: float) -> Any:
        self.jobs.append((job, timeout_s))
        return self.answers.pop(0)

    def close(self) -> None:
        self.closed = True


def test_inductor_is_compiled_and_sampled_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(Compiled(1e-6, 64, "extern_kernels.convolution"), 0.5, 0.25, 0.125, 0.125)
    monkeypatch.setattr(cuda_peers, "Worker", lambda module: process)
    peer = Inductor("NHWC", "tf32")
    found = peer.subject(SimpleNamespace(conv=CONV, seed=5))  # type: ignore[arg-type]
    assert (found.error, found.extra_bytes, found.algorithm) == (1e-6, 64, "extern_kernels.convolution")
    assert process.jobs == [(Compile(CONV, 5, "NHWC", "tf32"), cuda_peers.COMPILE_S)]
    samples = interleaved(None, {"inductor_nhwc": found}, 2)  # type: ignore[arg-type]
    assert samples == {"inductor_nhwc": [0.125, 0.125]} and process.jobs[-1] == (Sample(), cuda_peers.SAMPLE_S)
    process.answers.append("no such operator")
    with pytest.raises(PeerError, match=r"^inductor: no such operator$"):
        peer.subject(SimpleNamespace(conv=CONV, seed=5))  # type: ignore[arg-type]
    peer.close()
    assert process.closed


def test_a_failed_compilation_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Handler, job: Compile) -> Compiled:
        raise RuntimeError("no Triton")

    monkeypatch.setattr(Handler, "_compiled", fails)
    assert Handler()(Compile(CONV, 0, "NCHW", "float32")) == "no Triton"
    handler = Handler()
    handler._bench, handler._call = object(), lambda: None  # type: ignore[assignment]
    monkeypatch.setattr(inductor_worker, "sample", lambda bench, call: 0.5)
    assert handler(Sample()) == 0.5


def test_the_kernels_that_inductor_chose() -> None:
    names = "extern_kernels.convolution, triton_poi_fused_add, extern_kernels.mm, triton_tem_fused_convolution_relu"
    assert inductor.chosen([GENERATED]) == names and inductor.chosen([]) == ""


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("change", [{}, {"padding": (0, 1, 2, 1), "activation": "relu"}, {"bias": True, "residual": True, "groups": 2}])
def test_the_module_computes_the_layer(change: dict[str, Any], layout: str) -> None:
    from im2win.tuner.runners.cuda import device_tensors, reference

    conv = CONV.with_(**change)
    tensors = device_tensors(conv, 0, "cpu")
    residual = [tensors["residual"]] if conv.residual else []
    y = inductor.module(conv, tensors, layout)(tensors["data"], *residual)
    want, scale = reference(conv, tensors)
    assert float((y.double() - want).abs().max()) / scale < 1e-5


def test_inductor_refuses_integers() -> None:
    with pytest.raises(PeerError, match="`dtype`"):
        inductor.compiled(CONV.with_(dtype="int8"), {}, "NCHW")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler uses what PyTorch deprecates
def test_a_compiled_layer_computes_it() -> None:
    """On a CPU, with the options for a GPU, whose names PyTorch checks."""
    from im2win.tuner.runners.cuda import device_tensors, reference

    conv = CONV.with_(layout="NHWC", bias=True, residual=True, activation="relu")
    tensors = device_tensors(conv, 0, "cpu")
    y = inductor.compiled(conv, tensors, "NHWC")().permute(0, 2, 3, 1)
    want, scale = reference(conv, tensors)
    assert float((y.double() - want).abs().max()) / scale < 1e-5
