"""cuDNN on a GPU: every plan against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_only import this_gpu
from oracle import exact_tensors, oracle

from im2win.bench.peers.cudnn import MATHS, Cudnn, CudnnError, find_library, output_dtype
from im2win.spec.conv2d import Conv2d

this_gpu()
torch = pytest.importorskip("torch")
if find_library() is None:
    pytest.skip("libcudnn.so.9 is not installed", allow_module_level=True)

KEYS = (
    "n2-c8x12x14-k16x3x3-p1",
    "n2-c8x12x14-k16x3x3-p1-NHWC",
    "n3-c16x33x29-k32x5x3-s2x1-p2x1",
    "n2-c12x15x17-k24x3x3-p2-d2-g2-NHWC",
    "n1-c6x9x11-k6x3x3-p1-g6",
    "n2-c16x9x11-k32x1x1-float16-NHWC",
    "n2-c16x13x11-k32x3x3-p1-float16",
    "n2-c32x13x11-k32x3x3-p1-int8-NHWC",
    "n2-c32x13x11-k32x3x3-p1-int8-out.int8-NHWC",
)


@pytest.mark.parametrize("key", KEYS)
def test_every_plan_computes_the_convolution(key: str) -> None:
    """Small integers: exact in every type (float16 rounds the sum once), unless an algorithm transforms x and w and rounds on the way."""
    conv = Conv2d.parse(key)
    tensors = exact_tensors(conv)
    expected = oracle(conv, tensors["data"], tensors["filter"], scale=np.ones(conv.out_channels) if conv.requantised else None)
    filters = tensors["filter"] if conv.layout == "NCHW" else tensors["filter"].transpose(0, 2, 3, 1)
    x, w = (torch.from_numpy(np.ascontiguousarray(a.astype(conv.dtype))).cuda() for a in (tensors["data"], filters))
    ran = 0
    with Cudnn() as handle:
        handle.set_stream(torch.cuda.current_stream().cuda_stream)
        for math in (name for name, dtypes in MATHS.items() if conv.dtype in dtypes):
            for plan in handle.plans(conv, math):
                y = torch.full(conv.output_shape, 99, dtype=getattr(torch, output_dtype(conv)), device="cuda")
                workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
                try:
                    handle.runner(conv, plan, x.data_ptr(), w.data_ptr(), y.data_ptr(), workspace.data_ptr())()
                except CudnnError as error:
                    assert "NOT_SUPPORTED" in str(error)  # accepted by its description, refused when run
                    continue
                transformed = plan.algorithm.startswith(("FFT", "WINOGRAD"))
                tolerance = 5e-2 if transformed and plan.math != "FMA" else 1e-3
                wrong = np.abs(y.cpu().numpy().astype(np.float64) - expected).max() / np.abs(expected).max()
                assert wrong <= tolerance, f"{plan}: {wrong}"
                ran += 1
    assert ran or conv.dtype == "int8", "cuDNN accepts at least the implicit product of every such problem"
