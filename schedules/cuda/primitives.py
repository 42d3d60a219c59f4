"""Primitives that all parts of a kernel share: names, calls of device functions, addresses, and the block's shared memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

Expr = Any
CHUNK = 16  # bytes of the widest copy
WORD = 4  # bytes of the narrowest asynchronous copy, and of a lane's operand register of a tensor-core instruction


def named(name: str, value: Any) -> Any:
    """Names a buffer or variable in the generated source."""
    IRBuilder.name(name, value)
    return value


def local(name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """A buffer in the registers of a thread."""
    return named(name, T.alloc_buffer(shape, dtype, scope="local"))


def call(name: str, *arguments: Any) -> None:
    """Emits a call of a device function of namespace `im2win` for its effect."""
    T.evaluate(T.call_extern("void", f"im2win::{name}", *arguments))


def pointer(buffer: Any, *indices: Expr) -> Expr:
    """The address of an element."""
    return T.address_of(buffer[tuple(indices)])


def barrier() -> None:
    """Emits `__syncthreads()`: waits for all threads of the block."""
    T.evaluate(T.tvm_storage_sync("shared"))


class Arena:
    """The block's shared memory: one allocation, cut into buffers.

    The allocation has the element type of its largest buffers: if all uses of an allocation have one type, TVM gives the allocation that
    type but does not adjust its size.
    """

    ALIGNMENT = 128

    def __init__(self, size: int, dtype: str) -> None:
        self._all = named("shared", T.alloc_buffer((size // np.dtype(dtype).itemsize,), dtype, scope="shared.dyn", align=self.ALIGNMENT))
        self._size, self._taken = size, 0

    def take(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Cuts the next buffer off the free memory.

        Raises:
            AssertionError: the allocation is too small.
        """
        view = T.decl_buffer(shape, dtype, data=self._all.data, elem_offset=self._taken // np.dtype(dtype).itemsize, scope="shared.dyn")
        self._taken += padded(shape, dtype)
        assert self._taken <= self._size, f"{name}: {self._taken} bytes of {self._size}"
        return named(name, view)


def padded(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes that a buffer takes in an `Arena`, padded to its alignment."""
    return -(-math.prod(shape) * _itemsize(dtype) // Arena.ALIGNMENT) * Arena.ALIGNMENT


@functools.cache
def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize
