"""Kernels on a CPU run on the threads that PyTorch has: OpenMP's."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from im2win import runtime
from im2win.artefacts import default_folder

_log = logging.getLogger("im2win.torch")
SOURCE = Path(__file__).with_name("pool.c")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")


@functools.cache
def share() -> bool:
    """Lets kernels that are loaded from now on use PyTorch's threads; whether they do.

    They keep TVM's where PyTorch's are not those of GNU's OpenMP, or where there is no C compiler to make the step between them.
    """
    if not sys.platform.startswith("linux") or "OpenMP" not in torch.__config__.parallel_info():
        return False
    try:
        openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
        functions = [ctypes.cast(getattr(openmp, name), ctypes.c_void_p) for name in _OPENMP]
        library = ctypes.CDLL(str(_library()))
    except (AttributeError, OSError) as error:
        _log.info("kernels use threads of their own beside PyTorch's (%s)", error)
        return False
    library.im2win_openmp(*functions)
    runtime.launch_through(ctypes.cast(library.im2win_launch, ctypes.c_void_p))
    return True


def _library() -> Path:
    """The compiled source, from the cache or made now.

    Raises:
        OSError: no compiler, or it failed, or the cache's folder cannot be written.
    """
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if not compiler:
        raise OSError("no C compiler on PATH")
    folder = default_folder()
    path = folder / f"pool-{hashlib.sha256(SOURCE.read_bytes() + compiler.encode()).hexdigest()[:12]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pool-", dir=folder) as work:
            made = Path(work) / path.name
            command = [compiler, "-O2", "-std=c11", "-fPIC", "-shared", "-Wl,-z,noexecstack", str(SOURCE), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"{compiler}: {done.stderr.strip()[:2000]}")
            os.replace(made, path)
    return path
