"""Where CUDA kernels take the windows of an algorithm from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from im2win.compute import lowered
from im2win.compute.lowered import Strides
from im2win.spec.conv2d import Conv2d

Staged = Literal["taps", "rows", "windows"]


@dataclass(frozen=True)
class WindowSource:
    """The tensor that windows come from, and what of them shared memory holds.

    axes: of the tensor that a kernel of its own makes from the input, see `compute.lowered`; "" takes windows from the input itself.
    staged: "taps" copies every tap of every window by itself; "rows" the part of the input under a patch of windows, once for all taps;
        "windows" the same part in the order of im2win, so that a window is one run.
    """

    axes: str = ""
    staged: Staged = "taps"

    @property
    def patched(self) -> bool:
        """Whether a block's windows are a patch of the output."""
        return self.staged != "taps"

    def oriented(self, conv: Conv2d) -> str:
        """The axes for the problem's layout."""
        return lowered.oriented(self.axes, conv.layout) if self.axes else ""

    def source(self, conv: Conv2d) -> tuple[int, ...]:
        """Shape of the tensor that windows are taken from."""
        return lowered.shape(conv, self.oriented(conv)) if self.axes else conv.input_shape

    def strides(self, conv: Conv2d) -> Strides:
        """Where they lie in it."""
        return lowered.strides(conv, self.oriented(conv)) if self.axes else lowered.input_strides(conv)

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of that tensor, if it is not the input."""
        return lowered.transform_bytes(conv, self.oriented(conv)) if self.axes else 0

    def part(self, conv: Conv2d) -> tuple[Conv2d, int]:
        """The problem that one launch of the product computes, and how many launches there are."""
        return conv, 1
