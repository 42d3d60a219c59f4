"""Filter packing of wgmma kernels that read filters and windows from shared memory (numpy only, no compiler)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.packing.mma_fragments import row
from im2win.spec.conv2d import Conv2d

CHUNK, SLAB = 16, 64  # bytes of neighbouring channels in a chunk, and in the smallest step


@dataclass(frozen=True)
class ChunkPack:
    """Filters as [channel blocks, steps * taps, 16-byte units of a step * block * 16 bytes].

    A step takes `slabs` * 64 bytes of input channels, for all taps. Channels are padded with zeros to whole steps. Each tap stores the
    first 16 bytes of each of the block's output channels (eight rows in 128 bytes, as wgmma requires), then the next 16 bytes.

    With several groups a block holds the filters of whole groups, or a part of one group's. Its steps take the input channels of all its
    groups; filters are zero at those of another group than their own.

    Attributes:
        block: output channels of a block, padded with zero filters.
        run: neighbouring channels that a thread holds; `packing.mma_fragments.row` maps rows to channels.
        phases: 16 bytes have every `phases`-th input channel of `phases` times as many; the next 16 bytes begin one channel later.
    """

    block: int
    slabs: int
    run: int = 1
    phases: int = 1

    def blocks(self, conv: Conv2d) -> int:
        """Number of channel blocks."""
        return -(-conv.out_channels // self.block)

    def groups(self, conv: Conv2d) -> int:
        """Groups whose filters a block holds, all of each; 1 where it holds filters of one group."""
        return min(max(self.block * conv.groups // conv.out_channels, 1), conv.groups)

    def whole(self, conv: Conv2d) -> bool:
        """Whether blocks can be cut between groups, or each group into whole blocks."""
        each = conv.out_channels // conv.groups
        return conv.groups == 1 or self.block >= conv.out_channels or self.block % each == 0 or each % self.block == 0

    def channels(self, conv: Conv2d) -> int:
        """Input channels of a block, those of all its groups."""
        return self.groups(conv) * conv.filter_shape[1]

    def first_channel(self, conv: Conv2d, block: Any) -> Any:
        """The first input channel of a block, given by its number or an expression for it."""
        if conv.groups == 1:
            return 0
        return block * self.block // (conv.out_channels // conv.groups) * conv.filter_shape[1]

    def step(self, conv: Conv2d) -> int:
        """Input channels of a step."""
        return self.slabs * SLAB // conv.itemsize

    def order(self, conv: Conv2d) -> list[int]:
        """The input channels of a step in the order in which they are stored."""
        unit = CHUNK // conv.itemsize
        runs = range(0, self.step(conv), unit * self.phases)
        return [first + phase + i * self.phases for first in runs for phase in range(self.phases) for i in range(unit)]

    def steps(self, conv: Conv2d) -> int:
        """Number of steps of the sum."""
        return -(-self.channels(conv) // self.step(conv))

    def shape(self, conv: Conv2d) -> tuple[int, int, int]:
        """Shape of the packed filter, in elements."""
        return self.blocks(conv), self.steps(conv) * math.prod(conv.kernel), self.block * self.step(conv)

    def filter(self, conv: Conv2d, w: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Packs filters of `conv.filter_shape` into `shape(conv)`, contiguous."""
        blocks, steps, unit = self.blocks(conv), self.steps(conv), CHUNK // conv.itemsize
        fill = (blocks * self.block - conv.out_channels, steps * self.step(conv) - self.channels(conv))
        whole = np.pad(self._spread(conv, w), ((0, fill[0]), (0, fill[1]), (0, 0), (0, 0)))
        order, taps = [row(place // 16, place % 16, self.run) for place in range(self.block)], math.prod(conv.kernel)
        inner = whole.reshape(blocks, self.block, steps, -1, taps)[:, order][:, :, :, self.order(conv)]
        laid = inner.reshape(blocks, self.block, steps, -1, unit, taps).transpose(0, 2, 5, 3, 1, 4)
        return np.ascontiguousarray(laid).reshape(self.shape(conv))

    def _spread(self, conv: Conv2d, w: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Filters with the input channels of all groups of their block, zero at those of other groups."""
        groups, channels = self.groups(conv), np.arange(conv.out_channels)
        if groups == 1:
            return w
        wide = np.zeros((conv.out_channels, groups, *w.shape[1:]), w.dtype)
        wide[channels, channels * conv.groups // conv.out_channels % groups] = w
        return wide.reshape(conv.out_channels, self.channels(conv), *conv.kernel)
