"""Filter packing of CPU kernels: blocks of output channels, computed ahead of time (numpy only, no compiler)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from im2win.spec.conv2d import Conv2d

TapOrder = Literal["cuv", "cvu", "uvc"]  # c: input channel, u: kernel row, v: kernel column; the last one is innermost

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FilterPack:
    """Filters as [channel blocks, K, block]: one K step of one block is a contiguous run of `block` output channels.

    K = in_channels / groups * kernel_h * kernel_w runs over the taps in `order`: "cuv" (channel, row, column); "cvu", the order of an
    im2win window (channel, column, row); or "uvc" (row, column, channel), in which the channels of a tap follow one another. Channels that
    do not fill a group's last block are padded with zero filters.
    """

    block: int
    order: TapOrder = "cuv"

    def blocks_per_group(self, conv: Conv2d) -> int:
        """Channel blocks that hold one group's filters."""
        return -(-(conv.out_channels // conv.groups) // self.block)

    def blocks(self, conv: Conv2d) -> int:
        """Channel blocks of all groups."""
        return conv.groups * self.blocks_per_group(conv)

    def shape(self, conv: Conv2d) -> tuple[int, int, int]:
        """Shape of the packed filter: (blocks, K, block)."""
        _, channels, kernel_h, kernel_w = conv.filter_shape
        return self.blocks(conv), channels * kernel_h * kernel_w, self.block

    def place(self, conv: Conv2d, block: Any, k: Any, channel: Any) -> tuple[Any, Any, Any]:
        """Where element `k` of the sum of a channel of a block is."""
        return block, k, channel

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """Packs filters of `conv.filter_shape` into `shape(conv)`, contiguous."""
        groups, per_group = conv.groups, conv.out_channels // conv.groups
        taps = w.transpose(0, *("_cuv".index(axis) for axis in self.order))
        flat = taps.reshape(groups, per_group, -1)
        padded = self.blocks_per_group(conv) * self.block
        if padded != per_group:
            flat = np.pad(flat, ((0, 0), (0, padded - per_group), (0, 0)))
        blocked = flat.reshape(self.blocks(conv), self.block, -1)
        return np.ascontiguousarray(blocked.transpose(0, 2, 1))

    def bias(self, conv: Conv2d, bias: Array) -> Array:
        """Packs a bias of [out_channels] into [blocks, block], contiguous."""
        groups, per_group = conv.groups, conv.out_channels // conv.groups
        padded = self.blocks_per_group(conv) * self.block
        wide = np.pad(bias.reshape(groups, per_group), ((0, 0), (0, padded - per_group)))
        return np.ascontiguousarray(wide.reshape(self.blocks(conv), self.block))
