"""A module of one layer and the ways to call it, which test files of calls share."""

from __future__ import annotations

from typing import Any

import torch
from networks import with_integers
from optimizing import X, optimized
from torch import nn

from im2win.frontends.torch.call_site import CallSite


class Ways:
    """A module of one layer with everything fused, and the ways to call it: its site, and the operator."""

    def __init__(self, layout: str = "NCHW", *, plain: bool = False) -> None:
        order = torch.channels_last if layout == "NHWC" else torch.contiguous_format
        one = nn.Conv2d(5, 5, 3, padding=1, bias=plain)
        self.module = with_integers(nn.Sequential(one) if plain else _Added(one)).to(memory_format=order)
        self.x = X.contiguous(memory_format=order)
        self.fast = optimized(self.module, self.x)
        self.site: CallSite = self.fast._im2win.site_0

    def operator(self, x: Any) -> Any:
        source, (weight, bias, *norm) = self.site.source, self.site.source.parameters()
        residual = x if source.residual else None
        numbers = source.eps, source.stride, source.padding, source.dilation, source.groups, source.activation
        return torch.ops.im2win.conv2d(x, weight, bias, residual, *norm, *numbers, next(iter(self.site._kernels.values())))


class _Added(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv, self.norm = conv, nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


def right(ways: Ways, call: Any, x: Any = None) -> None:
    """A call's values, strides, and kind of tensor."""
    x = ways.x if x is None else x
    y, expected = call(x), ways.module(x)
    assert y.stride() == expected.stride() and torch.equal(y, expected) and y.is_inference() == expected.is_inference()
