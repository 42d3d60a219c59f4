"""Passes a convolution's tensors to its kernel as `DLTensor` structures that are filled with addresses alone.

This costs a call less than one DLPack view for each tensor.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import numpy.typing as npt

from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

_ONE_LANE = 1 << 16  # of DLDataType: 8 bits of type code, 8 bits of width, 16 bits of lanes


class _DLTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Addressed(threading.local):
    """`DLTensor` arguments of a problem: input, residual and output, contiguous and in the problem's layout.

    Each thread has its own structures, since a kernel reads them while other threads run.

    Args:
        conv: the problem.
        device: DLPack's device type and the device's number.
    """

    def __init__(self, conv: Conv2d, device: tuple[int, int]) -> None:
        shapes = (conv.input_shape, conv.dtype), (conv.output_shape, conv.out_dtype), (conv.output_shape, conv.out_dtype)
        data, added, output = tensors = [_tensor(shape, _kind(dtype), device) for shape, dtype in shapes]
        arguments: list[Any] = [ctypes.c_void_p(ctypes.addressof(one)) for one in tensors]
        if not conv.residual:
            arguments[1] = None
        self._own = data, added, output, arguments  # one attribute, since each look-up of a thread-local attribute takes time

    def at(self, x: int, added: int, y: int) -> list[Any]:
        """The kernel's arguments [input, residual, output] at the given addresses; the residual is None where the problem has none.

        The structures serve one call by this thread, and the memory must stay allocated during the call.

        Args:
            x, added, y: addresses of the first elements of input, residual (0 for none) and output.
        """
        data, other, output, arguments = self._own
        data.data, output.data = x, y
        if added:
            other.data = added
        return arguments


def _kind(dtype: str) -> int:
    """The packed DLDataType of an element type."""
    element = ELEMENT_TYPES[dtype]
    return element.dlpack | element.itemsize * 8 << 8 | _ONE_LANE


def _tensor(shape: tuple[int, ...], kind: int, device: tuple[int, int]) -> _DLTensor:
    """A contiguous DLTensor without an address. `kind` is its packed DLDataType."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    numbers = ctypes.c_int64 * len(shape)
    return _DLTensor(None, *device, len(shape), kind, numbers(*shape), numbers(*reversed(strides)), 0)


class _Managed(ctypes.Structure):
    """`DLManagedTensor` of dlpack.h."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_EXPORTED: dict[int, Any] = {}  # by address, what a consumer may still use


def _release(managed: Any) -> None:
    _EXPORTED.pop(ctypes.addressof(managed.contents), None)


_DELETER = _Deleter(_release)


class Exported:
    """A contiguous numpy array of a type of ml_dtypes, such as bfloat16, for `from_dlpack`; numpy itself does not export it."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU

    def __dlpack__(self, **ignored: Any) -> Any:
        """A capsule of the array, in the form of DLPack before version 1."""
        array = self._array
        form = _form(array.shape, array.dtype.name)
        managed = _Managed.from_buffer_copy(form)
        managed.tensor.data = array.__array_interface__["data"][0]
        address = ctypes.addressof(managed)
        _EXPORTED[address] = managed, form, array  # the form holds shape and strides
        return _new_capsule(address, b"dltensor", None)


@functools.lru_cache(maxsize=256)
def _form(shape: tuple[int, ...], dtype: str) -> Any:
    """A `DLManagedTensor` of an element type without an address: to fill in every field takes longer than a copy of it."""
    return _Managed(_tensor(shape, _kind(dtype), (1, 0)), None, _DELETER)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
