"""Legality of launch overlap; see `schedules.cuda.launch_overlap`."""

from __future__ import annotations

from im2win.device.gpu import Gpu

LEAST_CAPABILITY = 9, 0  # compute capability from which on kernels can wait for the one before


def no_overlap(gpu: Gpu) -> str | None:
    """Why kernels cannot be launched with overlap on a GPU; None if they can."""
    if tuple(map(int, gpu.capability.split("."))) >= LEAST_CAPABILITY:
        return None
    return f"`overlap` (=True) needs compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or newer, not {gpu.capability}"
