"""Checks a caller's contiguous CPU tensors (numpy, PyTorch, DLPack) and passes them to a kernel without a copy."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import numpy as np
import tvm_ffi

from im2win.runtime.dltensor import Exported

_DLPACK_CPU = 1
_BITS = {"bfloat16": "int16", "float8_e4m3fn": "int8"}  # types that numpy has from ml_dtypes, and integers with their bits


class ArgumentError(ValueError):
    """A tensor that a kernel cannot take. The message names the argument, its value and the rule."""


def _torch() -> Any:
    """PyTorch if the program has imported it, else None."""
    return sys.modules.get("torch")  # only a program that has imported torch has torch tensors


def is_torch(value: object) -> bool:
    """Whether a value is a PyTorch tensor."""
    torch = _torch()
    return torch is not None and isinstance(value, torch.Tensor)


def view(name: str, value: Any, shape: tuple[int, ...], dtype: str, *, writable: bool = False) -> Any:
    """A kernel argument that shares memory with `value`.

    Raises:
        ArgumentError: `value` is not a tensor, has the wrong device, dtype or shape, is not contiguous, requires grad, or is read-only
            although the kernel writes it.
    """
    if isinstance(value, np.ndarray):
        _check(name, str(value.dtype), tuple(value.shape), value.flags.c_contiguous, dtype, shape)
        if value.flags.writeable:
            return argument(value)
        if writable:
            raise ArgumentError(f"`{name}` must be writable; this array is read-only.")
        return argument(_readable(value))
    if is_torch(value):
        return _torch_view(name, value, shape, dtype)
    if not hasattr(value, "__dlpack__"):
        raise ArgumentError(f"`{name}` (a {type(value).__name__}) must be a numpy array, a torch tensor or a DLPack tensor.")
    _on_cpu(name, value)
    tensor = tvm_ffi.from_dlpack(value)
    _check(name, str(tensor.dtype), tuple(tensor.shape), _compact(tensor.shape, tensor.strides), dtype, shape)
    return tensor


class Port:
    """An argument of a kernel with its expected shape and dtype.

    A valid tensor is accepted in well under a microsecond. For any other one `view` composes the error message.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, *, writable: bool = False) -> None:
        self.name, self.shape, self.dtype, self.writable = name, shape, dtype, writable
        self.nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self._numpy = np.dtype(dtype)
        self._torch: Any = None

    def __call__(self, value: Any) -> Any:
        """A kernel argument that shares memory with `value`. Errors as in `view`."""
        if type(value) is np.ndarray and value.dtype == self._numpy and value.shape == self.shape:
            flags = value.flags
            if flags.c_contiguous and flags.writeable:
                return argument(value)
        elif self._is_right(value):
            return value  # kernels take PyTorch tensors directly
        return view(self.name, value, self.shape, self.dtype, writable=self.writable)

    def _is_right(self, value: Any) -> bool:
        torch = _torch()
        if torch is None or type(value) is not torch.Tensor or value.shape != self.shape or not value.is_cpu or value.requires_grad:
            return False
        if self._torch is None:
            self._torch = getattr(torch, self.dtype)
        return value.dtype is self._torch and bool(value.is_contiguous())


def _on_cpu(name: str, value: Any) -> None:
    device = int(value.__dlpack_device__()[0])
    if device != _DLPACK_CPU:
        raise ArgumentError(f"`{name}` is on DLPack device type {device}; this kernel runs on the CPU (type {_DLPACK_CPU}).")


def _torch_view(name: str, value: Any, shape: tuple[int, ...], dtype: str) -> Any:
    if value.device.type != "cpu":
        raise ArgumentError(f"`{name}` is on device {value.device}; this kernel runs on the CPU: pass {name}.cpu().")
    if value.requires_grad:
        raise ArgumentError(f"`{name}` requires grad and kernels record no gradients: pass {name}.detach().")
    _check(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.is_contiguous(), dtype, shape)
    return tvm_ffi.from_dlpack(value)


def _check(name: str, dtype: str, shape: tuple[int, ...], contiguous: bool, want_dtype: str, want_shape: tuple[int, ...]) -> None:
    if dtype != want_dtype:
        raise ArgumentError(f"`{name}` has dtype {dtype}; it must be {want_dtype}.")
    if shape != tuple(want_shape):
        raise ArgumentError(f"`{name}` has shape {shape}; it must be {tuple(want_shape)}.")
    if not contiguous:
        raise ArgumentError(f"`{name}` is not contiguous; pass a contiguous copy (channels-last data goes to a kernel of layout NHWC).")


def _compact(shape: Any, strides: Any) -> bool:
    """Whether strides, in elements, are those of a contiguous tensor."""
    expected = 1
    for size, stride in zip(reversed(tuple(shape)), reversed(tuple(strides)), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _readable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view of a read-only array that DLPack agrees to export.

    DLPack cannot mark memory as read-only, but kernels never write their inputs.
    """
    memory: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    memory._keep = array
    shared: np.ndarray[Any, Any] = np.frombuffer(memory, array.dtype).reshape(array.shape)
    return shared


def argument(array: np.ndarray[Any, Any]) -> Any:
    """A kernel argument that shares memory with a contiguous, writable numpy array, which must live as long. numpy exports no bfloat16."""
    return tvm_ffi.from_dlpack(Exported(array) if array.dtype.name in _BITS else array)


def kernel_view(value: Any) -> Any:
    """A tensor as kernels on a GPU take it: PyTorch's float8_e4m3fn as int8 with the same bytes, any other as it is."""
    torch = _torch()
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype is torch.float8_e4m3fn:
        return value.view(torch.int8)
    return value


def empty_like(value: Any, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """An uninitialised tensor of the same library as `value`; a numpy array for libraries that cannot make one."""
    if is_torch(value):
        return value.new_empty(shape, dtype=getattr(_torch(), dtype))
    return empty(shape, dtype)


def finite(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, contiguous.

    Raises:
        ArgumentError: one of its numbers is not finite.
    """
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ArgumentError(f"`{name}` (={array[place]} at {place}) must be finite.")
    return np.ascontiguousarray(array)


def torch_values(value: Any) -> np.ndarray[Any, Any]:
    """The values of a PyTorch tensor on the CPU as a numpy array that shares its memory. PyTorch does not convert `_BITS` itself."""
    value, torch = value.detach(), _torch()
    name = str(value.dtype).removeprefix("torch.")
    if name in _BITS:
        bits: np.ndarray[Any, Any] = value.view(getattr(torch, _BITS[name])).numpy()
        return bits.view(name)
    array: np.ndarray[Any, Any] = value.numpy()
    return array


def torch_tensor(array: np.ndarray[Any, Any]) -> Any:
    """A PyTorch tensor that shares the memory of a numpy array, which may have one of PyTorch's types in `_BITS`."""
    torch, name = _torch(), array.dtype.name
    if name in _BITS:
        return torch.from_numpy(array.view(_BITS[name])).view(getattr(torch, name))
    return torch.from_numpy(array)


def as_numpy(name: str, value: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """The values of a tensor as a numpy array, checked as in `view` except for contiguity: filters are copied when they are packed."""
    if is_torch(value):
        if value.device.type != "cpu":
            raise ArgumentError(f"`{name}` is on device {value.device}; this kernel runs on the CPU: pass {name}.cpu().")
        value = torch_values(value)
    elif not isinstance(value, np.ndarray):
        if not hasattr(value, "__dlpack__"):
            raise ArgumentError(f"`{name}` (a {type(value).__name__}) must be a numpy array, a torch tensor or a DLPack tensor.")
        _on_cpu(name, value)
        value = np.from_dlpack(value)
    array: np.ndarray[Any, Any] = value
    _check(name, str(array.dtype), tuple(array.shape), True, dtype, shape)
    return array


def empty(shape: tuple[int, ...], dtype: Any, alignment: int = 64) -> np.ndarray[Any, Any]:
    """An uninitialised array whose memory starts at a multiple of `alignment` bytes, so that no vector access crosses a cache line.

    PyTorch and ONNX Runtime align their tensors so; numpy starts large arrays 16 bytes behind such a multiple.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    array: np.ndarray[Any, Any] = raw[start : start + size].view(dtype).reshape(shape)
    return array


def aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy whose memory starts as `empty`'s."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy
