"""Quantised modules: convolutions between pairs of quantisation and its inverse, and PyTorch's quantised modules, on integer kernels."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from quantised_torch import by_fx, exported  # noqa: E402
from timm_models import timm  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.common.comparison import Comparison  # noqa: E402
from im2win.frontends.torch import quantised, tracing  # noqa: E402
from im2win.frontends.torch.integer_site import ONEDNN  # noqa: E402

X = torch.randn(2, 3, 12, 14, generator=torch.Generator().manual_seed(1))


def near(fast: Any, module: Any, step: float, x: Any = X) -> None:
    """Compares outputs: an input of the last convolution may differ by a step where float32 rounds to the other side."""
    with torch.inference_mode():
        y, want = fast(x), module(x)
    assert y.dtype is want.dtype and y.shape == want.shape
    assert float((y - want).abs().max()) <= step, float((y - want).abs().max())


@pytest.mark.parametrize("dtype", [torch.uint8, pytest.param(torch.int8, marks=pytest.mark.slow)], ids=["uint8", "int8"])
def test_an_exported_network(dtype: Any) -> None:
    by_channel = dtype is torch.uint8
    module = exported(dtype, by_channel=by_channel, x=X)
    fast = im2win.torch.optimize(module, X)
    rows = {layer.name: layer for layer in fast.im2win_report.layers}
    assert len(rows) == fast.im2win_report.swapped == 5, fast.im2win_report
    word = str(dtype).removeprefix("torch.")
    fused = [rows[name].fused for name in ("grouped", "second", "third", "last")]
    assert fused == [("relu6", "quantize"), ("add", "quantize"), ("add", "relu", "quantize"), ("hardswish",)]
    for name, out in (("grouped", word), ("second", word), ("third", word), ("last", "float32")):
        conv = rows[name].conv
        assert conv is not None and (conv.dtype, conv.out_dtype) == (word, out)
    assert all(layer.error is not None and layer.error <= 1 / 255 for layer in rows.values())
    assert {layer.against for layer in rows.values()} <= {ONEDNN, ""}
    for _ in range(2):  # the second call is one that the compiled library remembers
        near(fast, module, 0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own copies of exported modules warn
        copied = copy.deepcopy(fast)
    near(copied, module, 0.02)


def test_each_group_of_nodes_is_within_one_step() -> None:
    """Every operator against what the module runs on the same integers, and not only what comes of all of them."""
    module = exported(x=X)
    fast = im2win.torch.optimize(module, X, guard=False)
    with torch.no_grad():
        traced = tracing.trace(module, (X,))
    found, refused = quantised.quantised_patterns(traced, ())
    assert not refused and len(found) == len(fast._im2win.sites) == 5
    draw = torch.Generator().manual_seed(2)
    for pattern, site in zip(found, fast._im2win.sites.values(), strict=True):
        shape, dtype, _ = traced.facts[pattern.x]
        x = torch.randint(0, 256, tuple(shape), generator=draw).to(dtype)
        residual = None
        if pattern.added is not None:
            shape, dtype, _ = traced.facts[pattern.added]
            drawn = torch.randint(0, 256, tuple(shape), generator=draw)
            residual = drawn.to(dtype) if dtype is torch.uint8 else drawn / 64
            if pattern.added is pattern.x:
                residual = x
            elif pattern.added in pattern.operands:  # the real numbers that x stands for
                data = pattern.source.data
                residual = (x.float() - float(data.zero[0])) * float(data.scale[0])
        with torch.inference_mode():
            y, want = site(x, residual), pattern.source.run(x, residual)
        assert y.dtype is want.dtype
        if y.dtype is torch.uint8:
            apart = (y.int() - want.int()).abs()
            assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.02
        else:
            torch.testing.assert_close(y, want, atol=1e-2, rtol=1e-3)


def test_changed_parameters_are_packed_again() -> None:
    module = exported(x=X)
    fast = im2win.torch.optimize(module, X)
    state = {name: one.clone() for name, one in module.state_dict().items()}
    state["second.stored"] = -state["second.stored"]
    state["second.bias"] = state["second.bias"] + 1
    module.load_state_dict(state)
    near(fast, module, 0.02)
    state["second.stored"][:] = 5
    state["second.scales"] *= 0  # no scale that integers have: PyTorch computes
    module.load_state_dict(state)
    near(fast, module, 1e-6 + 0.02)


def test_compilers_and_exporters() -> None:
    module = exported(x=X)
    fast = im2win.torch.optimize(module, X)
    with torch.no_grad():
        compiled = torch.compile(fast, backend="eager")
        assert torch.equal(compiled(X), fast(X))
    assert torch.allclose(torch.export.export(fast, (X,)).module()(X), module(X), atol=1e-6)


def test_gradients_of_float32_outputs_are_pytorchs() -> None:
    module = exported(x=X)
    fast = im2win.torch.optimize(module, X)
    y = fast(X)
    y.sum().backward()
    grad = module.last.bias.grad.clone()
    module.last.bias.grad = None
    module(X).sum().backward()
    assert torch.allclose(grad, module.last.bias.grad)


def test_onednn_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that PyTorch's own operator of integers computes as fast keeps PyTorch's nodes, and the report names the operator."""

    def slower(ours: Any, theirs: Any, **how: Any) -> Comparison:
        theirs()
        return Comparison(2e-3, 1e-3, 2.0, 0.01, 9)

    monkeypatch.setattr("im2win.frontends.torch.guard.compare", slower)
    monkeypatch.setattr("im2win.frontends.torch.guard._read", lambda path: None)  # what other tests compared
    monkeypatch.setattr("im2win.frontends.torch.guard._write", lambda path, times: None)
    module = exported(x=X)
    fast = im2win.torch.optimize(module, X)
    report = fast.im2win_report
    assert not report.swapped and all(layer.reason.startswith("PyTorch is as fast or faster") for layer in report.layers)
    if hasattr(torch.ops.onednn, "qconv2d_pointwise"):
        assert {layer.against for layer in report.layers} == {ONEDNN} and "against" in str(report)
    near(fast, module, 0.0)


def test_filters_and_scales_that_are_computed_stay_with_pytorch() -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.register_buffer("stored", torch.ones(4, 3, 1, 1, dtype=torch.int8))

        def forward(self, x: Any) -> Any:
            ops: Any = torch.ops.quantized_decomposed
            return torch.conv2d(x, ops.dequantize_per_tensor(self.stored, 0.5, 0, -128, 127, torch.int8), self.conv.bias)

    module = torch.export.export(Dynamic().eval(), (X,)).module()
    fast = im2win.torch.optimize(module, X)
    (layer,) = fast.im2win_report.layers
    assert layer.reason == "its filters are quantised and its input is not, or by computed scales"
    near(fast, module, 0.0)


# --- PyTorch's quantised modules


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.first_norm, self.second = nn.Conv2d(5, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.shortcut, self.head = nn.Conv2d(5, 8, 1, 2), nn.Conv2d(8, 4, 1)
        self.relu, self.after = nn.ReLU(), nn.ReLU()

    def forward(self, x: Any) -> Any:
        y = self.relu(self.first_norm(self.first(x)))
        return self.head(self.after(self.second(y) + self.shortcut(x)))


def test_a_network_quantised_by_fx() -> None:
    x = torch.randn(2, 5, 12, 14, generator=torch.Generator().manual_seed(1))
    module = by_fx(Small().eval(), x)
    fast = im2win.torch.optimize(module, x)
    report = fast.im2win_report
    assert report.swapped == len(report.layers) == 4, report
    assert {layer.conv.layout for layer in report.layers} == {"NHWC"} and not any(layer.against for layer in report.layers)
    step = float(module.head.scale)
    near(fast, module, 1.5 * step, x)
    near(copy.deepcopy(fast), module, 1.5 * step, x)
    module.first.set_weight_bias(by_fx(Small().eval(), 2 * x).first.weight(), module.second.bias())
    near(fast, module, 2.5 * step, x)
    module.head.scale = 2 * step  # another quantisation of outputs than that of the kernel
    near(fast, module, 2.5 * step, x)
    other = x[:1]
    near(fast, module, 2.5 * step, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_035"])
def test_timm(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    module = by_fx(timm().create_model(name, num_classes=10).eval(), x)
    fast = im2win.torch.optimize(module, x, guard=False)
    report = fast.im2win_report
    assert report.swapped == len(report.layers) >= 20, report
    with torch.inference_mode():
        y, want = fast(x), module(x)
    assert float((y - want).abs().max()) <= 0.1 * float(want.abs().max())


def test_a_network_quantised_after_export() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao")
        pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
        x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
        x = torch.randn(2, 5, 12, 14, generator=torch.Generator().manual_seed(1))
        chosen = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = pt2e.prepare_pt2e(torch.export.export(Small().eval(), (x,)).module(), chosen)
        prepared(x)
        module = pt2e.convert_pt2e(prepared)
    fast = im2win.torch.optimize(module, x)
    report = fast.im2win_report
    assert report.swapped == len(report.layers) == 4, report
    with torch.inference_mode():
        want = module(x)
    near(fast, module, 0.02 * float(want.abs().max()), x)
