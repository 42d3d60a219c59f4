"""Worker process that builds candidates.

It compiles one candidate into a shared library, or ranks an algorithm's tiles by the analytic model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from im2win.codegen.llvm import TileError
from im2win.common.messages import brief
from im2win.common.worker_pool import serve
from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Kernel, Tile
from im2win.registry.schedules import schedule_of
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class BuildJob:
    """Compile `algorithm` with `tile` into the library `path`."""

    conv: Conv2d
    algorithm: str
    tile: Tile
    device: Device
    path: Path


@dataclass(frozen=True)
class RankJob:
    """Rank the tiles of `algorithm` as the backend's `ranked` does."""

    conv: Conv2d
    algorithm: str
    device: Device
    accuracy: Accuracy


@dataclass(frozen=True)
class Built:
    """Result of a job: its outcome and the reason if it is not "ok", or the compiled kernel."""

    outcome: str
    message: str = ""
    kernel: Kernel | None = None


def build(job: BuildJob) -> Built:
    """Compiles a candidate. An exception of the compiler becomes an outcome."""
    try:
        kernel = backend_for(job.device).build(job.conv, schedule_of(job.algorithm), job.tile, job.path)
    except TileError as error:
        return Built("illegal", str(error))
    except Exception as error:
        return Built("build_error", brief(error))
    return Built("ok", kernel=kernel)


def rank(job: RankJob) -> list[tuple[float, Tile]]:
    """The tiles of an algorithm with the analytic model's estimates, best first."""
    return backend_for(job.device, job.accuracy).ranked(job.conv, schedule_of(job.algorithm))


def handle(job: BuildJob | RankJob) -> Built | list[tuple[float, Tile]]:
    """Runs a job of either kind."""
    return rank(job) if isinstance(job, RankJob) else build(job)


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    serve(handle, job_fd, result_fd)
