"""A convolution's tensors, handed to its kernel by their addresses alone, which costs a call less than a view of each of them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

_ONE_LANE = 1 << 16  # of DLDataType: lanes after code and bits of 8 bits each


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
    """Input, what is added, and output of a problem in float32 or float16, compact and in the problem's layout.

    Each thread has its own, since a kernel reads them while other threads run.

    Args:
        device: DLPack's type of device and the device's number.
    """

    def __init__(self, conv: Conv2d, device: tuple[int, int]) -> None:
        kind = ELEMENT_TYPES[conv.dtype].dlpack | conv.itemsize * 8 << 8 | _ONE_LANE
        shapes = conv.input_shape, conv.output_shape, conv.output_shape
        data, added, output = tensors = [_tensor(shape, kind, device) for shape in shapes]
        arguments: list[Any] = [ctypes.c_void_p(ctypes.addressof(one)) for one in tensors]
        if not conv.residual:
            arguments[1] = None
        self._own = data, added, output, arguments  # one attribute, since finding a thread's takes time

    def at(self, x: int, added: int, y: int) -> list[Any]:
        """The kernel's arguments with their first elements there, None for what the problem does not add.

        They are for one call by this thread, during which the memory must live.
        """
        data, other, output, arguments = self._own
        data.data, output.data = x, y
        if added:
            other.data = added
        return arguments


def _tensor(shape: tuple[int, ...], kind: int, device: tuple[int, int]) -> _DLTensor:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    numbers = ctypes.c_int64 * len(shape)
    return _DLTensor(None, *device, len(shape), kind, numbers(*shape), numbers(*reversed(strides)), 0)
