"""Loads TVM's runtime, and the shared libraries whose kernels it runs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import tvm_ffi

from im2win.runtime.manifest import ArtefactError

BUNDLED = Path(__file__).parent / "lib"  # what `im2win.export.runtime` writes has the libraries here


def libraries_folder() -> Path:
    """The folder with TVM's libraries: the one beside this module, else that of the package of TVM.

    Raises:
        ArtefactError: there is neither.
    """
    if BUNDLED.is_dir():
        return BUNDLED
    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.origin:
        raise ArtefactError("the TVM runtime is not installed: pip install apache-tvm.")
    return Path(spec.origin).parent / "lib"


@functools.cache
def runtime_library() -> ctypes.CDLL:
    """Loads TVM's runtime, not its compiler, and lets kernels use every CPU that this process may use."""
    folder = libraries_folder()
    # TVM uses half of the logical CPUs by default; its thread pool reads this variable when the first kernel runs.
    os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    library = next(path for path in folder.iterdir() if path.name.startswith("libtvm_runtime."))
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@functools.cache
def cuda_runtime_library() -> ctypes.CDLL:
    """Loads the part of TVM's runtime that runs kernels on a GPU.

    Raises:
        ArtefactError: the library is missing, or the machine has no CUDA driver.
    """
    host = Path(str(runtime_library()._name))
    try:
        return ctypes.CDLL(str(host.with_name(host.name.replace("libtvm_runtime.", "libtvm_runtime_cuda."))), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtefactError(f"kernels for a GPU need TVM's CUDA runtime and the CUDA driver: {error}.") from None


def load_kernel(library: Path) -> Any:
    """Loads a shared library as a module of TVM's runtime. Its parallel loops run on the process's pool (`launch_through`).

    The dynamic linker treats two files of one path as the same library, even if the file was replaced in between. Each load therefore goes
    through a link with a unique name.
    """
    runtime_library()
    with tempfile.TemporaryDirectory(prefix="im2win-load-") as folder:
        link = Path(folder) / "conv.so"
        link.symlink_to(library.resolve())
        module = tvm_ffi.load_module(str(link))
        with contextlib.suppress(OSError, ValueError):  # a kernel without parallel loops, or for a GPU, has no such symbol
            loaded = ctypes.CDLL(str(link), mode=os.RTLD_NOLOAD)
            launch = ctypes.c_void_p.in_dll(loaded, "__TVMBackendParallelLaunch")
            if (chosen := _launch or _pool(loaded)) is not None:
                launch.value = chosen.value
        return module


_launch: ctypes.c_void_p | None = None
_first: ctypes.CDLL | None = None  # the library whose pool the process uses; it stays loaded


def _pool(loaded: ctypes.CDLL) -> ctypes.c_void_p | None:
    """The launching function of the first library with a pool that this process loaded; None without one, for TVM's own."""
    global _first
    if _first is None and hasattr(loaded, "im2win_launch"):
        _first = loaded
        loaded.im2win_set_threads(int(os.environ["TVM_NUM_THREADS"]))
    return None if _first is None else ctypes.cast(_first.im2win_launch, ctypes.c_void_p)


def start_threads() -> None:
    """Runs an empty parallel loop, so that the threads of the libraries loaded so far exist, and their stacks."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    launch = runtime_library().TVMBackendParallelLaunch if _first is None else _first.im2win_launch
    launch(kind(lambda part, group, data: 0), None, 0)


def launch_through(function: ctypes.c_void_p | None) -> None:
    """Sets the function, with the signature of TVMBackendParallelLaunch, that runs parallel loops of kernels loaded from now on.

    Args:
        function: None for im2win's own pool: that of the first loaded library. TVM's where no library has one.
    """
    global _launch
    _launch = function


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The CPU's features as Linux lists them; empty where it does not list them (then nothing is checked)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in text.splitlines() if line.startswith(("flags", "Features"))), "").split())
