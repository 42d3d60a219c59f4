"""Sources of windows: which tensor a CUDA kernel reads windows from, and how it stages them in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from im2win.common.caching import hashed_once
from im2win.compute import lowered
from im2win.compute.lowered import Strides
from im2win.spec.conv2d import Conv2d

Staged = Literal["taps", "rows", "windows"]


@hashed_once
@dataclass(frozen=True)
class WindowSource:
    """The tensor that windows are read from, and the form in which shared memory holds them.

    axes: axes of the tensor that a transform kernel stores first, see `compute.lowered`; "" reads windows from the input itself.
    staged: "taps" copies every tap of every window by itself; "rows" copies the halo tile of a tile of outputs, once for all taps;
        "windows" stores the same halo tile in the order of im2win, so that a window is one contiguous run.
    """

    axes: str = ""
    staged: Staged = "taps"

    @property
    def halo(self) -> bool:
        """Whether a thread block computes a tile of outputs (rows x cols) and stages its halo tile."""
        return self.staged != "taps"

    def oriented(self, conv: Conv2d) -> str:
        """The axes for the problem's layout; "" where windows are read from the input."""
        return lowered.oriented(self.axes, conv.layout) if self.axes else ""

    def source(self, conv: Conv2d) -> tuple[int, ...]:
        """Shape of the tensor that windows are read from."""
        return lowered.shape(conv, self.oriented(conv)) if self.axes else conv.input_shape

    def strides(self, conv: Conv2d) -> Strides:
        """Strides of windows and taps in that tensor, in elements."""
        return lowered.strides(conv, self.oriented(conv)) if self.axes else lowered.input_strides(conv)

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the stored tensor; 0 where windows are read from the input."""
        return lowered.transform_bytes(conv, self.oriented(conv)) if self.axes else 0

    def part(self, conv: Conv2d) -> tuple[Conv2d, int]:
        """(the problem that one launch of the product computes, number of launches)."""
        return conv, 1
