"""Tensors in a device's memory, allocated by TVM's runtime: for programs without PyTorch, which need not import TVM and its compiler."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import tvm_ffi

from im2win.runtime.libraries import runtime_library


def allocate(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """A tensor on a device of tvm-ffi; its values are arbitrary."""
    runtime_library()
    return tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), device, None)


def upload(array: np.ndarray[Any, Any], device: Any) -> Any:
    """A copy of a contiguous array on a device of tvm-ffi."""
    made = allocate(array.shape, str(array.dtype), device)
    overwrite(made, array)
    return made


def overwrite(tensor: Any, array: np.ndarray[Any, Any]) -> None:
    """Copies a contiguous array into a tensor of its shape and dtype that `allocate` or `upload` made; it is done on return."""
    tvm_ffi.get_global_func("runtime.TVMTensorCopyFromBytes")(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
