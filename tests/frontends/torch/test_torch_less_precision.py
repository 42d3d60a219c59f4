"""Modules of bfloat16 on the CPU: kernels of their type, in both memory formats, with and without the compiled library; autocast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import Residual, integers, with_integers  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.frontends.torch import native  # noqa: E402

X = integers(2, 5, 12, 14)


@pytest.fixture(params=["native", "Python"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "native":
        if not native.load():
            pytest.skip("the library for calls without Python cannot be compiled here")
        yield
    else:
        native.unload()
        yield
        native.load(make=False)


def exactly(module: Residual, x: Any) -> Any:
    """The output in float64 for the numbers that a module and its input hold."""
    wide = with_integers(Residual())
    wide.load_state_dict(module.state_dict())
    return wide.double()(x.double())


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
def test_a_bfloat16_module_gets_kernels_of_its_type(order: Any, way: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.site is native.in_python:
        monkeypatch.setattr(native, "load", lambda **how: False)
    module = with_integers(Residual()).bfloat16().to(memory_format=order)
    x = X.bfloat16().to(memory_format=order)
    fast = im2win.torch.optimize(module, x)
    report = fast.im2win_report
    assert report.swapped == 3, report
    layout = "NCHW" if order is torch.contiguous_format else "NHWC"
    assert {(layer.conv.dtype, layer.conv.layout) for layer in report.layers} == {("bfloat16", layout)}
    assert [layer.fused for layer in report.layers] == [("norm", "relu"), ("norm", "add", "relu"), ("norm",)]
    with torch.inference_mode():
        want = exactly(module, x)
        for _ in range(2):  # the second call is one that the library remembers
            y = fast(x)
            assert y.dtype is torch.bfloat16 and y.is_contiguous(memory_format=order)
            assert float((y.double() - want).abs().max()) <= 2.0**-6 * float(want.abs().max())


def test_a_compiled_bfloat16_module_calls_the_same_kernels() -> None:
    module, x = nn.Conv2d(5, 8, 3, padding=1).eval().bfloat16(), X.bfloat16()
    fast = im2win.torch.optimize(module, x)
    with torch.no_grad():
        compiled = torch.compile(fast, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), fast(x))


def test_autocast_is_left_to_pytorch_and_the_report_says_so() -> None:
    module = with_integers(nn.Sequential(nn.Conv2d(5, 8, 3), nn.ReLU()))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        fast = im2win.torch.optimize(module, X)
        (layer,) = fast.im2win_report.layers
        assert not layer.algorithm and "under autocast, where PyTorch computes in bfloat16" in layer.reason
        assert torch.equal(fast(X), module(X))
    assert torch.equal(fast(X), module(X))


def test_the_types_that_pytorch_computes_in_reach_the_look_up() -> None:
    """A module of float16 runs on im2win, or the report names the types that the CPU's schedules compute."""
    fast = im2win.torch.optimize(nn.Conv2d(5, 8, 3).eval().half(), X.half())
    (layer,) = fast.im2win_report.layers
    assert layer.conv is not None and layer.conv.dtype == "float16"
    assert layer.algorithm or "no algorithm computes" in layer.reason
