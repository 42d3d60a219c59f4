"""A worker's `main` whose jobs misbehave on request."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from im2win.common.worker_pool import MachineError, serve


def handle(job: str) -> Any:
    if job == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if job.startswith("signal "):  # "signal 9", or "signal 9 FILE" for the first time only
        number, *once = job.split()[1:]
        if not once or not Path(once[0]).exists():
            for path in once:
                Path(path).touch()
            os.kill(os.getpid(), int(number))
    if job == "raise":
        raise RuntimeError("a job that fails")
    if job == "exhaust":
        bytearray(1 << 60)
    if job == "blame":
        raise MachineError("the GPU is gone.")
    if job == "hang":
        time.sleep(600)
    if job == "torch":
        import tvm

        with_tvm, found = "torch" in sys.modules, importlib.util.find_spec("torch") is not None
        torch = importlib.import_module("torch")
        return with_tvm, found, list(tvm.runtime.from_dlpack(torch.ones(2, 3)).shape)
    print("noise on standard output")
    print("noise on standard error", file=sys.stderr)
    return f"did {job}", os.getpid()


def main(job_fd: int, result_fd: int) -> None:
    serve(handle, job_fd, result_fd)
