"""Quantised PyTorch modules with random weights, calibrated with random data: as `torch.export` and a quantiser leave them, and of FX."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # defines torch.ops.quantized_decomposed
from torch import Tensor, nn

_LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
_ops: Any = torch.ops.quantized_decomposed


class Pair(nn.Module):
    """Quantises a tensor and back. The first call chooses scale and zero point."""

    def __init__(self, dtype: torch.dtype, *, symmetric: bool = False, like: Pair | None = None) -> None:
        super().__init__()
        self.dtype, self.symmetric, self.like, self.step, self.zero = dtype, symmetric, like, 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        least, most = _LIMITS[self.dtype]
        if not self.step and self.like is None:
            low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
            low, high = (-max(-low, high), max(-low, high)) if self.symmetric else (low, high)
            self.step = (high - low) / (most - least - (1 if self.symmetric else 0))
            self.zero = (most + least + 1) // 2 if self.symmetric else least - round(low / self.step)
        step, zero = (self.step, self.zero) if self.like is None else (self.like.step, self.like.zero)
        return _ops.dequantize_per_tensor(
            _ops.quantize_per_tensor(x, step, zero, least, most, self.dtype), step, zero, least, most, self.dtype
        )  # type: ignore[no-any-return]


class Conv(nn.Conv2d):
    """A convolution with filters quantised by channel, or all alike."""

    def quantised(self, *, by_channel: bool) -> Conv:
        weight = self.weight.detach()
        largest = weight.abs().amax((1, 2, 3)) if by_channel else weight.abs().max()
        scale = largest / 127
        stored = torch.round(weight / (scale[:, None, None, None] if by_channel else scale)).clamp(-127, 127).to(torch.int8)
        self.register_buffer("stored", stored)
        self.register_buffer("scales", scale)
        self.register_buffer("zeros", torch.zeros_like(scale, dtype=torch.int64))
        self.by_channel, self.one = by_channel, 0.0 if by_channel else float(scale)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.by_channel:
            weight = _ops.dequantize_per_channel(self.stored, self.scales, self.zeros, 0, -127, 127, torch.int8)
        else:
            weight = _ops.dequantize_per_tensor(self.stored, self.one, 0, -127, 127, torch.int8)
        return self._conv_forward(x, weight, self.bias)


class Net(nn.Module):
    """Convolutions with relu, relu6, an addition of integers of the same step, one of another step, and hardswish in float32."""

    def __init__(self, dtype: torch.dtype = torch.uint8, *, by_channel: bool = True) -> None:
        super().__init__()
        symmetric = dtype is torch.int8
        torch.manual_seed(0)
        self.first, self.grouped = Conv(3, 8, 3, padding=1, bias=False), Conv(8, 8, 3, stride=2, padding=1, groups=8)
        self.second, self.third, self.last = Conv(8, 8, 1), Conv(8, 8, (3, 1), padding=(1, 0)), Conv(8, 5, 1)
        for one in (self.first, self.grouped, self.second, self.third, self.last):
            one.quantised(by_channel=by_channel)
        self.given, self.after_first, self.after_grouped = (Pair(dtype, symmetric=symmetric) for _ in range(3))
        self.after_second = Pair(dtype, symmetric=symmetric, like=self.after_grouped)
        self.after_third = Pair(dtype, symmetric=symmetric)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.after_first(torch.relu(self.first(self.given(x))))
        x = self.after_grouped(nn.functional.relu6(self.grouped(x)))
        x = self.after_second(self.second(x) + x)
        y = torch.relu(self.third(x) + x)
        return nn.functional.hardswish(self.last(self.after_third(y)))


def exported(dtype: torch.dtype = torch.uint8, *, by_channel: bool = True, x: Tensor) -> Any:
    """`Net` as a graph of operators, the form of a model that was quantised after export."""
    net = Net(dtype, by_channel=by_channel)
    with torch.no_grad():
        net(x)
    return torch.export.export(net, (x,)).module()


def by_fx(module: nn.Module, x: Tensor, engine: str = "x86") -> Any:
    """A module in eval mode, quantised by FX for an engine of PyTorch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        prepared = prepare_fx(module, get_default_qconfig_mapping(engine), (x,))
        with torch.no_grad():
            prepared(x)
        return convert_fx(prepared)
