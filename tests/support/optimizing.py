"""What the tests of `im2win.torch.optimize` share: an input, modules optimised for it, and a module that torch.fx cannot trace."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import integers  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402

X = integers(2, 5, 12, 14)


def optimized(module: nn.Module, example: Any = X, **options: Any) -> Any:
    fast = im2win.torch.optimize(module, example, **options)
    assert all(layer.error is None or layer.error < 1e-5 for layer in fast.im2win_report.layers)
    return fast


def equal(fast: nn.Module, module: nn.Module, x: Any = X) -> None:
    with torch.inference_mode():
        y, expected = fast(x), module(x)
    assert y.stride() == expected.stride() and torch.equal(y, expected)


class Heads(nn.Module):
    """Branches on values, which torch.fx cannot trace, and runs one convolution on several shapes, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(5, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.head, self.never = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.levels = nn.ModuleList([nn.Identity(), nn.MaxPool2d(2)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.block(x)
        if x.sum() > 1e9:
            return [self.never(y)]
        return [self.head(level(y)) for level in self.levels]
