"""Functions that TVM calls by name, ours for a while in place of whoever had registered one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tvm_ffi

_lock = threading.RLock()  # TVM has one function of a name for all threads


@contextlib.contextmanager
def registered(name: str, wrap: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """While active, TVM calls ``wrap(before)`` by this name, in one thread at a time; `before` is what it called until then, or None."""
    with _lock:
        before = tvm_ffi.get_global_func(name, allow_missing=True)
        tvm_ffi.register_global_func(name, wrap(before), override=True)
        try:
            yield
        finally:
            if before:
                tvm_ffi.register_global_func(name, before, override=True)
            else:
                tvm_ffi.remove_global_func(name)
