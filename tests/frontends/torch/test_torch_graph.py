"""What belongs to a convolution's operator, and what must not: the patterns that are found in traced graphs."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import Residual, resnet  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from im2win.frontends.torch import patterns, tracing  # noqa: E402
from im2win.frontends.torch.tracing import TraceFailure  # noqa: E402


class Net(nn.Module):
    """A convolution `conv`, its normalisation `norm`, another convolution `other`, and a forward given as a function of all that."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.relu, self.silu, self.drop = nn.ReLU(inplace=True), nn.SiLU(), nn.Dropout(0.5)
        self.does = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.does(self, x)


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def found(module: nn.Module, *example: Any) -> dict[str, tuple[str, ...]]:
    """Of each convolution what is fused with it."""
    with torch.no_grad():
        traced = tracing.trace(module.eval(), example or (X,))
    return {pattern.name: pattern.source.fused for pattern in patterns.patterns_of(traced)}


def _inplace_between(m: Net, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    x.mul_(2)
    return y + x


def _writes_into_the_other(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.other(x).add_(m.norm(m.conv(x)))


FUSED: dict[str, tuple[Callable[[Net, Any], Any], tuple[str, ...]]] = {
    "everything": (lambda m, x: m.relu(m.norm(m.conv(x)) + x), ("norm", "add", "relu")),
    "the sum's other order": (lambda m, x: functional.relu(x + m.conv(x)), ("add", "relu")),
    "methods": (lambda m, x: m.conv(x).add(x).relu(), ("add", "relu")),
    "functions": (lambda m, x: torch.relu(torch.add(m.norm(m.conv(x)), x)), ("norm", "add", "relu")),
    "silu and dropout": (lambda m, x: m.silu(m.drop(m.norm(m.conv(x)))), ("norm", "silu")),
    "relu6": (lambda m, x: functional.relu6(m.conv(x)), ("relu6",)),
    "nothing known": (lambda m, x: torch.atan(m.conv(x)), ()),
    "read twice": (lambda m, x: (lambda y: m.norm(y) + y)(m.conv(x)), ()),
    "read twice behind": (lambda m, x: (lambda y: (y, m.relu(y)))(m.norm(m.conv(x))), ("norm",)),
    "twice in one sum": (lambda m, x: (lambda y: y + y)(m.conv(x)), ()),
    "a broadcast sum": (lambda m, x: m.conv(x) + x.mean((2, 3), keepdim=True), ()),
    "a number": (lambda m, x: m.conv(x) + 1.0, ()),
    "a weighted sum": (lambda m, x: torch.add(m.conv(x), x, alpha=2), ()),
    "its input is written between": (_inplace_between, ()),
    "the sum is written elsewhere": (_writes_into_the_other, ("norm",)),
    "activation before the sum": (lambda m, x: m.relu(m.conv(x)) + x, ("relu",)),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_is_fused(name: str) -> None:
    forward, fused = FUSED[name]
    assert found(Net(forward))["conv"] == fused


def test_an_addition_goes_to_one_convolution() -> None:
    assert found(Residual(), torch.randn(2, 5, 8, 8)) == {
        "first": ("norm", "relu"), "second": ("norm", "add", "relu"), "shortcut.0": ("norm",),
    }  # fmt: skip
    every = found(resnet(50), torch.randn(1, 3, 32, 32))
    assert len(every) == 53 and all(fused[0] == "norm" for fused in every.values())
    assert sum("add" in fused for fused in every.values()) == 16


def test_normalisation_with_statistics_of_the_batch_is_not_fused() -> None:
    net = Net(lambda m, x: m.norm(m.conv(x)))
    net.norm = nn.BatchNorm2d(4, track_running_stats=False)
    assert found(net) == {"conv": ()}


def test_what_has_hooks_or_behaves_otherwise_is_left_alone() -> None:
    class Own(nn.Conv2d):
        pass

    hooked = Net(lambda m, x: m.norm(m.conv(x)))
    hooked.conv.register_forward_hook(lambda *_: None)
    assert found(hooked) == {}
    listened = Net(lambda m, x: m.norm(m.conv(x)))
    listened.norm.register_forward_pre_hook(lambda *_: None)
    assert found(listened) == {"conv": ()}
    for conv, reason in (
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "padding mode 'reflect'"),
        (Own(4, 4, 3, padding=1), "a subclass of Conv2d (Own)"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), "a subclass of Conv2d"),
    ):
        assert str(patterns.source_of(conv)).startswith(reason)
    assert patterns.source_of(nn.Linear(1, 1)) == ""


def test_functions_with_parameters_of_their_own() -> None:
    """As subclasses that compute with functions appear in a graph."""

    class Own(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    class OwnNorm(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._assert(x.ndim == 4, f"{x.ndim} dimensions")
            tensors = self.running_mean, self.running_var, self.weight, self.bias
            return functional.relu(functional.batch_norm(x, *tensors, False, 0.1, self.eps))

    assert found(nn.Sequential(Own(4, 6, 3, padding=1), OwnNorm(6))) == {"0.weight": ("norm", "relu")}
    computed = Net(lambda m, x: functional.conv2d(x, m.conv.weight * 2, padding=1))
    assert found(computed) == {}


@pytest.mark.parametrize(
    ("padding", "kernel", "dilation", "sides"),
    [
        (1, (3, 3), (1, 1), (1, 1, 1, 1)),
        ((0, 2), (3, 3), (1, 1), (0, 2, 0, 2)),
        ([1], (3, 3), (1, 1), (1, 1, 1, 1)),
        ("valid", (3, 3), (1, 1), (0, 0, 0, 0)),
        ("same", (3, 5), (1, 1), (1, 2, 1, 2)),
        ("same", (4, 2), (1, 3), (1, 1, 2, 2)),
    ],
)
def test_padding(padding: Any, kernel: Any, dilation: Any, sides: Any) -> None:
    assert patterns.sides_of(padding, kernel, dilation) == sides


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(4)


class Sees(nn.Module):
    """Computes otherwise when it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if isinstance(x, torch.Tensor) else x


class Optional(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 2.0, other: torch.Tensor | None = None) -> torch.Tensor:
        return x * scale if other is None else x + other


class AnyNumber(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Branches(), r"torch.fx cannot trace it \(TraceError"),
        (Random(), "makes tensors of its own"),
        (Sees(), "computes something else"),
        (AnyNumber(), "any number of arguments"),
    ],
)
def test_what_cannot_be_traced(module: nn.Module, message: str) -> None:
    before = dict(vars(module))
    with pytest.raises(TraceFailure, match=message), torch.no_grad():
        tracing.trace(module, (X,))
    assert vars(module).keys() == before.keys()


def test_arguments_that_are_no_tensors() -> None:
    assert tracing.trace(Optional(), (X,)).given == 1
    with pytest.raises(TraceFailure, match="`scale` is no tensor"):
        tracing.trace(Optional(), (X, 3.0))


class Named(nn.Module):
    """Returns named outputs, as segmentation networks and pyramids of features do."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        inner = OrderedDict(low=x * 3, pair=(x, [x + 1]))
        return OrderedDict(out=x * 2, all=inner, plain={"x": x})


def test_outputs_keep_the_type_of_their_dictionaries() -> None:
    traced = tracing.trace(Named(), (X,))
    out = tracing.compiled(traced.graph, {}, {})(traced.module, X)
    assert (type(out), type(out["all"]), type(out["plain"])) == (OrderedDict, OrderedDict, dict)
    assert list(out) == ["out", "all", "plain"] and torch.equal(out["all"]["pair"][1][0], X + 1)


def test_normalisations_with_fixed_statistics_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torchvision's backbones of detectors."""

    class FrozenBatchNorm2d(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.eps = 1e-5
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, torch.rand(features) + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.weight * (self.running_var + self.eps).rsqrt()
            return x * scale.reshape(1, -1, 1, 1) + (self.bias - self.running_mean * scale).reshape(1, -1, 1, 1)

    net = nn.Sequential(nn.Conv2d(4, 6, 3), FrozenBatchNorm2d(6), nn.ReLU()).eval()
    with pytest.raises(TraceFailure, match="makes tensors of its own"):
        tracing.trace(net, (X,))
    monkeypatch.setitem(sys.modules, "torchvision.ops.misc", SimpleNamespace(FrozenBatchNorm2d=FrozenBatchNorm2d))
    assert found(net) == {"0": ("norm", "relu")}
