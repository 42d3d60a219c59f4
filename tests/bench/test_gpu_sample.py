"""The sample of kernels for compute-sanitizer: what each may be wrong by is known before a GPU runs it."""

from __future__ import annotations

import sys

import pytest
from paths import ROOT

from im2win.bench.cuda_builds import TileRecipe
from im2win.device.gpu import H200
from im2win.numerics.tolerance import tolerance
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d

pytest.importorskip("torch")


def test_every_kernel_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    sys.modules.pop("sample", None)
    import sample

    monkeypatch.setattr(sample, "device_gpu", lambda: H200)
    backend = backend_for(H200, sample.ACCURACY)
    for (key, _), recipe in sample.studies().items():
        assert sample.bound(Conv2d.parse(key), recipe, backend) == 1e-5
    half = Conv2d.parse("n1-c64x16x16-k64x3x3-p1-float16-NHWC")
    for name in ("implicit_gemm/tiled", "winograd/tiled"):
        found = {backend.accuracy(tile): tile for _, tile in backend.ranked(half, schedule_of(name))}
        for accuracy, tile in found.items():
            bound = sample.bound(half, TileRecipe(half, name, H200, sample.ACCURACY, tile=tile), backend)
            assert bound == (tolerance(half, "winograd") if accuracy == "winograd" else 2e-3)
