"""For modules whose tests run on a GPU: without one, or without PyTorch, such a module is skipped as a whole."""

from __future__ import annotations

import pytest

from im2win.device.gpu import Gpu, NoGpuError, device_gpu


def this_gpu() -> Gpu:
    """The GPU that kernels can be generated for and run on; skips the module where there is none."""
    torch = pytest.importorskip("torch")
    try:
        if torch.cuda.is_available():
            return device_gpu()
    except NoGpuError:
        pass
    pytest.skip("runs on an NVIDIA GPU of compute capability 8.0 or newer, with PyTorch", allow_module_level=True)
