"""Filter packing of Winograd kernels in int8 (numpy only, no compiler).

Filters are transformed and quantised ahead of time; see `numerics.winograd_int8`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.numerics.winograd_int8 import SCALES, STEP, quantised
from im2win.packing.winograd import transformed
from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class QuantisedPack:
    """Quantised filters of a problem of one group; behind those of each block are the factors of its products.

    A block is [t * t positions, `block` output channels, input channels] of int8, and then [`block`] of float32: STEP times the scale, as
    bytes in the machine's order.

    Attributes:
        outputs: m of F(m x m, kernel).
        block: output channels of a block; channels that do not fill the last one are zero filters with the scale 0.
        channels: input channels are padded with zeros to a multiple of this.
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
        """Input channels, padded."""
        return -(-conv.in_channels // self.channels) * self.channels

    def values(self, conv: Conv2d) -> int:
        """Filter elements of a block, which are also the bytes before its scales."""
        return self.positions(conv) * self.block * self.depth(conv)

    def shape(self, conv: Conv2d) -> tuple[int, int]:
        """Shape of the packed filters: (blocks, bytes)."""
        return self.blocks(conv), self.values(conv) + 4 * self.block

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """Transforms, quantises and packs filters of `conv.filter_shape` into `shape(conv)`, int8, contiguous.

        Raises:
            ValueError: filters of another type than int8.
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
