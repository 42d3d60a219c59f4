"""`im2win.capture`: writes the convolutions that a PyTorch program runs to a file that `im2win tune` reads."""

from __future__ import annotations

import os
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from im2win.frontends.torch import conv_op, plain
from im2win.frontends.torch.patterns import over_images, pair_of, sides_of
from im2win.frontends.torch.source import as_image
from im2win.spec.captured_layers import append_layers
from im2win.spec.conv2d import Conv2d, ConvError

_aten = torch.ops.aten
# what inference mode dispatches in place of aten.convolution
_COMPOSITE = (_aten.conv1d.default, _aten.conv1d.padding, _aten.conv2d.default, _aten.conv2d.padding)


class capture:
    """A context that records the 1-D and 2-D convolutions that PyTorch computes inside it, and adds them to a file when it ends.

    ``with im2win.capture("layers.jsonl"): model(x)``. Each distinct problem (shape, element type, memory format, bias or not, and in
    modules of `optimize` the fused epilogue) gets a line with the number of its calls; see `im2win.spec.captured_layers`. Calls run as
    usual. Backward passes are not recorded, nor is code compiled by `torch.compile`: run it eagerly. Only the thread that entered the
    context is recorded.

    Args:
        path: the file; lines are appended under a lock.

    Attributes:
        counts: calls of each (problem, "cpu" or "cuda").
        skipped: convolutions that im2win does not support, with the reason.

    Raises (at the end):
        LogError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.counts: Counter[tuple[Conv2d, str]] = Counter()
        self.skipped: Counter[str] = Counter()
        self._mode: Any = _Mode(self)

    def __enter__(self) -> capture:
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._mode.__exit__(kind, error, trace)
        if self.counts:
            append_layers(self.path, self.counts)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """Receives every operator that reaches PyTorch's dispatcher, after autograd."""

    def __init__(self, owner: capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            conv = _problem(func, args, kwargs or {})
        except ConvError as error:
            self._owner.skipped[str(error)] += 1
        else:
            if conv is not None:
                self._owner.counts[conv, args[0].device.type] += 1
        return result


def _problem(func: Any, args: Any, kwargs: dict[str, Any]) -> Conv2d | None:
    """The problem of an operator's call; None if it is no convolution."""
    if func is _aten.convolution.default:
        x, weight, bias, stride, padding, dilation, transposed, _, groups = args
        if transposed:
            raise ConvError("a transposed convolution")
    elif func in _COMPOSITE:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        values = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1} | dict(zip(names, args, strict=False)) | kwargs
        x, weight, bias, stride, padding, dilation, groups = (values[name] for name in names)
    elif func is conv_op.conv2d:
        x, weight, bias, residual, *norm, _, stride, padding, dilation, groups, activation, _ = args
        parameters = weight, bias, *norm
        return plain.problem(x, parameters, residual is not None, stride, padding, dilation, groups, activation)
    else:
        return None
    if weight.dim() not in (3, 4):
        raise ConvError(f"a convolution over {weight.dim() - 2} dimensions")
    if weight.dim() == 3 and x.dim() == 3:  # over images of one row
        x, weight = as_image(x), as_image(weight)
        stride, padding, dilation = over_images(stride, padding, dilation)
    sides = sides_of(padding, tuple(weight.shape[2:]), pair_of(dilation))
    alone = weight, bias, None, None, None, None, None
    return plain.problem(x, alone, False, pair_of(stride), sides, pair_of(dilation), groups, "none")
