"""Measures the peak resident memory of one convolution, in a fresh process with the runtime and the exported operator only.

Direct convolution needs input + filter + output (`Conv2d.bytes_moved`). The difference is what an algorithm stores in addition. The filters
count once, as packed, since a deployed model keeps only those.
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

from im2win.runtime.libraries import start_threads
from im2win.runtime.load import load
from im2win.runtime.op import Op
from im2win.spec.dtypes import ELEMENT_TYPES

_THP_DISABLE = 41  # PR_SET_THP_DISABLE
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class MeasureError(RuntimeError):
    """The measuring process failed. The message is the end of its output."""


def peak_bytes(op: Op) -> int:
    """The peak of a built operator in bytes (see `peak_of_library`)."""
    with tempfile.TemporaryDirectory(prefix="im2win-memory-") as folder:
        return peak_of_library(op.export(Path(folder) / "conv.so"))


def peak_of_library(path: Path) -> int:
    """Peak resident bytes that tensors and calls of the exported operator add to a process that has loaded it.

    They cover input, packed filters, output, residual and everything that the kernel allocates. The thread pool, of which a process has one
    for all layers, runs before the first count. Pages of code do not count.

    Raises:
        MeasureError: the process failed.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}  # each tensor gets its own mapping; freeing it unmaps it
    command = [sys.executable, "-m", "im2win.bench.memory", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasureError(f"measuring {path} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return int(done.stdout.split()[-1])


def _kilobytes(name: str) -> int:
    """A field of /proc/self/status; where there is none, the peak resident size of getrusage.

    getrusage is the second choice: on Linux its number survives exec, so a child starts with its parent's peak.
    """
    if _STATUS.exists():
        return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def _code_kilobytes() -> int:
    """Resident pages of files, mostly libraries; 0 where the system does not report them."""
    return _kilobytes("RssFile") if _STATUS.exists() else 0


def _measure(path: Path) -> int:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_THP_DISABLE, 1, 0, 0, 0)  # a huge page would round a small tensor up to 2 MB
    op = load(path)
    conv = op.conv
    generator = np.random.default_rng(0)

    def normal(shape: tuple[int, ...], dtype: str) -> Any:
        array = np.empty(shape, np.float32)
        generator.standard_normal(out=array, dtype=np.float32)
        return array.astype(dtype, copy=False) if ELEMENT_TYPES[dtype].limits is None else np.abs(8 * array).astype(dtype)

    dtypes, elements = conv.dtypes, {"bias": conv.out_channels, "scale": conv.scales}
    normal((1024,), "float32")  # allocates the generator's own memory before the count
    start_threads()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # else small tensors would reuse memory that imports freed and that is counted already
    before, code = _kilobytes("VmRSS"), _code_kilobytes()
    per_channel = (normal((count,), dtypes[name]) if name in dtypes else None for name, count in elements.items())
    layer = op.bind(normal(conv.filter_shape, dtypes["filter"]), *per_channel)
    x, residual = normal(conv.input_shape, conv.dtype), normal(conv.output_shape, conv.out_dtype) if conv.residual else None
    y = np.full(conv.output_shape, ELEMENT_TYPES[conv.out_dtype].poisons[0], conv.out_dtype)
    if _RESET.exists():
        _RESET.write_text("5")  # resets the peak after packing, so that it covers the calls only
    for _ in range(3):
        layer(x, residual=residual, out=y)
    return (_kilobytes("VmHWM") - before - (_code_kilobytes() - code)) * 1024


if __name__ == "__main__":
    sys.stdout.write(f"{_measure(Path(sys.argv[1]))}\n")
