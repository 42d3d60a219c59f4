"""Activations of the table in PyTorch's graphs: modules, functions, methods, exported programs, and taken apart by their authors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.frontends.torch import patterns, tracing  # noqa: E402
from im2win.spec.activations import ACTIVATIONS, reference, torch_function  # noqa: E402

WORDS = [row.key() for row in ACTIVATIONS.values() if row.name != "none"] + ["leaky_relu0.25"]
X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution, and a function of its output."""

    def __init__(self, behind: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv, self.behind = nn.Conv2d(4, 4, 3, padding=1), behind
        self.clipped = nn.ReLU6(inplace=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.behind(self.conv(x))


class Clipped(Net):
    """Hardswish as it was written before PyTorch had it."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.conv(x)
        return y * (self.clipped(y + 3) / 6)


def fused(module: nn.Module) -> tuple[str, ...]:
    """What becomes of the only convolution."""
    with torch.no_grad():
        traced = tracing.trace(module.eval(), (X,))
    [pattern] = patterns.patterns_of(traced)
    return pattern.source.fused


@pytest.mark.parametrize("word", WORDS)
def test_functions(word: str) -> None:
    """PyTorch's function is the table's formula, recognised with and without writing into its argument, and after export."""
    x = torch.linspace(-30, 30, 4001, dtype=torch.float64)
    right = reference(word, x.numpy())
    for inplace in (False, True):
        function = torch_function(word, inplace=inplace)
        assert np.abs(function(x.clone()).numpy() - right).max() <= 1e-12
        assert fused(Net(function)) == (word,)
    with torch.no_grad():
        exported = torch.export.export(Net(torch_function(word)).eval(), (X,)).module()
    assert fused_exported(exported) == (word,)


def fused_exported(module: nn.Module) -> tuple[str, ...]:
    """`fused` of a module that can't be set to eval mode, being so already."""
    with torch.no_grad():
        [pattern] = patterns.patterns_of(tracing.trace(module, (X,)))
    return pattern.source.fused


@pytest.mark.parametrize("row", [row for row in ACTIVATIONS.values() if row.torch], ids=lambda row: row.name)
def test_modules(row: Any) -> None:
    for operator in row.torch:
        if operator.module:
            parameters = () if row.parameter is None else (0.25,)
            module = getattr(nn, operator.module)(**operator.called(parameters))
            assert fused(Net(module)) == (row.key(*parameters),)
            module.register_forward_hook(lambda *_: None)
            assert fused(Net(module)) == ()


APART: dict[str, list[Callable[[Any], Any]]] = {
    "silu": [lambda y: y * torch.sigmoid(y), lambda y: y.sigmoid().mul(y), lambda y: y / (1 + torch.exp(-y))],
    "hardswish": [
        lambda y: y * functional.relu6(y + 3) / 6, lambda y: y * functional.hardsigmoid(y), lambda y: y * (y + 3).clamp(0, 6) / 6,
        lambda y: y * functional.relu6(y + 3, inplace=True).div_(6),
    ],
    "hardsigmoid": [lambda y: functional.relu6(y + 3) / 6, lambda y: torch.clamp(y / 6 + 0.5, 0, 1)],
    "gelu": [lambda y: 0.5 * y * (1 + torch.erf(y / math.sqrt(2))), lambda y: y * 0.5 * (1.0 + torch.erf(y * math.sqrt(0.5)))],
    "gelu_tanh": [
        lambda y: 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3)))),
        lambda y: 0.5 * y * (1 + torch.tanh(y * 0.7978845608 * (1 + 0.044715 * y * y))),
    ],
    "leaky_relu0.2": [lambda y: torch.maximum(y, 0.2 * y)],
    "relu": [lambda y: torch.clamp(y, min=0), lambda y: y.clamp_min(0), lambda y: functional.threshold(y, 0.0, 0.0)],
    "": [
        lambda y: y * torch.sigmoid(1.702 * y), lambda y: (y, y * torch.sigmoid(y)), lambda y: y * torch.softmax(y, 1),
        lambda y: y - y.mean(), lambda y: torch.where(y > 0, y, 1.2 * y), lambda y: y.transpose(2, 3) * torch.sigmoid(y),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("word", "which"), [(word, i) for word, ways in APART.items() for i in range(len(ways))])
def test_taken_apart(word: str, which: int) -> None:
    assert fused(Net(APART[word][which])) == ((word,) if word else ())


def test_modules_that_write_into_what_is_between() -> None:
    assert fused(Clipped(lambda y: y)) == ("hardswish",)
    assert fused(Net(lambda y: y.add_(3).clamp(0, 6) / 6)) == ("hardsigmoid",)
    assert fused(Net(lambda y: y * y.add_(3).clamp(0, 6) / 6)) == (), "the factor has changed, too"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("word", WORDS)
def test_optimized_modules(word: str, tmp_path: Any) -> None:
    """Fused, in one kernel, also where it is compiled from an exported program."""
    net = Net(torch_function(word)).eval()
    with torch.no_grad():
        fast = im2win.torch.optimize(net, X, cache=tmp_path)
        [row] = fast.im2win_report.layers
        assert row.fused == (word,) and row.conv.activation == word and row.algorithm
        torch.testing.assert_close(fast(X), net(X), atol=1e-5, rtol=1e-5)
