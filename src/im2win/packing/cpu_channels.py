"""Filter packing of depthwise CPU kernels: blocks of output channels of different groups (numpy only, no compiler)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from im2win.packing.cpu_blocked import FilterPack
from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ChannelPack:
    """Filters of a depthwise layer as [channel blocks, kernel_h * kernel_w, run]: a tap of neighbouring output channels is contiguous.

    A group of such a layer has one input channel. Blocks run over the output channels of all groups, so that vectors are full although
    groups are not. A run is a block of `block` channels where blocks divide the channels, and otherwise all channels: the last block of a
    kernel then overlaps the one before, and nothing is padded.
    """

    block: int

    @staticmethod
    def single_group(conv: Conv2d) -> Conv2d:
        """The layer of one group and one input channel that has the same filters in memory, and the same outputs."""
        return conv.with_(in_channels=1, groups=1)

    def filters(self, conv: Conv2d) -> FilterPack:
        """The packing that does the same for `single_group`."""
        return FilterPack(conv.out_channels if conv.out_channels % self.block else self.block)

    def blocks(self, conv: Conv2d) -> int:
        """Runs of the layer's channels."""
        return self.filters(conv).blocks(self.single_group(conv))

    def shape(self, conv: Conv2d) -> tuple[int, int, int]:
        """Shape of the packed filter: (runs, kernel_h * kernel_w, channels of a run)."""
        return self.filters(conv).shape(self.single_group(conv))

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """Packs filters of `conv.filter_shape` into `shape(conv)`, contiguous."""
        return self.filters(conv).filter(self.single_group(conv), w)

    def bias(self, conv: Conv2d, bias: Array) -> Array:
        """Packs a bias of [out_channels] into [runs, channels of a run], contiguous."""
        return self.filters(conv).bias(self.single_group(conv), bias)
