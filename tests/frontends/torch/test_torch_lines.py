"""Convolutions over one dimension, which `im2win.torch.optimize` computes as ones over images of one row: all as PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import integers, with_integers  # noqa: E402
from optimizing import equal, optimized  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

pytestmark = pytest.mark.usefixtures("direct", "way")

X = integers(2, 5, 40)


class Lines(nn.Module):
    """Every number that a convolution over one dimension has, normalisation, additions and activations; a branch keeps torch.fx out."""

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(5, 8, 5, padding=2, bias=False), nn.BatchNorm1d(8)
        self.second = nn.Conv1d(8, 8, 3, padding="same", groups=2)
        self.third = nn.Conv1d(8, 6, 3, stride=2, padding=3, dilation=2)
        self.filters = nn.Parameter(torch.ones(4, 6, 1))
        self.branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = torch.relu(self.second(y) + y)
        y = functional.conv1d(functional.relu6(self.third(y)), self.filters)
        return -y if self.branches and x.sum() > 1e9 else y


def test_all_is_fused_and_equal() -> None:
    module = with_integers(Lines())
    fast = optimized(module, X)
    keys = [str(layer.conv) for layer in fast.im2win_report.layers]
    assert keys == [
        "n2-c5x1x40-k8x1x5-p0x2-bias-relu", "n2-c8x1x40-k8x1x3-p0x1-g2-bias-add-relu", "n2-c8x1x40-k6x1x3-s1x2-p0x3-d1x2-bias-relu6",
        "n2-c6x1x21-k4x1x1",
    ]  # fmt: skip
    assert fast.im2win_report.swapped == 4
    equal(fast, module, X)
    equal(fast, module, X.transpose(1, 2).contiguous().transpose(1, 2))  # PyTorch's output is contiguous then, too
    equal(fast, module, X[:1])  # another shape: PyTorch computes
    equal(copy.deepcopy(fast), module, X)


def test_one_by_one() -> None:
    module = with_integers(Lines(branches=True))
    fast = optimized(module, X)
    assert fast.im2win_report.mode == "modules" and fast.im2win_report.swapped == 3
    equal(fast, module, X)


def test_parameters_and_training(calls: list[str]) -> None:
    module = with_integers(Lines())
    fast = optimized(module, X)
    with torch.no_grad():
        module.first.weight += 1
        module.norm.running_mean += 1
    calls.clear()
    equal(fast, module, X)
    assert len(calls) == 4
    for one in (fast, module):
        one.train()
    with torch.no_grad():
        assert torch.allclose(fast(X), module(X))


def test_gradients() -> None:
    module = with_integers(Lines())
    fast = optimized(module, X)
    found = []
    for one in (fast, module):
        x = X.clone().requires_grad_()
        one(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad.clone() for parameter in module.parameters())])
        module.zero_grad()
    assert all(torch.allclose(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_compiled_and_exported() -> None:
    module = with_integers(Lines())
    fast = optimized(module, X)
    with torch.inference_mode():
        want = module(X)
    compiled: Any = torch.compile(fast, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(X), want)
        assert torch.equal(torch.export.export(fast, (X,)).module()(X), want)


def test_an_image_alone_is_pytorchs() -> None:
    """A line without a batch axis, as PyTorch allows."""
    module = with_integers(nn.Sequential(nn.Conv1d(5, 8, 3)))
    fast = optimized(module, X[0])
    assert fast.im2win_report.swapped == 0
    equal(fast, module, X[0])
