"""`im2win.torch.optimize`: modules on im2win equal PyTorch's, in every memory format and shape."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import Residual, integers, resnet, with_integers  # noqa: E402
from optimizing import Heads, X, equal, optimized  # noqa: E402
from timm_models import timm  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("direct")

# --- whole modules


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.Identity()], ids=["relu", "relu6", "none"])
def test_a_residual_block_is_exact(activation: nn.Module, calls: list[str]) -> None:
    module = with_integers(Residual(activation=activation))
    fast = optimized(module)
    report = fast.im2win_report
    assert report.mode == "graph" and report.swapped == 3 and isinstance(fast, Residual)
    calls.clear()
    equal(fast, module)
    assert len(calls) == 3 and len(set(calls)) == 3
    word = {"Identity": "none"}.get(type(activation).__name__, type(activation).__name__.lower())
    assert [layer.fused[-1] for layer in report.layers] == (["norm", "add", "norm"] if word == "none" else [word, word, "norm"])


@pytest.mark.slow
def test_resnet_50() -> None:
    """ResNet-18 is what examples/05_pytorch_resnet.py runs in the tests of texts."""
    torch.manual_seed(0)
    module, x = resnet(50), torch.randn(1, 3, 32, 32)
    fast = optimized(module, x)
    report = fast.im2win_report
    assert report.swapped == len(report.layers) == 53 and sum("add" in one.fused for one in report.layers) == 16
    with torch.inference_mode():
        y, expected = fast(x), module(x)
    assert float((y - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    for line in ("53 of 53 convolutions on im2win", "norm add relu", "default tile", "stages.0.convs.0"):
        assert line in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_035", "regnety_002"])
def test_timm(name: str) -> None:
    torch.manual_seed(0)
    module, x = timm().create_model(name, num_classes=10).eval(), torch.randn(1, 3, 32, 32)
    fast = optimized(module, x)
    assert fast.im2win_report.mode == "graph" and fast.im2win_report.swapped == len(fast.im2win_report.layers)
    assert sum("norm" in one.fused for one in fast.im2win_report.layers) > 10
    with torch.inference_mode():
        y, expected = fast(x), module(x)
    assert float((y - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_what_convolutions_there_are() -> None:
    """Strides, groups, dilation, sides that differ, windows that are not square; what is none of ours stays."""
    module = nn.Sequential(
        nn.Conv2d(5, 8, (3, 2), (2, 1), (0, 1)), nn.Conv2d(8, 8, 3, groups=8, dilation=(1, 2), padding="same"), nn.SiLU(),
        nn.Conv2d(8, 6, 4, padding="same", groups=2, bias=False), nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 4, 1).double(),
    )  # fmt: skip
    module.insert(6, _To(torch.float64))
    module.eval()
    with pytest.warns(UserWarning, match="padding='same'"):
        fast = optimized(module)
        with torch.inference_mode():
            torch.testing.assert_close(fast(X), module(X), atol=1e-4, rtol=1e-2)
    report = {layer.name: (bool(layer.algorithm), layer.reason) for layer in fast.im2win_report.layers}
    assert [report[name][0] for name in ("0", "1", "3")] == [True] * 3
    assert report["4"] == (False, "padding mode 'circular'") and "float64" in report["7"][1] and not report["7"][0]
    assert [str(layer.conv) for layer in fast.im2win_report.layers][:3] == [
        "n2-c5x12x14-k8x3x2-s2x1-p0x1-bias", "n2-c8x5x15-k8x3x3-p1x2-d1x2-g8-bias-silu", "n2-c8x5x15-k6x4x4-p1.1.2.2-g2",
    ]  # fmt: skip


class _To(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def test_inputs_and_outputs_of_any_structure(calls: list[str]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(5, 4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
            return {"sum": self.conv(x) + self.conv(y) * scale, "both": (x, [y])}

    module = with_integers(Two())
    fast = optimized(module, (X, X + 1))
    assert len(fast.im2win_report.layers) == 2
    calls.clear()
    with torch.inference_mode():
        for arguments, options, count in (((X, X + 1), {}, 2), ((X,), {"y": X + 1}, 2), ((X, X + 1, 3.0), {}, 0)):
            y, expected = fast(*arguments, **options), module(*arguments, **options)
            assert torch.equal(y["sum"], expected["sum"]) and y["both"][0] is X
            assert len(calls) == count
            calls.clear()


# --- memory formats and shapes


def test_channels_last_in_is_channels_last_out() -> None:
    module, x = with_integers(Residual()), X.contiguous(memory_format=torch.channels_last)
    fast = optimized(module, x)
    assert all(layer.conv and layer.conv.layout == "NHWC" for layer in fast.im2win_report.layers)
    equal(fast, module, x)
    last = copy.deepcopy(module).to(memory_format=torch.channels_last)  # the first layer decides by its filters
    fast = optimized(last, X)
    assert fast.im2win_report.layers[0].conv and fast.im2win_report.layers[0].conv.layout == "NHWC"
    equal(fast, last, X)


def test_filters_may_change_their_type_and_memory_format(calls: list[str]) -> None:
    module = with_integers(Residual())
    fast = optimized(module, dynamic="build")
    equal(fast, module)
    fast.to(memory_format=torch.channels_last)
    calls.clear()
    equal(fast, module)
    assert len(calls) == 3 and all("-NHWC" in name for name in calls)
    fast.double()
    with torch.inference_mode():
        assert torch.equal(fast(X.double()), module(X.double()))
    fast.float()
    equal(fast, module)


def test_other_shapes_fall_back_with_one_note(calls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    module = with_integers(Residual())
    fast = optimized(module)
    calls.clear()
    with caplog.at_level(logging.WARNING, "im2win.torch"):
        for x in (X[:1], X[:, :, 2:], X[:1], X.contiguous(memory_format=torch.channels_last)):
            equal(fast, module, x)
    assert not calls and len(caplog.records) == 1
    assert "input (1, 5, 12, 14) (NCHW) is not the example's" in caplog.text
    equal(fast, module, X)
    assert len(calls) == 3


def test_other_shapes_are_built_if_asked(calls: list[str], tmp_path: Path) -> None:
    module = with_integers(Residual())
    fast = optimized(module, dynamic="build", cache=tmp_path)
    assert fast.im2win_report.built == 3
    calls.clear()
    for _ in range(2):
        equal(fast, module, X[:1])
    assert len(calls) == 6 and all(name.startswith("n1-") for name in calls)
    assert len(list(tmp_path.glob("*/*.so"))) == 6


def test_inputs_that_are_not_contiguous_are_copied(calls: list[str]) -> None:
    module = with_integers(nn.Conv2d(5, 4, 3))
    wide = integers(2, 5, 12, 28)
    x = wide[..., ::2]
    fast = optimized(module, x)
    calls.clear()
    equal(fast, module, x)
    assert calls


# --- without a graph


def test_modules_that_cannot_be_traced_are_swapped_one_by_one(calls: list[str]) -> None:
    module = with_integers(Heads())
    fast = optimized(module)
    report = fast.im2win_report
    assert report.mode == "modules" and report.note.startswith("torch.fx cannot trace it (TraceError")
    assert [(one.name, one.algorithm, one.fused) for one in report.layers] == [
        ("block.0", "direct/tiled", ()), ("head", "direct/tiled", ()), ("head", "direct/tiled", ()), ("never", "", ()),
    ]  # fmt: skip
    assert "nothing fused: torch.fx cannot trace it" in str(report) and "the example did not reach it" in str(report)
    calls.clear()
    with torch.inference_mode():
        assert all(map(torch.equal, fast(X), module(X))) and len(calls) == 3
    assert list(fast.state_dict()) == list(module.state_dict()) and fast.head.weight is module.head.weight
    assert type(module.head) is nn.Conv2d and isinstance(fast.head, nn.Conv2d) and fast.never is module.never
    with torch.no_grad():
        module.head.weight.neg_()
        assert all(map(torch.equal, fast(X), module(X)))
    calls.clear()
    module.block[1].eps = 1.0  # of 0 training refuses
    alone = copy.deepcopy(module).train()
    fast.train()
    assert all(map(torch.equal, fast(X), alone(X))) and not calls
    assert not module.training and module.block.training is False


# --- bad input


def test_bad_arguments() -> None:
    module = Residual()
    with pytest.raises(ValueError, match=r"`module` must be in eval mode, .*call module.eval\(\) first"):
        im2win.torch.optimize(module, X)
    with pytest.raises(TypeError, match=r"`module` \(a list\) must be a torch.nn.Module"):
        im2win.torch.optimize([], X)
    module.eval()
    for options, message in (
        ({"untuned": "skip"}, r"`untuned` \(='skip'\) must be one of default, keep"),
        ({"dynamic": "yes"}, r"`dynamic` \(='yes'\) must be one of fallback, build"),
        ({"accuracy": "high"}, r"`accuracy` \(='high'\) must be one of exact"),
        ({"threads": 10_000}, r"`threads` \(=10000\) must be an integer from 1"),
    ):
        with pytest.raises(ValueError, match=message):
            im2win.torch.optimize(module, X, **options)
    with pytest.raises(ValueError, match="`module` is a result of optimize already"):
        im2win.torch.optimize(im2win.torch.optimize(module, X, untuned="keep"), X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch advises against what is refused here
        script = torch.jit.trace(module, X)
    with pytest.raises(ValueError, match="`module` is a ScriptModule"):
        im2win.torch.optimize(script, X)
    with pytest.raises(RuntimeError):  # PyTorch's own words
        im2win.torch.optimize(module, X[:, :3])
