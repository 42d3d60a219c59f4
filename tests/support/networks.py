"""Small PyTorch modules that tests optimise: integers in exact float32, so that fused and plain computation must be equal."""

from __future__ import annotations

from typing import Any

import torch
from scripts import script
from torch import Tensor, nn


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Whole numbers from -4 to 4 without 0."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(1, 5, shape, generator=draw) * (2 * torch.randint(0, 2, shape, generator=draw) - 1)).float()


def with_integers(module: nn.Module) -> Any:
    """The module in eval mode with whole weights; normalisation divides by 1 or 2 and multiplies by even numbers."""
    for i, one in enumerate(module.modules()):
        if isinstance(one, (nn.Conv1d, nn.Conv2d)):
            one.weight.data = integers(*one.weight.shape, seed=i)
            if one.bias is not None:
                one.bias.data = integers(*one.bias.shape, seed=i + 1)
        elif isinstance(one, (nn.BatchNorm1d, nn.BatchNorm2d)):
            one.eps = 2.0**-10  # added to a variance that lacks it: the sum is exact
            sizes = one.weight.shape
            one.weight.data, one.bias.data = 2 * integers(*sizes, seed=i), integers(*sizes, seed=i + 1)
            assert one.running_mean is not None and one.running_var is not None
            one.running_mean.copy_(integers(*sizes, seed=i + 2))
            one_or_four = integers(*sizes, seed=i + 3).abs().clamp(max=2).log2().mul(2).exp2()
            one.running_var.copy_(one_or_four - one.eps)
    return module.eval()


class Residual(nn.Module):
    """Two convolutions with normalisation, a shortcut with one of its own, the sum activated."""

    def __init__(self, channels: int = 8, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(5, channels, 3, 2, 1, bias=False), nn.Conv2d(channels, channels, 3, 1, 1)
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential(nn.Conv2d(5, channels, 1, 2, bias=False), nn.BatchNorm2d(channels))
        self.activation = activation or nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += self.shortcut(x)
        return self.activation(y)


def resnet(depth: int, classes: int = 10) -> Any:
    """The ResNet of examples/05_pytorch_resnet.py."""
    return script("examples/05_pytorch_resnet.py").resnet(depth, classes)
