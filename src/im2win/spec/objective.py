"""The objective of tuning: time, with a penalty for the workspace that a kernel allocates."""

from __future__ import annotations

from im2win.spec.conv2d import Conv2d

MEMORY_PRICE = 0.3  # a kernel whose workspace is a twentieth of its layer's tensors must be 1.5 % faster to win
HIGHEST = 0.03  # the most that any workspace costs: memory decides between kernels of about the same time, and only between these


def cost(conv: Conv2d, time: float, extra_bytes: float) -> float:
    """The cost that candidates are compared by: the time (in any unit) with a penalty for the bytes that a call allocates."""
    return time * (1 + min(MEMORY_PRICE * extra_bytes / conv.bytes_moved, HIGHEST))
