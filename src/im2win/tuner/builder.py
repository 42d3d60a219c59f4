"""The building worker: one candidate to one shared library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from im2win.machine import Machine
from im2win.problem import Conv2d
from im2win.schedules.tile import Tile
from im2win.tuner.workers import serve


@dataclass(frozen=True)
class BuildJob:
    """Compile `algorithm` with `tile` into the library `path`."""

    conv: Conv2d
    algorithm: str
    tile: Tile
    machine: Machine
    path: Path


@dataclass(frozen=True)
class Built:
    """How a job ended: outcome and why it is not "ok", or the bytes that the kernel allocates in a call."""

    outcome: str
    message: str = ""
    allocated: int | None = None


def build(job: BuildJob) -> Built:
    """Compiles; what the compiler raises is an outcome like any other."""
    from im2win.algorithms import algorithm
    from im2win.codegen import TileError, compile_module, lower

    try:
        compiled = compile_module(lower(job.conv, algorithm(job.algorithm), job.tile, job.machine), job.machine)
        compiled.export(job.path)
    except TileError as error:
        return Built("illegal", str(error))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        return Built("build_error", lines[-1][:500])
    return Built("ok", allocated=compiled.allocated)


def main(job_fd: int, result_fd: int) -> None:
    """Entry of the worker process."""
    serve(build, job_fd, result_fd)
