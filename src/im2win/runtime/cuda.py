"""Runs built convolutions on a GPU, on the caller's current stream."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from im2win.runtime.device_memory import allocate, overwrite, upload
from im2win.runtime.libraries import cuda_runtime_library
from im2win.runtime.manifest import Manifest
from im2win.runtime.op import Launch, Op
from im2win.runtime.tensors import ArgumentError, is_torch, kernel_view, torch_tensor, torch_values
from im2win.spec.dtypes import ELEMENT_TYPES, STORED
from im2win.spec.symbols import SYMBOL, TRANSFORM, TRANSFORM_PARTS

ALIGNMENT = 16  # bytes; what the widest vector copies and TMA boxes require
_DLPACK_CUDA = 2
_AS_IT_IS = contextlib.nullcontext()


class Kernels:
    """The functions of a CUDA library: the convolution kernel and, for some algorithms, a transform before it.

    Attributes:
        product: the convolution kernel.
        in_parts: the workspace holds a part of the transformed tensor at a time, and `product` itself runs the transform for each part.
            float8_e4m3fn tensors of PyTorch are passed as int8, as which kernels take their bytes.
        transform: ``transform(input, workspace)`` writes the transformed tensor. With `in_parts` it writes all parts over each other, which
            is only useful for measuring its time. None where the kernel reads its windows from the input, or where the transformed tensor
            never leaves the kernel.
    """

    def __init__(self, module: Any, made: bool, viewed: bool = False) -> None:
        kernel = module[SYMBOL]
        self.product = (lambda *tensors: kernel(*map(kernel_view, tensors))) if viewed else kernel
        self.in_parts = made and not module.implements_function(TRANSFORM)
        name = TRANSFORM_PARTS if self.in_parts else TRANSFORM
        self.transform = module[name] if made and module.implements_function(name) else None

    def __call__(self, data: Any, made: Any, *others: Any) -> None:
        """Runs transform and product.

        Args:
            data: the input.
            made: the workspace; None without a transform.
            others: packed filters, bias, scale, residual and output, in the order of the kernel's parameters.
        """
        if self.in_parts:
            self.product(data, made, *others)
        elif self.transform is not None:
            self.transform(data, made)
            self.product(made, *others)
        else:
            self.product(data, *others)


class CudaOp(Op):
    """A convolution built for a GPU: ``y = op(x, w)``, as `Op`, on CUDA tensors.

    Kernels run on the current stream of the tensors' library, and a call does not wait for them. Memory that a call allocates comes from
    PyTorch's allocator, so a CUDA graph can capture calls after a first one. One operator can serve several devices.
    """

    def __init__(self, manifest: Manifest, library: Path) -> None:
        cuda_runtime_library()
        super().__init__(manifest, library)
        self.kernels = Kernels(self._module, bool(manifest.made), bool(ELEMENT_TYPES[manifest.conv.dtype].storage))

    def bind(self, w: Any, bias: Any = None, scale: Any = None) -> CudaLayer:
        """Packs filters, bias and scale once, on the device of `w`, or on the current device if `w` lies on the CPU.

        Args:
            w: filters of `conv.filter_shape`; later changes to the tensor have no effect.
            bias: [out_channels]; required where the problem has a bias, refused elsewhere.
            scale: float32 [out_channels], finite; required where the problem requantises its outputs, refused elsewhere.

        Raises:
            ArgumentError: a tensor has the wrong shape, dtype or layout, a scale is not finite, or a bias or scale is missing or not
                wanted.
        """
        return CudaLayer(self, w, bias, scale)

    def __call__(self, x: Any, w: Any, bias: Any = None, residual: Any = None, out: Any = None, scale: Any = None) -> Any:
        """One call without binding: packs filters, bias and scale every time. See `bind` and `CudaLayer.__call__`."""
        return self.bind(w, bias, scale)(x, residual, out)


class CudaLayer:
    """A `CudaOp` with its filters bound."""

    def __init__(self, op: CudaOp, w: Any, bias: Any, scale: Any = None) -> None:
        conv = op.conv
        self.op, self._conv = op, conv
        self.device = int(w.device.index) if is_torch(w) and w.is_cuda else _current_device()
        self._packed = [_upload(array, self.device) for array in self._pack(w, bias, scale)]
        self._kernels, self._made = op.kernels, op.manifest.made
        self._scratch: Any = None

    def _pack(self, w: Any, bias: Any, scale: Any) -> list[np.ndarray[Any, Any]]:
        conv = self._conv
        packed = [self.op.manifest.pack.filter(conv, _values("w", w, conv.filter_shape, conv.dtype))]
        for name, value in (("bias", bias), ("scale", scale)):
            if (value is not None) != (name in conv.arguments):
                raise ArgumentError(f"`{name}` must be {'left out' if value is not None else 'given'}: the problem is {conv}.")
            if value is not None:
                packed.append(_values(name, value, (conv.out_channels,), conv.dtypes[name]))
        if scale is not None and not np.isfinite(packed[-1]).all():
            place = int(np.flatnonzero(~np.isfinite(packed[-1]))[0])
            raise ArgumentError(f"`scale` (={packed[-1][place]} at {place}) must be finite.")
        return packed

    def rebind(self, w: Any, bias: Any = None, scale: Any = None) -> None:
        """Packs other filters (and bias and scale) into the memory of the bound ones.

        CUDA graphs that were captured before use the new values. The copy runs on the current stream, as calls do.

        Raises:
            ArgumentError: a tensor has the wrong shape, dtype or layout, a scale is not finite, or a bias or scale is missing or not
                wanted.
        """
        for held, array in zip(self._packed, self._pack(w, bias, scale), strict=True):
            if is_torch(held):
                held.copy_(torch_tensor(_stored(array)))
            else:
                overwrite(held, _stored(array))

    def __call__(self, x: Any, residual: Any = None, out: Any = None) -> Any:
        """The convolution of x with the bound filters, written into `out` if it is given.

        Args:
            x: input of `conv.input_shape`, contiguous, on the device of the bound filters. A float8_e4m3fn tensor is one of PyTorch, or a
                DLPack tensor of int8 with its bytes.
            residual: tensor of `conv.output_shape`; required where the problem adds one, refused elsewhere.
            out: tensor of `conv.output_shape` to write to; a new PyTorch tensor if None. It must not overlap the inputs.

        Raises:
            ArgumentError: a tensor has the wrong shape, dtype, device or layout.
        """
        conv = self._conv
        _check("x", x, conv.input_shape, conv.dtype, self.device)
        if (residual is not None) != conv.residual:
            raise ArgumentError(f"`residual` must be {'given' if conv.residual else 'left out'}: the problem is {conv}.")
        added: tuple[Any, ...] = ()
        if residual is not None:
            _check("residual", residual, conv.output_shape, conv.out_dtype, self.device)
            added = (residual,)
        if out is None:
            out = self._new_output(x)
        else:
            _check("out", out, conv.output_shape, conv.out_dtype, self.device)
            if out is x or out is residual:
                raise ArgumentError("`out` must not overlap x or residual.")
        scratch = self._new_scratch(x) if self._made else None
        with keep_device(self.device):
            self._kernels(x, scratch, *self._packed, *added, out)
        return out

    def run(self, x: Any, residual: Any, out: Any, like: Any = None) -> None:
        """A call without its checks.

        Args:
            x: PyTorch tensor of the right shape, dtype, device and memory order that requires no gradient; `residual` and `out` likewise.
            like: a PyTorch tensor of x's dtype and device whose allocator provides the workspace, for callers that pass x by address
                (`runtime.dltensor`).
        """
        added = () if residual is None else (residual,)
        scratch = (x if like is None else like).new_empty(self._made) if self._made else None
        with keep_device(self.device):
            self._kernels(x, scratch, *self._packed, *added, out)

    @property
    def launch(self) -> Launch:
        """The functions and tensors of a call, for callers that run it themselves."""
        kernels = self._kernels
        return Launch(kernels.product, None if kernels.in_parts else kernels.transform, self._made, self._packed)

    @property
    def transforms(self) -> bool:
        """Whether a call runs a transform before the product, for the whole input or part by part."""
        return self._kernels.transform is not None

    def transform(self, x: Any) -> Any:
        """Runs the transform alone and returns the workspace, for measuring.

        Where the transform runs in parts, the workspace holds the last part.

        Raises:
            ArgumentError: x has the wrong shape, dtype or device, or the algorithm has no transform.
        """
        if self._kernels.transform is None:
            raise ArgumentError(f"{self.op.method} takes windows from the input: there is no transform to run alone.")
        _check("x", x, self._conv.input_shape, self._conv.dtype, self.device)
        made = self._new_scratch(x)
        with keep_device(self.device):
            self._kernels.transform(x, made)
        return made

    def _new_output(self, x: Any) -> Any:
        if not is_torch(x):
            raise ArgumentError(f"`out` must be given: x (a {type(x).__name__}) is no torch tensor, and none can be made of its kind.")
        return x.new_empty(self._conv.output_shape, dtype=getattr(sys.modules["torch"], self._conv.out_dtype))

    def _new_scratch(self, x: Any) -> Any:
        if is_torch(x):
            return x.new_empty(self._made)  # allocated on x's stream: safe on any stream and in a CUDA graph
        if self._scratch is None:
            self._scratch = _empty(self._made, self._conv.dtype, self.device)
        return self._scratch


def keep_device(device: int) -> Any:
    """A context for calls on a device that restores PyTorch's current device afterwards: TVM makes the tensors' device the current one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.cuda.current_device() == device:
        return _AS_IT_IS
    return torch.cuda.device(device)


def _current_device() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else 0


def _upload(array: np.ndarray[Any, Any], device: int) -> Any:
    """A copy on a device; a PyTorch tensor if the program uses PyTorch."""
    torch, array = sys.modules.get("torch"), _stored(array)
    if torch is not None and torch.cuda.is_available():
        return torch_tensor(array).to(f"cuda:{device}")
    return upload(array, tvm_ffi.device("cuda", device))


def _stored(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, contiguous, in the type that kernels take its elements as."""
    array = np.ascontiguousarray(array)
    return array.view(STORED[array.dtype.name]) if array.dtype.name in STORED else array


def _empty(count: int, dtype: str, device: int) -> Any:
    return allocate((count,), dtype, tvm_ffi.device("cuda", device))


def _values(name: str, value: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """The checked values of a tensor on any device, as a numpy array."""
    if is_torch(value):
        value = torch_values(value.cpu())
    if not isinstance(value, np.ndarray):
        raise ArgumentError(f"`{name}` (a {type(value).__name__}) must be a numpy array or a torch tensor.")
    _fits(name, str(value.dtype), tuple(value.shape), shape, dtype)
    return value


def _fits(name: str, dtype: str, shape: tuple[int, ...], want_shape: tuple[int, ...], want_dtype: str) -> None:
    if dtype != want_dtype:
        raise ArgumentError(f"`{name}` has dtype {dtype}; it must be {want_dtype}.")
    if shape != tuple(want_shape):
        raise ArgumentError(f"`{name}` has shape {shape}; it must be {tuple(want_shape)}.")


def _is_right(value: Any, shape: tuple[int, ...], dtype: str, device: int) -> bool:
    """A fast test for plain PyTorch tensors: true only where `_check` would find nothing. It takes a tenth of the time of `_check`."""
    torch = sys.modules.get("torch")
    return (
        torch is not None and type(value) is torch.Tensor and value.is_cuda and value.get_device() == device and value.shape == shape
        and value.dtype is getattr(torch, dtype) and not value.requires_grad and value.is_contiguous() and not value.data_ptr() % ALIGNMENT
    )  # fmt: skip


def _check(name: str, value: Any, shape: tuple[int, ...], dtype: str, device: int) -> None:
    """Raises ArgumentError unless `value` is a contiguous tensor of the given shape and dtype on the given CUDA device."""
    if _is_right(value, shape, dtype, device):
        return
    if is_torch(value):
        if not value.is_cuda:
            raise ArgumentError(f"`{name}` is on {value.device}; this kernel runs on cuda:{device}: pass {name}.to('cuda:{device}').")
        if value.requires_grad:
            raise ArgumentError(f"`{name}` requires grad and kernels record no gradients: pass {name}.detach().")
        if value.device.index != device:
            raise ArgumentError(f"`{name}` is on {value.device}; the filters were bound on cuda:{device}.")
        _fits(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), shape, dtype)
        contiguous = value.is_contiguous()
        if contiguous and value.data_ptr() % ALIGNMENT:
            raise ArgumentError(f"`{name}` must begin at a multiple of {ALIGNMENT} bytes, as wide copies need: pass {name}.clone().")
    else:
        if not hasattr(value, "__dlpack_device__"):
            raise ArgumentError(f"`{name}` (a {type(value).__name__}) must be a torch tensor or a DLPack tensor on cuda:{device}.")
        kind, index = map(int, value.__dlpack_device__())
        if (kind, index) != (_DLPACK_CUDA, device):
            raise ArgumentError(f"`{name}` is on DLPack device {(kind, index)}; this kernel runs on {(_DLPACK_CUDA, device)}.")
        tensor = tvm_ffi.from_dlpack(value)
        _fits(name, str(tensor.dtype), tuple(tensor.shape), shape, STORED.get(dtype, dtype))
        contiguous = tensor.is_contiguous()
    if not contiguous:
        raise ArgumentError(f"`{name}` is not contiguous; pass a contiguous copy (channels-last data goes to a kernel of layout NHWC).")
