"""One object per device that says what differs between a CPU and a GPU for whoever ranks, tunes, looks up or builds."""

from __future__ import annotations

from collections.abc import Callable

from im2win.device.cpu import Machine
from im2win.device.gpu import Gpu, device_gpu
from im2win.registry.cpu_backend import CpuBackend
from im2win.registry.cuda_backend import CudaBackend
from im2win.registry.interface import Backend
from im2win.spec.accuracy import Accuracy

Device = Machine | Gpu

TARGETS = ("cpu", "cuda")


def check_target(target: str) -> None:
    """Raises ValueError for a target that no schedule is for."""
    if target not in TARGETS:
        raise ValueError(f"`target` (={target!r}) must be one of {', '.join(TARGETS)}.")


def device_for(target: str, threads: int | None = None) -> Device:
    """This machine's CPU or first GPU.

    Raises:
        ValueError: unknown target, or `threads` for a GPU. NoGpuError: no usable GPU.
    """
    check_target(target)
    if target == "cpu":
        return Machine.host(threads)
    if threads is not None:
        raise ValueError(f"`threads` (={threads!r}) is for target cpu; a GPU's kernels choose their own.")
    return device_gpu()


def backend_for(device: Device, accuracy: Accuracy = "float32") -> Backend:
    """The backend of a device."""
    return CudaBackend(device, accuracy) if isinstance(device, Gpu) else CpuBackend(device)


BackendOf = Callable[[Device], Backend]
