"""PyTorch, ONNX Runtime and OpenVINO compute narrow types as `Conv2d` defines, but for one step of an integer output."""

from __future__ import annotations

import numpy as np
import pytest

from im2win.bench.cpu import Ours, checked
from im2win.bench.peers.cpu import OnnxRuntime, OpenVino, Torch
from im2win.bench.peers.quantised import allowed
from im2win.bench.peers.subject import PeerError, Subject, Tensors
from im2win.device.cpu import Machine
from im2win.numerics.tolerance import tolerance
from im2win.spec.conv2d import Conv2d

VNNI = {"avx512vnni", "avxvnni"}
TORCH, LAST, ORT, VINO = Torch(), Torch(channels_last=True), OnnxRuntime(), OpenVino()
LAYERS: list[tuple[str, tuple[Subject, ...]]] = [
    ("n1-c16x9x11-k24x3x3-p1-uint8-out.uint8-zero128-outzero3-bias", (TORCH, LAST, ORT, VINO)),
    ("n1-c16x9x11-k24x3x3-s2-p1-uint8-out.uint8-NHWC-relu", (TORCH, LAST, ORT, VINO)),
    ("n1-c16x9x11-k24x3x3-p1-int8-out.int8-bias", (ORT, VINO)),
    ("n2-c16x9x11-k24x1x1-int8", (ORT,)),
    ("n1-c16x9x11-k24x3x3-p1-uint8-out.float32", (LAST,)),
    ("n1-c16x9x11-k24x3x3-p1-bfloat16-NHWC-bias-add-relu", (TORCH, LAST, VINO)),
    ("n1-c16x9x11-k24x3x3-p1-float16-NHWC-bias-add-relu", (TORCH, LAST, VINO)),
]


@pytest.mark.parametrize(("key", "subjects"), LAYERS, ids=[row[0] for row in LAYERS])
def test_peers(key: str, subjects: tuple[Subject, ...]) -> None:
    pytest.importorskip("torch"), pytest.importorskip("onnxruntime"), pytest.importorskip("openvino")
    conv = Conv2d.parse(key)
    tensors = Tensors.random(conv)
    expected = tensors.expected(conv)
    ours = Ours(tuned=False).prepare(conv, tensors, 1)
    ours.call()
    assert checked(np.asarray(ours.read()), expected, tolerance(conv)) <= tolerance(conv)
    for subject in subjects:
        if subject is VINO and conv.dtype == "int8" and VNNI.isdisjoint(Machine.host().features):
            continue  # its pairs of products saturate in 16 bits there
        trial = subject.prepare(conv, tensors, 1)
        trial.call()
        assert checked(trial.read(), expected, allowed(conv, expected)) >= 0


@pytest.mark.parametrize(
    ("subject", "key", "reason"),
    [
        (TORCH, "n1-c8x6x6-k8x3x3-int8-out.int8", "take uint8"), (ORT, "n1-c8x6x6-k8x3x3-int8-out.int8-add", "no residual"),
        (ORT, "n1-c8x6x6-k8x3x3-bfloat16", "must be float32 or int8 or uint8"),
        (ORT, "n1-c8x6x6-k8x3x3-float16", "must be float32"), (VINO, "n1-c8x6x6-k8x3x3-uint8", "unscaled outputs"),
    ],
)  # fmt: skip
def test_refused(subject: Subject, key: str, reason: str) -> None:
    pytest.importorskip("torch"), pytest.importorskip("onnxruntime")
    conv = Conv2d.parse(key)
    with pytest.raises(PeerError, match=reason):
        subject.prepare(conv, Tensors.random(conv), 1)
