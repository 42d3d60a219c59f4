"""PyTorch Inductor with max-autotune on one layer: ATen's convolution (cuDNN) against Triton's templates, and a fused epilogue.

Inductor times its choices when it compiles, with PyTorch's convolution among them, so that what it chooses is seldom slower than that.
A 1x1 convolution may become a matrix product.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from im2win.bench.peers.subject import PeerError
from im2win.spec.activations import torch_function
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

OPTIONS: dict[str, Any] = {  # of torch.compile, names in torch._inductor.config
    "max_autotune": True,
    "max_autotune_conv_backends": "ATEN,TRITON",
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "triton.cudagraphs": False,
}
_KERNEL = re.compile(r"\b(extern_kernels\.\w+|triton_\w+)(?=\.run\(|\()")


def compiled(conv: Conv2d, tensors: dict[str, Any], layout: str) -> Callable[[], Any]:
    """The layer as a compiled module on its input; the first call compiles. The result is [N, C, H, W] in this layout's memory.

    Args:
        tensors: PyTorch's, by the names in `conv.arguments`, in the layer's own layout. They are converted to `layout` once, here.

    Raises:
        PeerError: PyTorch has no such convolution.
    """
    import torch

    if not ELEMENT_TYPES[conv.dtype].torch:
        raise PeerError(f"inductor: `dtype` (={conv.dtype!r}) has no convolution in PyTorch on a GPU.")
    memory = torch.channels_last if layout == "NHWC" else torch.contiguous_format

    def laid_out(tensor: Any) -> Any:
        return (tensor if conv.layout == "NCHW" else tensor.permute(0, 3, 1, 2)).contiguous(memory_format=memory)

    x = laid_out(tensors["data"])
    residual = laid_out(tensors["residual"]) if conv.residual else None
    model: Any = torch.compile(module(conv, tensors, layout), fullgraph=True, dynamic=False, options=OPTIONS)

    def call() -> Any:
        with torch.no_grad():
            return model(x) if residual is None else model(x, residual)

    return call


def module(conv: Conv2d, tensors: dict[str, Any], layout: str) -> Any:
    """The layer as a torch.nn.Module of input and residual ([N, C, H, W] both), with filters and bias as buffers."""
    import torch

    top, left, bottom, right = conv.padding
    symmetric = (top, left) == (bottom, right)
    activate = torch_function(conv.activation)
    memory = torch.channels_last if layout == "NHWC" else torch.contiguous_format

    class Layer(torch.nn.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", tensors["filter"].contiguous(memory_format=memory))
            self.register_buffer("bias", tensors.get("bias"))

        def forward(self, x: Any, residual: Any = None) -> Any:
            x = x if symmetric else torch.nn.functional.pad(x, (left, right, top, bottom))
            padding = (top, left) if symmetric else (0, 0)
            weight: Any = self.weight
            bias: Any = self.bias
            y = torch.nn.functional.conv2d(x, weight, bias, conv.stride, padding, conv.dilation, conv.groups)
            return activate(y if residual is None else y + residual)

    return Layer().eval()


def chosen(codes: Iterable[str]) -> str:
    """The kernels that Inductor's generated code runs, in order, without numbers: "extern_kernels.convolution, triton_poi_fused_relu".

    A name that begins with triton_tem is a Triton template, with what was fused into it behind.
    """
    names = [re.sub(r"_\d+$", "", match) for code in codes for match in _KERNEL.findall(_body(code))]
    return ", ".join(dict.fromkeys(names))


def _body(code: str) -> str:
    """The part of generated code that runs kernels, without their definitions."""
    return code[max(code.find("\ndef call("), code.find("    def call("), 0) :]
