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


def build(job: BuildJob) -> tuple[str, str]:
    """("ok", "") or (outcome, why not); what the compiler raises is an outcome like any other."""
    from im2win.algorithms import algorithm
    from im2win.codegen import TileError, compile_library, lower

    try:
        compile_library(lower(job.conv, algorithm(job.algorithm), job.tile, job.machine), job.machine, job.path)
    except TileError as error:
        return "illegal", str(error)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        return "build_error", lines[-1][:500]
    return "ok", ""


def main(job_fd: int, result_fd: int) -> None:
    """Entry of the worker process."""
    serve(build, job_fd, result_fd)
