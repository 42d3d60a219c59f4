"""The benchmark's parts: reference, peers, workers, rounds, ceilings, and a whole run on subjects whose answers are known."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_subject import Fake

from im2win.bench import ceilings
from im2win.bench import cpu as bench
from im2win.bench import harness as harness
from im2win.bench.harness import Worker, WorkerError, interleaved
from im2win.bench.memory import MeasureError, peak_of_library
from im2win.bench.peers.cpu import Array, OnnxRuntime, OpenVino, Torch, TvmDefault, peers
from im2win.bench.peers.subject import PeerError, Subject, Tensors
from im2win.bench.results import Result
from im2win.bench.source import digests
from im2win.builder.build import looked_up
from im2win.device.cpu import Machine
from im2win.numerics.reference import error
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer

SMALL = Conv2d(1, 3, 6, 6, 4, 3)
REGIMES = [
    "n2-c4x9x8-k6x3x3",
    "n1-c3x11x10-k5x5x3-s2x3-p1.0.2.1",  # asymmetric padding, strides that leave a rest
    "n1-c4x12x12-k6x3x3-p2-d2-g2",
    "n2-c8x7x7-k8x3x3-s2-p1-g8-bias-relu6",  # depthwise
    "n1-c16x6x6-k8x1x1-bias-add-relu",
    "n1-c4x8x8-k4x3x3-p1-NHWC-bias-add-silu",
]


def naive(conv: Conv2d, tensors: Tensors) -> Array:
    """The definition, one output at a time, NCHW without epilogue."""
    top, left, _, _ = conv.padding
    share, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    y = np.zeros(conv.output_shape)
    for n, j, m, x in np.ndindex(*conv.output_shape):
        for c, u, v in np.ndindex(share, *conv.kernel):
            row = m * conv.stride[0] + u * conv.dilation[0] - top
            column = x * conv.stride[1] + v * conv.dilation[1] - left
            if 0 <= row < conv.height and 0 <= column < conv.width:
                y[n, j, m, x] += float(tensors.data[n, j // filters * share + c, row, column]) * float(tensors.filter[j, c, u, v])
    return y


@pytest.mark.parametrize("key", REGIMES[:3])
def test_reference_is_the_definition(key: str) -> None:
    conv = Conv2d.parse(key)
    tensors = Tensors.random(conv)
    np.testing.assert_allclose(tensors.expected(conv), naive(conv, tensors), rtol=0, atol=1e-12)


def test_reference_epilogue_order() -> None:
    conv = Conv2d(1, 1, 1, 1, 2, 1, bias=True, residual=True, activation="relu6")
    one = np.ones((1, 2, 1, 1), np.float32)
    tensors = Tensors(one[:, :1], np.array([-9.0, 4.0], np.float32).reshape(2, 1, 1, 1), np.float32([1, 1]), one * 3)
    assert tensors.expected(conv).ravel().tolist() == [0.0, 6.0]


@pytest.mark.parametrize("key", REGIMES)
@pytest.mark.parametrize("peer", [Torch(), Torch(channels_last=True), OnnxRuntime(), OpenVino()], ids=lambda peer: peer.name)
def test_peer_computes_the_layer(key: str, peer: Subject) -> None:
    pytest.importorskip("torch" if isinstance(peer, Torch) else peer.name)
    conv = Conv2d.parse(key)
    tensors = Tensors.random(conv, seed=3)
    trial = peer.prepare(conv, tensors, 1)
    trial.call()
    assert error(trial.read(), tensors.expected(conv)) <= 1e-5


@pytest.mark.parametrize("key", REGIMES[:3])
def test_tvm_peer_is_the_same_convolution(key: str) -> None:
    import tvm

    from im2win.bench.peers.tvm_default import definition

    conv = Conv2d.parse(key)
    tensors = Tensors.random(conv)
    output = tvm.runtime.tensor(np.full(conv.output_shape, np.nan, np.float32))
    tvm.compile(definition(conv), target="llvm")(tvm.runtime.tensor(tensors.data), tvm.runtime.tensor(tensors.filter), output)
    assert error(output.numpy(), tensors.expected(conv)) <= 1e-5


def test_tvm_peer_sums_float16_in_float32() -> None:
    import tvm

    from im2win.bench.peers.tvm_default import definition

    conv = Conv2d.parse("n1-c64x9x8-k6x3x3-p1-float16")
    tensors = Tensors.random(conv)
    x, w = tensors.data.astype(np.float16), tensors.filter.astype(np.float16)
    output = tvm.runtime.tensor(np.full(conv.output_shape, np.nan, np.float16))
    tvm.compile(definition(conv), target="llvm")(tvm.runtime.tensor(x), tvm.runtime.tensor(w), output)
    rounded = replace(tensors, data=x.astype(np.float32), filter=w.astype(np.float32))
    assert error(output.numpy(), rounded.expected(conv)) <= 2**-11


def test_peer_refuses_other_types() -> None:
    conv = SMALL.with_(dtype="float16")
    with pytest.raises(PeerError, match="`dtype` \\(='float16'\\) must be float32"):
        OnnxRuntime().prepare(conv, Tensors.random(conv), 1)


def test_tvm_peer_refuses_an_epilogue() -> None:
    conv = SMALL.with_(bias=True)
    with pytest.raises(PeerError, match="has no epilogue"):
        TvmDefault(1).prepare(conv, Tensors.random(conv), 1)


def test_torch_stands_for_both_layouts() -> None:
    assert [peer.name for peer in peers(["torch", "onnxruntime", "torch_nhwc"])] == ["torch_nchw", "torch_nhwc", "onnxruntime"]
    with pytest.raises(ValueError, match="`against` \\(='mkl'\\) must be one of torch, "):
        peers(["mkl"])


def test_random_tensors_follow_the_seed_and_are_normal() -> None:
    conv = Conv2d(4, 16, 32, 32, 8, 3)
    first, again, other = (Tensors.random(conv, seed).data for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert abs(first.mean()) < 0.02 and abs(first.std() - 1) < 0.02


def test_random_tensors_start_at_cache_lines() -> None:
    """As those of a network do, so that no subject is timed on memory that no network gives it."""
    tensors = Tensors.random(Conv2d.parse("n1-c5x33x35-k7x3x3-bias-add"))
    assert [one.ctypes.data % 64 for one in (tensors.data, tensors.filter, tensors.bias, tensors.residual) if one is not None] == [0] * 4


def test_worker_is_stopped_between_requests_and_gone_after() -> None:
    with Worker(Fake("one"), 1, timeout=60) as worker:
        prepared = worker.prepare(SMALL, seed=0)
        assert (prepared.algorithm, prepared.tuned, prepared.extra_bytes) == ("fake", True, 64)
        assert worker._process is not None
        process = psutil.Process(worker._process.pid)
        time.sleep(0.05)
        assert process.status() == psutil.STATUS_STOPPED
        assert worker.sample(0.0, 2) >= 0
    assert not process.is_running()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mood", "message", "timeout"),
    [("dies", "ended with code 3 during prepare", 60.0), ("raises", "ValueError: not this layer", 60.0), ("hangs", "within 3 s", 3.0)],
)
def test_worker_says_why_it_failed_and_serves_on(mood: str, message: str, timeout: float) -> None:
    with Worker(Fake("bad", mood=mood), 1, timeout) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError, match=message):
                worker.prepare(SMALL, seed=0)


class Shares(Worker):
    """Threads that get these shares of two CPUs, one warm-up after the other."""

    def __init__(self, *shares: float) -> None:
        super().__init__(Fake("fake"), threads=2)
        self.shares, self.log, self._layer = list(shares), list[str](), (SMALL, 0)

    def _ask(self, request: str, *arguments: Any) -> Any:
        self.log.append(request)
        return float(len(self.shares)), 2 * self.shares.pop(0)

    def prepare(self, conv: Conv2d, seed: int) -> Any:
        self.log.append("prepare")


@pytest.mark.parametrize(("shares", "restarts"), [((0.9,), 0), ((0.5, 0.6, 0.8), 2), ((0.5,) * 4, 3)])
def test_a_process_whose_threads_share_a_core_is_started_anew(
    shares: tuple[float, ...], restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESTARTS", 3)
    worker = Shares(*shares)
    assert worker.warm(0.5) == len(shares) - restarts and worker.log == ["warm", *["prepare", "warm"] * restarts]


def test_rounds_time_what_was_asked() -> None:
    with Worker(Fake("slow", 0.004), 1) as slow, Worker(Fake("fast", 0.0005), 1) as fast:
        workers = {"slow": slow, "fast": fast}
        for worker in workers.values():
            worker.prepare(SMALL, seed=0)
        samples, failed = interleaved(workers, rounds=3, warmup=0.02, settle=0.01)
    assert not failed and all(len(values) == 3 for values in samples.values())
    assert 0.004 <= min(samples["slow"]) < 0.02 and 0.0005 <= min(samples["fast"]) < 0.004


def test_rounds_go_on_while_the_samples_leave_a_doubt() -> None:
    asked: list[int] = []

    def unclear(samples: Any) -> bool:
        asked.append(len(samples["fast"]))
        return len(asked) < 3

    with Worker(Fake("fast", 0.0005), 1) as fast:
        fast.prepare(SMALL, seed=0)
        samples, _ = interleaved({"fast": fast}, rounds=2, warmup=0.01, settle=0.0, unclear=unclear)
        assert asked == [2, 4, 6] and len(samples["fast"]) == 6
        samples, _ = interleaved({"fast": fast}, rounds=2, warmup=0.01, settle=0.0, unclear=lambda _: True)
        assert len(samples["fast"]) == 2 * harness.PATIENCE


@pytest.mark.parametrize(
    ("ours", "unclear"), [((0.95, 0.96, 0.95), False), ((1.0, 1.01, 0.99), True), ((1.04, 1.05, 1.06), True), ((1.1, 1.11, 1.1), False)],
    ids=["faster", "as fast", "perhaps slower", "slower"],
)  # fmt: skip
def test_doubt_is_whether_the_choice_is_slower_than_the_default(ours: tuple[float, ...], unclear: bool) -> None:
    assert bench._unclear("ours", {"ours": ours, "untuned": (1.0,) * 3, "peer": (5.0,) * 3}) is unclear
    assert not bench._unclear("ours", {"ours": ours})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of 100 GFLOPS and 10 GB/s without measuring."""
    monkeypatch.setattr(bench.ceilings, "measure", lambda threads, **_: ceilings.Ceilings(100.0, 10.0))


@pytest.mark.usefixtures("quick")
def test_run_compares_checks_and_survives(tmp_path: Path) -> None:
    bad = [Fake("wrong", 0.0001, factor=1.1), Fake("nan", factor=float("nan")), Fake("x", mood="dies")]
    field = [Fake("ours", 0.001), Fake("untuned", 0.001), Fake("good", 0.002), *bad]
    seen: list[int] = []
    result = bench.run(
        [Layer("a", SMALL, 2)], against=(), batch=2, rounds=3, seconds_warmup=0.01, threads=1, subjects=field, suite="fakes",
        progress=lambda done, total, row: seen.append(done), keep=lambda result: seen.append(len(result.layers)),
    )  # fmt: skip
    (row,) = result.layers
    assert seen == [1, 1] and row.failed is None and row.conv == str(SMALL.with_(batch=2)) and row.count == 2
    assert set(row.peers) == {"good"} and row.best_peer == "good" and row.ratio == pytest.approx(2.0, rel=0.5)
    assert row.peers_failed["wrong"].startswith("wrong result") and row.peers_failed["nan"].startswith("wrong result: relative error nan")
    assert "code 3" in row.peers_failed["x"]
    assert row.error is not None and row.error < 1e-6 and (row.algorithm, row.tuned, row.extra_bytes) == ("fake", True, 64)
    assert row.spread["ours"].samples == 3 and row.spread["ours"].p10 <= row.spread["ours"].median <= row.spread["ours"].p90
    assert (row.tile, row.tier, row.untuned_algorithm, row.untuned_tile) == ({"width": 8}, "nearest layer", "fake", {"width": 8})
    assert result.digests == digests("cpu")
    path = result.save(tmp_path / "r.json")
    assert Result.load(path) == result


@pytest.mark.parametrize("tuned", [None, False])
def test_our_subject_says_which_tier_chose_which_tile(tuned: bool | None) -> None:
    trial = bench.Ours(tuned=tuned).prepare(SMALL, Tensors.random(SMALL), 1)
    assert trial.tile == bench.Ours(tuned=tuned).build(SMALL, 1).tile and trial.tile
    assert trial.tier == ("default" if tuned is False else looked_up(SMALL, Machine.host(1))[2])
    assert trial.tuned == (trial.tier == "exact") and json.loads(json.dumps(trial.tile)) == trial.tile


def test_a_layer_without_a_record_is_refused_where_one_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"ours: no tuning record for n.*; tune it first"):
        bench.Ours(tmp_path, tuned=True).prepare(SMALL, Tensors.random(SMALL), 1)


@pytest.mark.usefixtures("quick")
def test_a_layer_we_fail_on_is_an_error_not_a_number() -> None:
    field = [Fake("ours", mood="raises"), Fake("good", 0.001)]
    result = bench.run([Layer("a", SMALL)], against=(), rounds=1, seconds_warmup=0.0, threads=1, subjects=field)
    (row,) = result.layers
    assert row.failed == "ValueError: not this layer"
    assert row.ours_ms is row.ratio is row.gflops is row.roofline_fraction is None and row.peers["good"] > 0


def test_run_refuses_nonsense() -> None:
    for arguments, message in (
        ({"layers": []}, "`layers` must name"),
        ({"layers": [Layer("a", SMALL)], "rounds": 0}, "`rounds` \\(=0\\)"),
        ({"layers": [Layer("a", SMALL)], "against": ["no"]}, "`against` \\(='no'\\)"),
        ({"layers": [Layer("a", SMALL)], "threads": 0}, "`threads` \\(=0\\)"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.run(**arguments)  # type: ignore[arg-type]


def test_roofline_takes_the_slower_side() -> None:
    conv = Conv2d(1, 64, 56, 56, 64, 3)
    assert ceilings.Ceilings(100.0, 1e9).floor_ms(conv) == pytest.approx(conv.flops / 100e6)
    assert ceilings.Ceilings(1e9, 10.0).floor_ms(conv) == pytest.approx(conv.bytes_moved / 10e6)


def test_fma_kernel_is_registers_only_and_right() -> None:
    import tvm

    from im2win.device.cpu import Machine

    machine = Machine.host(1)
    kernel = ceilings.fma_kernel(1, machine.lanes, machine.mcpu)
    factors = np.random.default_rng(0).uniform(0.25, 0.75, (1, machine.lanes)).astype(np.float32)
    sums = tvm.runtime.tensor(np.zeros((1, ceilings.CHAINS, machine.lanes), np.float32))
    kernel(tvm.runtime.tensor(factors), sums)
    np.testing.assert_allclose(sums.numpy(), np.broadcast_to(factors / (1 - factors), sums.shape), rtol=1e-5)
    if "x86" in os.uname().machine:
        lines = [line.split() for line in kernel.mod.inspect_source("asm").splitlines() if line.strip()]
        runs = [list(group) for fused, group in itertools.groupby(lines, lambda words: words[0].startswith("vfmadd")) if fused]
        assert max(map(len, runs)) >= ceilings.CHAINS, "the loop must be FMAs in a row"


def test_memory_of_a_missing_library(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="ended with code 1"):
        peak_of_library(tmp_path / "none.so")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("algorithm", "stored"), [("direct/tiled", False), ("im2col/tiled", True)])
def test_peak_memory_is_the_formula(algorithm: str, stored: bool) -> None:
    from im2win.bench.memory import peak_bytes
    from im2win.builder.build import build
    from im2win.registry.schedules import schedule_of

    conv = Conv2d(4, 32, 40, 40, 32, 3)
    expected = conv.bytes_moved + stored * schedule_of(algorithm).transform_bytes(conv)
    assert expected <= peak_bytes(build(conv, algorithm=algorithm)) <= expected + (1 << 20)  # pool stacks and strips: well under a megabyte


@pytest.mark.slow
def test_a_memory_measurement_that_fails_costs_its_number_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(op: Any) -> int:
        raise MeasureError("measuring ended with code -9")

    monkeypatch.setattr(bench, "peak_bytes", fails)
    result = bench.run([Layer("tiny", Conv2d(1, 3, 8, 8, 4, 3))], against=[], rounds=2, seconds_warmup=0.01, memory=True)
    [row] = result.layers
    assert row.failed is None and row.ours_ms is not None
    assert row.peak_bytes is None and row.peak_failed == "measuring ended with code -9"
