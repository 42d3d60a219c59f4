"""Filters of Winograd's form in int8, transformed and quantised ahead of time, and the arithmetic they are for (numpy only, no compiler).

    V = B^T d B                                                               exact integers, at most STEP times as large as inputs
    v = V / STEP, to the nearest, ties to even, at most 127                   int8; the scale STEP is that of the tensor
    u[k] = (G g[k] G^T) / s[k], to the nearest                                int8; s[k] is the channel's largest magnitude / 127
    Y[k] = STEP s[k] (A^T [sum over channels of v u[k]] A), to the nearest    in int32 up to the scale, which is float32

Nothing overflows, whatever the input: V is from -512 to 510, so that v is from -128 to 128, of which the last is cut off at 127; sums of
14000 channels fit int32, as those of the convolution do. Ties to even leave no bias where inputs have none or are positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.packing.winograd import transformed
from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]

FORMS = {3: (2,)}
"""By taps of the kernel: m of the forms that are accurate enough. The inputs of F(4x4, 3x3) grow by up to 32.3, of which int8 keeps little:
outputs would be off by a fifth of the largest (`reports.winograd_error.quantised_table`)."""
STEP = 4  # of V that one of v stands for: the most by which B^T d B of F(2x2, 3x3) grows
LARGEST = 127
SCALES = ("tensor", "channel", "position")
"""What has a scale of its own: all filters; those of an output channel; those of an output channel at one position of the tile, which gains
next to nothing, and would leave no sum behind the products an integer: it is measured, and not offered."""


def quantised(form: Array, scales: str) -> tuple[Array, Array]:
    """Transformed filters [out_channels, channels, t, t] as int8, and float32 scales [out_channels, t, t]; zeros have the scale 0.

    Raises:
        ValueError: `scales` is none of `SCALES`.
    """
    if scales not in SCALES:
        raise ValueError(f"quantised: `scales` (={scales!r}) must be one of {', '.join(SCALES)}.")
    over: dict[str, tuple[int, ...]] = {"tensor": (0, 1, 2, 3), "channel": (1, 2, 3), "position": (1,)}
    scale = (np.abs(form).max(axis=over[scales], keepdims=True) / LARGEST).astype(np.float32)
    whole = np.rint(form / np.where(scale == 0, 1, scale).astype(np.float64))
    values = np.clip(whole, -LARGEST, LARGEST).astype(np.int8)
    return values, np.broadcast_to(scale[:, 0], (len(form), *form.shape[2:])).astype(np.float32)


@dataclass(frozen=True)
class QuantisedPack:
    """Quantised filters of a problem of one group and, behind those of each block, what their products are multiplied by.

    A block is [t * t positions, `block` output channels, input channels] of int8, and then [`block`] of float32: STEP times the scale, as
    bytes in the order of the machine.

    outputs: m of F(m x m, kernel).
    block: output channels of a block; channels that do not fill the last one are zero filters with the scale 0.
    channels: input channels are filled up with zeros to a multiple of this.
    scales: "tensor" or "channel", see `SCALES`.
    """

    outputs: int
    block: int
    channels: int
    scales: str = "channel"

    def __post_init__(self) -> None:
        for name in ("outputs", "block", "channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"QuantisedPack: `{name}` (={getattr(self, name)}) must be at least 1.")
        if self.scales not in SCALES[:2]:
            raise ValueError(f"QuantisedPack: `scales` (={self.scales!r}) must be one of {', '.join(SCALES[:2])}.")
        if self.block * self.channels % 4:
            raise ValueError(f"QuantisedPack: `block` (={self.block}) times `channels` (={self.channels}) must be a multiple of 4.")

    def positions(self, conv: Conv2d) -> int:
        """Products of a tile, t * t."""
        return (self.outputs + conv.kernel[0] - 1) * (self.outputs + conv.kernel[1] - 1)

    def blocks(self, conv: Conv2d) -> int:
        """Channel blocks."""
        return -(-conv.out_channels // self.block)

    def depth(self, conv: Conv2d) -> int:
        """Input channels, filled up."""
        return -(-conv.in_channels // self.channels) * self.channels

    def values(self, conv: Conv2d) -> int:
        """Filter elements of a block: the bytes before its scales."""
        return self.positions(conv) * self.block * self.depth(conv)

    def shape(self, conv: Conv2d) -> tuple[int, int]:
        """Shape of the packed filters: (blocks, bytes)."""
        return self.blocks(conv), self.values(conv) + 4 * self.block

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """Transforms, quantises and packs filters of `conv.filter_shape` into `shape(conv)`, int8, contiguous.

        Raises:
            ValueError: filters that are no int8.
        """
        if w.dtype != np.int8:
            raise ValueError(f"`w` has dtype {w.dtype}; quantised filters are made of int8.")
        values, scale = quantised(transformed(conv, w, self.outputs), self.scales)
        fill = (0, self.blocks(conv) * self.block - conv.out_channels)
        blocked = np.pad(values, (fill, (0, self.depth(conv) - values.shape[1]), (0, 0), (0, 0)))
        blocked = blocked.reshape(self.blocks(conv), self.block, *blocked.shape[1:]).transpose(0, 3, 4, 1, 2)
        factors = np.pad(STEP * scale[:, 0, 0], fill).astype(np.float32)
        behind = factors.reshape(self.blocks(conv), self.block).view(np.int8)
        return np.ascontiguousarray(np.concatenate([blocked.reshape(self.blocks(conv), -1), behind], axis=1))
