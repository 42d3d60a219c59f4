"""What the parts of a kernel share: names, device functions, addresses, and the block's shared memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

Expr = Any
CHUNK = 16  # bytes of the widest copy
WORD = 4  # bytes of the narrowest asynchronous one, and of a lane's share of a matrix product's operand


def named(name: str, value: Any) -> Any:
    """Gives a buffer or variable its name in the generated source."""
    IRBuilder.name(name, value)
    return value


def local(name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Registers of a thread."""
    return named(name, T.alloc_buffer(shape, dtype, scope="local"))


def call(name: str, *arguments: Any) -> None:
    """Calls a device function for its effect."""
    T.evaluate(T.call_extern("void", f"im2win::{name}", *arguments))


def pointer(buffer: Any, *indices: Expr) -> Expr:
    """Address of an element."""
    return T.address_of(buffer[tuple(indices)])


def barrier() -> None:
    """Waits for all threads of the block."""
    T.evaluate(T.tvm_storage_sync("shared"))


class Arena:
    """The block's shared memory: one allocation, cut into buffers.

    It has the type of its largest parts: TVM gives an allocation whose uses are all of one type that type, and forgets to change its size.
    """

    ALIGNMENT = 128

    def __init__(self, size: int, dtype: str) -> None:
        self._all = named("shared", T.alloc_buffer((size // np.dtype(dtype).itemsize,), dtype, scope="shared.dyn", align=self.ALIGNMENT))
        self._size, self._taken = size, 0

    def take(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """The next free part, as a buffer."""
        view = T.decl_buffer(shape, dtype, data=self._all.data, elem_offset=self._taken // np.dtype(dtype).itemsize, scope="shared.dyn")
        self._taken += padded(shape, dtype)
        assert self._taken <= self._size, f"{name}: {self._taken} bytes of {self._size}"
        return named(name, view)


def padded(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes that a buffer takes of the arena."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // Arena.ALIGNMENT) * Arena.ALIGNMENT
