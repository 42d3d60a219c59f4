"""What the best kernel is: the fastest, unless what it holds beside its tensors is out of proportion to what it gains."""

from __future__ import annotations

from im2win.spec.conv2d import Conv2d

MEMORY_PRICE = 0.3  # a kernel that holds another tenth of its layer's tensors must be 3 % faster to be worth it


def cost(conv: Conv2d, time: float, extra_bytes: float) -> float:
    """The time (in any unit) that candidates are compared by, with the price of the bytes that a call allocates."""
    return time * (1 + MEMORY_PRICE * extra_bytes / conv.bytes_moved)
