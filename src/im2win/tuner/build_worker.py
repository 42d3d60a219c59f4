"""Worker process that builds candidates.

It compiles one candidate into a shared library, or ranks an algorithm's tiles by the analytic model.
"""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass
from pathlib import Path

from im2win.codegen.llvm import TileError, ToolchainError
from im2win.common.messages import brief
from im2win.common.temporary import temporaries_in
from im2win.common.worker_pool import WorkerError, compiles_only, serve
from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Kernel, Tile
from im2win.registry.schedules import schedule_of
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

TRIED_BYTES = 1 << 20  # more than any kernel's library
_SHORT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)


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
    """Result of a job: its outcome and the reason if it is not "ok", or the compiled kernel.

    `undecided`: a failure that says nothing of the candidate.
    """

    outcome: str
    message: str = ""
    kernel: Kernel | None = None
    undecided: bool = False


def build(job: BuildJob) -> Built:
    """Compiles a candidate. An exception of the compiler becomes an outcome, which is undecided where the machine is to blame.

    What the compiler writes beside the library is in its folder, so that nothing stays where this process is killed.
    """
    try:
        with temporaries_in(job.path.parent):
            kernel = backend_for(job.device).build(job.conv, schedule_of(job.algorithm), job.tile, job.path)
    except TileError as error:
        return Built("illegal", str(error))
    except Exception as error:
        blamed = machine_fault(error, job.path.parent)
        return Built("build_error", brief(error) if blamed is None else blamed, undecided=blamed is not None)
    return Built("ok", kernel=kernel)


def machine_fault(error: Exception, folder: Path) -> str | None:
    """What the machine did to make a build fail, and what to do; None if the candidate is to blame.

    A compiler that cannot write says so in words of its own, so that a file is written here.

    Args:
        error: what the build raised.
        folder: where it was to write.
    """
    if isinstance(error, ToolchainError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORT):
        return f"the machine ran short ({brief(error)}): end other programs, or raise the limits of this one."
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIED_BYTES))
    except OSError as found:
        return f"`{folder}` cannot be written ({found.strerror}): free some space there, raise the limit, or set TMPDIR to another folder."
    return None


def failed_build(error: WorkerError, folder: Path) -> Built:
    """What a build gave whose process died or took too long. LLVM ends its process where it cannot write."""
    if error.kind == "timeout":
        return Built("timeout", f"building: {error}")
    blamed = str(error) if error.killed else machine_fault(error, folder)
    return Built("build_error", f"building: {error if blamed is None else blamed}", undecided=blamed is not None)


def rank(job: RankJob) -> list[tuple[float, Tile]]:
    """The tiles of an algorithm with the analytic model's estimates, best first."""
    return backend_for(job.device, job.accuracy).ranked(job.conv, schedule_of(job.algorithm))


def handle(job: BuildJob | RankJob) -> Built | list[tuple[float, Tile]]:
    """Runs a job of either kind."""
    return rank(job) if isinstance(job, RankJob) else build(job)


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    compiles_only()
    serve(handle, job_fd, result_fd)
