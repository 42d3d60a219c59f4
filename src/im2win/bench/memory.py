"""Peak resident memory of one convolution, measured in a fresh process that has the runtime and the exported op, nothing else.

The formula of the direct form is input + filter + output (`Conv2d.bytes_moved`); what an algorithm stores on top shows as the difference.
The filters count once, as packed: a deployed model keeps only those.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from im2win.runtime.libraries import runtime_library
from im2win.runtime.load import load
from im2win.runtime.op import Op

_THP_DISABLE = 41  # PR_SET_THP_DISABLE
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class MeasureError(RuntimeError):
    """The measuring process failed; the message is its last words."""


def peak_bytes(op: Op) -> int:
    """Measures the peak of a built op (see `peak_of_library`)."""
    with tempfile.TemporaryDirectory(prefix="im2win-memory-") as folder:
        return peak_of_library(op.export(Path(folder) / "conv.so"))


def peak_of_library(path: Path) -> int:
    """Peak resident bytes that tensors and calls of the exported op add to a process that has loaded it.

    Input, packed filters, output, residual and everything the kernel allocates. The thread pool, of which a process has one for all its
    layers, runs before the first count; pages of code are not counted.

    Raises:
        MeasureError: the process failed.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}  # each tensor a mapping of its own: freed means gone
    command = [sys.executable, "-m", "im2win.bench.memory", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasureError(f"measuring {path} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return int(done.stdout.split()[-1])


def _kilobytes(name: str) -> int:
    """A field of /proc/self/status; where there is none, the highest resident size so far, as getrusage says it.

    getrusage is the second choice: on Linux its number survives exec, so that a child starts with its parent's peak.
    """
    if _STATUS.exists():
        return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def _code_kilobytes() -> int:
    """Resident pages of files, of libraries above all; 0 where the system does not tell."""
    return _kilobytes("RssFile") if _STATUS.exists() else 0


def _start_threads() -> None:
    """Runs an empty parallel loop, so that the thread pool and its stacks are there."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    launch = runtime_library().TVMBackendParallelLaunch
    launch(kind(lambda task, environment, data: 0), None, 0)


def _measure(path: Path) -> int:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_THP_DISABLE, 1, 0, 0, 0)  # a huge page would round a small tensor up to 2 MB
    op = load(path)
    conv = op.conv
    generator = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> Any:
        array = np.empty(shape, np.float32)
        generator.standard_normal(out=array, dtype=np.float32)
        return array.astype(conv.dtype, copy=False)

    normal((1024,))  # what the generator itself needs is not the convolution's
    _start_threads()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # else small tensors would take what imports left free, which is counted already
    before, code = _kilobytes("VmRSS"), _code_kilobytes()
    layer = op.bind(normal(conv.filter_shape), normal((conv.out_channels,)) if conv.bias else None)
    x, residual = normal(conv.input_shape), normal(conv.output_shape) if conv.residual else None
    y = np.full(conv.output_shape, np.nan, conv.dtype)
    if _RESET.exists():
        _RESET.write_text("5")  # forgets the peak of packing: from here on it is that of running
    for _ in range(3):
        layer(x, residual=residual, out=y)
    return (_kilobytes("VmHWM") - before - (_code_kilobytes() - code)) * 1024


if __name__ == "__main__":
    sys.stdout.write(f"{_measure(Path(sys.argv[1]))}\n")
