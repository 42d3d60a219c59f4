"""Filter packing of depthwise CPU kernels: blocks of output channels of different groups (numpy only, no compiler)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.packing.cpu_blocked import FilterPack
from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ChannelPack:
    """Filters of a depthwise layer as [channel blocks, kernel_h * kernel_w, block]: a tap of `block` output channels is a contiguous run.

    A group of such a layer has one input channel. Blocks run over the output channels of all groups, so that vectors are full although
    groups are not. The last block is padded with zero filters.
    """

    block: int

    @staticmethod
    def single_group(conv: Conv2d) -> Conv2d:
        """The layer of one group and one input channel that has the same filters in memory: its `FilterPack` packs them as this does."""
        return conv.with_(in_channels=1, groups=1)

    def blocks(self, conv: Conv2d) -> int:
        """Channel blocks of the layer."""
        return -(-conv.out_channels // self.block)

    def shape(self, conv: Conv2d) -> tuple[int, int, int]:
        """Shape of the packed filter: (blocks, kernel_h * kernel_w, block)."""
        kernel_h, kernel_w = conv.kernel
        return self.blocks(conv), kernel_h * kernel_w, self.block

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """Packs filters of `conv.filter_shape` into `shape(conv)`, contiguous."""
        return FilterPack(self.block).filter(self.single_group(conv), w)

    def bias(self, conv: Conv2d, bias: Array) -> Array:
        """Packs a bias of [out_channels] into [blocks, block], contiguous."""
        padded = np.pad(bias, (0, self.blocks(conv) * self.block - conv.out_channels))
        return np.ascontiguousarray(padded.reshape(self.blocks(conv), self.block))
