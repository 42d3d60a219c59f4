"""The peers on a GPU as calls: PyTorch's convolution, and arguments for cuDNN; also the memory that any call takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.activations import torch_function
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES


class Unsupported(RuntimeError):
    """A convolution that a peer does not support."""


def torch_call(conv: Conv2d, tensors: dict[str, Any], layout: str) -> Callable[[], Any]:
    """PyTorch's convolution of tensors named as in `conv.arguments`, in a layout. Its result is [N, C, H, W] with memory of that layout.

    Raises:
        Unsupported: PyTorch has no such convolution.
    """
    import torch

    if not ELEMENT_TYPES[conv.dtype].torch or len(set(conv.padding[::2])) > 1 or len(set(conv.padding[1::2])) > 1:
        raise Unsupported("PyTorch has no such convolution.")
    memory = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    x = tensors["data"] if conv.layout == "NCHW" else tensors["data"].permute(0, 3, 1, 2)
    x, w = x.contiguous(memory_format=memory), tensors["filter"].contiguous(memory_format=memory)
    residual = tensors.get("residual")
    activate = torch_function(conv.activation)
    if residual is not None:
        residual = (residual if conv.layout == "NCHW" else residual.permute(0, 3, 1, 2)).contiguous(memory_format=memory)

    def call() -> Any:
        padding = conv.padding[:2]
        y = torch.nn.functional.conv2d(x, w, tensors.get("bias"), conv.stride, padding, conv.dilation, conv.groups)
        y = y if residual is None else y + residual
        return activate(y)

    return call


def cudnn_math(conv: Conv2d, accuracy: Accuracy) -> str:
    """The argument `math` of `cudnn` for a problem."""
    if "tensor" in ELEMENT_TYPES[conv.dtype].cudnn_maths:
        return "tensor"
    return "tf32" if allows(accuracy, "tf32") else "fma"


def call_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
    """The peak bytes that a call after the first takes from PyTorch's allocator, its result included; and the result."""
    import torch

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before, result
