"""Runs CPU kernels on PyTorch's threads, those of OpenMP."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from pathlib import Path

import torch

from im2win.codegen.toolchain import kept_library
from im2win.runtime.libraries import launch_through

_log = logging.getLogger("im2win.torch")
SOURCE = Path(__file__).with_name("pool.c")
_FLAGS = ("-O2", "-std=c11", "-Wl,-z,noexecstack")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")


@functools.cache
def share() -> bool:
    """Lets kernels that are loaded from now on use PyTorch's threads. Returns whether they do.

    They keep TVM's threads if PyTorch does not use GNU's OpenMP, or if there is no C compiler for the adapter between them.
    """
    if not sys.platform.startswith("linux") or "OpenMP" not in torch.__config__.parallel_info():
        return False
    try:
        openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
        functions = [ctypes.cast(getattr(openmp, name), ctypes.c_void_p) for name in _OPENMP]
        library = ctypes.CDLL(str(kept_library(SOURCE, "CC", _FLAGS)))
    except (AttributeError, OSError) as error:
        _log.info("kernels use threads of their own beside PyTorch's (%s)", error)
        return False
    library.im2win_openmp(*functions)
    launch_through(ctypes.cast(library.im2win_launch, ctypes.c_void_p))
    return True
