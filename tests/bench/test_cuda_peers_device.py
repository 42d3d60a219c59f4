"""The peers with a choice of their own on a GPU: what they run computes the layer."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from gpu_only import this_gpu
from paths import ROOT

from im2win.bench.cuda_harness import set_up_peers
from im2win.bench.cuda_peers import GraphPlans, Inductor, plan_tolerance
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.runners.cuda import Bench

GPU = this_gpu()
pytest.importorskip("torch")
HEADERS = "IM2WIN_CUTLASS"

LAYER = Conv2d.parse("n2-c32x13x15-k64x3x3-p1")
LAYERS: dict[str, tuple[Conv2d, Accuracy]] = {
    "float16": (LAYER.with_(dtype="float16", layout="NHWC"), "float32"),
    "float16, fused": (LAYER.with_(dtype="float16", layout="NHWC", bias=True, residual=True, activation="relu"), "float32"),
    "float16, channels first": (LAYER.with_(dtype="float16", bias=True), "float32"),
    "bfloat16": (LAYER.with_(dtype="bfloat16", layout="NHWC", padding=(0, 1, 2, 1)), "float32"),
    "float32": (LAYER.with_(bias=True, activation="hardswish"), "float32"),
    "float32, exact": (LAYER, "exact"),
    "TF32": (LAYER.with_(layout="NHWC"), "tf32"),
    "int8": (LAYER.with_(dtype="int8", layout="NHWC"), "float32"),
    "int8, requantised": (LAYER.with_(dtype="int8", layout="NHWC", out_dtype="int8", bias=True, residual=True), "float32"),
}


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="nvidia-cudnn-frontend is not installed")
@pytest.mark.parametrize("name", LAYERS)
def test_a_plan_of_cudnns_graphs_computes_the_layer(name: str) -> None:
    conv, accuracy = LAYERS[name]
    bench = Bench(conv, 0)
    peer = GraphPlans(accuracy, 10.0)
    for _ in range(2):  # the second time it is known
        found = peer.subject(bench)
        assert found.error <= plan_tolerance(conv, accuracy, bench.scale) and "eng" in found.algorithm


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_inductor_computes_the_layer(layout: str) -> None:
    conv, accuracy = LAYERS["float16, fused"]
    peer = Inductor(layout, accuracy)
    try:
        found = peer.subject(Bench(conv, 0))
        assert found.sample is not None and 0 < found.sample() < 1 and found.algorithm
    finally:
        peer.close()


@pytest.mark.timeout(900)
@pytest.mark.skipif(GPU.arch != "sm_90a", reason="the variants are for compute capability 9.0")
@pytest.mark.skipif(HEADERS not in os.environ, reason=f"CUTLASS's headers are not in the folder {HEADERS}")
def test_a_variant_of_cutlass_computes_the_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu" / "cutlass_peer"))
    sys.modules.pop("cutlass_peer", None)
    import cutlass_peer

    set_up_peers("float32")
    built = cutlass_peer.build_all(Path(os.environ[HEADERS]), tmp_path)
    assert not [library for library in built.values() if isinstance(library, str)]
    for change in ({}, {"stride": (2, 1), "padding": (0, 1, 2, 1)}, {"kernel": (1, 1), "padding": 0}, {"dilation": (2, 1)}):
        found = cutlass_peer.subject(Bench(LAYER.with_(dtype="float16", layout="NHWC", **change), 0), built)
        assert "(the fastest of 8 plans)" in found.algorithm
