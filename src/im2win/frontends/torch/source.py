"""What a conv call site computes, read from a module: its parameters by owner and name, its numbers, and the module's own way to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from im2win.frontends.torch.plain import Parameters, Tensor


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter or buffer, given by owner and name, so that each read returns the current tensor."""

    owner: torch.nn.Module
    name: str

    @property
    def table(self) -> dict[str, Any]:
        """The owner's dictionary that holds the tensor."""
        parameters: dict[str, Any] = self.owner._parameters
        buffers: dict[str, Any] = self.owner._buffers
        return parameters if self.name in parameters else buffers

    def __call__(self) -> Tensor:
        tensor: Tensor = getattr(self.owner, self.name)
        return tensor


@dataclass(eq=False)
class Source:
    """What a call site computes: its slots (None where it has no such tensor) and numbers, as in `plain.reference`.

    Attributes:
        norm: the module of the batch normalisation, if it is a module.
        line: whether the module's convolution is over one dimension. The call site computes it as one over images of one row.
    """

    weight: Slot
    bias: Slot | None
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    scale: Slot | None = None
    shift: Slot | None = None
    mean: Slot | None = None
    variance: Slot | None = None
    counter: Slot | None = None
    eps: float = 0.0
    norm: torch.nn.Module | None = None
    residual: bool = False
    activation: str = "none"
    line: bool = False

    @property
    def slots(self) -> tuple[Slot | None, ...]:
        """The slots in the order of `plain.Parameters`."""
        return self.weight, self.bias, self.scale, self.shift, self.mean, self.variance, self.counter

    @property
    def fused(self) -> tuple[str, ...]:
        """What is fused into the convolution's kernel, in order."""
        parts = ("norm", self.mean is not None), ("add", self.residual), (self.activation, self.activation != "none")
        return tuple(name for name, on in parts if on)

    def parameters(self) -> Parameters:
        """The current tensors; the filters have four dimensions."""
        weight, *rest = (None if slot is None else slot() for slot in self.slots)
        assert weight is not None
        return as_image(weight) if self.line else weight, *rest  # type: ignore[return-value]


def as_image(x: Tensor) -> Tensor:
    """A tensor of lines, [..., length], as one of images with one row, [..., 1, length].

    It is contiguous, as outputs of PyTorch's convolution over one dimension always are.
    """
    return x.contiguous().unsqueeze(-2)


def as_line(y: Tensor) -> Tensor:
    """The inverse of `as_image`."""
    return y.squeeze(-2)


@dataclass(frozen=True)
class OwnPath:
    """What the module itself runs at a call site: (x, residual) -> output, and in words, which tell different paths apart."""

    run: Callable[[Tensor, Tensor | None], Any]
    text: str
