"""Replaces the functions that TVM calls by name for the duration of a context."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tvm_ffi

_lock = threading.RLock()  # TVM has one function for each name, shared by all threads


@contextlib.contextmanager
def registered(name: str, wrap: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """A context in which TVM calls ``wrap(before)`` by this name, in one thread at a time.

    Args:
        wrap: takes the function that was registered before, or None.
    """
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
