"""The building worker: one candidate to one shared library, and before there are candidates, an algorithm's space put in order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from im2win.codegen.llvm import TileError
from im2win.common.messages import brief
from im2win.common.worker_pool import serve
from im2win.registry.backends import Device, Kernel, Tile, backend_for
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
    """Put the tiles of `algorithm` in order, as the backend's `ranked` does."""

    conv: Conv2d
    algorithm: str
    device: Device
    accuracy: Accuracy


@dataclass(frozen=True)
class Built:
    """How a job ended: outcome and why it is not "ok", or what was compiled."""

    outcome: str
    message: str = ""
    kernel: Kernel | None = None


def build(job: BuildJob) -> Built:
    """Compiles; what the compiler raises is an outcome like any other."""
    try:
        kernel = backend_for(job.device).build(job.conv, schedule_of(job.algorithm), job.tile, job.path)
    except TileError as error:
        return Built("illegal", str(error))
    except Exception as error:
        return Built("build_error", brief(error))
    return Built("ok", kernel=kernel)


def rank(job: RankJob) -> list[tuple[float, Tile]]:
    """The model's estimates with their tiles, best first."""
    return backend_for(job.device, job.accuracy).ranked(job.conv, schedule_of(job.algorithm))


def handle(job: BuildJob | RankJob) -> Built | list[tuple[float, Tile]]:
    """Does a job."""
    return rank(job) if isinstance(job, RankJob) else build(job)


def main(job_fd: int, result_fd: int) -> None:
    """Entry of the worker process."""
    serve(handle, job_fd, result_fd)
