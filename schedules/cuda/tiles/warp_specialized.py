"""The tile of the warp-specialized kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from im2win.common.caching import derived, hashed_once
from im2win.packing.wgmma_smem import ChunkPack
from im2win.packing.window_rows import WindowRowPack
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.persistent import LANES, PersistentTile, channel_run
from im2win.spec.conv2d import Conv2d

WARP = 32  # threads of a warp
REARRANGERS = 2  # warps that rearrange windows
LINE = 64  # pixels of a channel that lie side by side in a stage, 128 bytes


@hashed_once
@dataclass(frozen=True)
class WarpSpecializedTile(PersistentTile):
    """Output channels of a tile of outputs, which consumer warpgroups compute from filters and windows that producer warps copy.

    product: the kind of arithmetic of a warpgroup: "wg_f16", "wg_bf16" or "wg_s8".
    block_m: output channels of a thread block, divided among the warpgroups that compute a tile.
    images, rows, cols: images, rows and columns of a tile of outputs; several images only if the tile covers each of them.
    slabs: number of 64-byte slabs of every input pixel that one step copies to shared memory, for all taps.
    stages: pipeline stages of windows, and of the TMA boxes that they are rearranged from.
    taps: taps whose filters, for the channels of a step, one copy brings.
    filter_stages: pipeline stages of filters.
    groups: consumer warpgroups that compute a tile together, each a part of the channels.
    pingpong: number of such teams of `groups` warpgroups; with more than one they are ping-pong consumers: while one is in its epilogue,
        the next one multiplies.
    cluster: thread blocks of a cluster.
    shared: what the blocks of a cluster share. "windows": they compute neighbouring channels of one tile of outputs, and each copies a part
        of its halo tile for all. "filters": they compute neighbouring tiles with the same channels, and each copies a part of the filters
        for all. "accumulators": they compute the same outputs, each for its part of the steps.
    tma_boxes: what the TMA boxes of a step bring. "halo": the halo tile, whose pixels several taps read. "taps": TMA im2col-style loads of
        what one tap reads, a pixel for every output, so that no column of a product lies between outputs. "rearranged", channels first:
        pixels of each channel as they lie in memory, from which two more producer warps gather the channels of every pixel. "lines",
        channels first, 1x1 kernels: pixels of each channel as they lie in memory, of which products take 64 of each channel as they are.
        "copied": the same from a copy, which a first kernel makes of the pixels that windows read; see `tiles.copied_lines`.
        "channels_last" and "channels_last_taps", channels first: "halo" and "taps" from a channels-last copy, which a first kernel
        makes; see `tiles.copied_pixels`. "window_rows", few input channels: the halo tile of a problem whose pixels are rows of windows,
        from a copy; see `tiles.window_rows`.
    """

    LATER: ClassVar[tuple[str, ...]] = (("shared", "tma_boxes"))

    cluster: int = 1
    images: int = 1
    taps: int = 1
    filter_stages: int = 2
    pingpong: int = 1
    shared: str = "windows"
    tma_boxes: str = "halo"

    def pack(self, conv: Conv2d) -> ChunkPack:
        """The packing of filters."""
        if self.window_rows:
            return WindowRowPack(self.block_m, self.slabs, channel_run(conv))
        phases = channel_phases(conv) if conv.layout == "NCHW" and not self.copied and not self.channels_last else 1
        return ChunkPack(self.block_m, self.slabs, channel_run(conv), phases)

    def steps(self, conv: Conv2d) -> int:
        """Steps of a tile of outputs: one for each block of channels, and for each tap where `single_taps`."""
        return self.pack(conv).steps(conv) * (math.prod(conv.kernel) if self.single_taps else 1)

    @property
    def window_blocks(self) -> int:
        """Blocks of a cluster that copy windows for each other."""
        return self.cluster if self.shared == "windows" else 1

    @property
    def filter_blocks(self) -> int:
        """Blocks of a cluster that copy filters for each other."""
        return self.cluster if self.shared == "filters" else 1

    @property
    def sum_blocks(self) -> int:  # type: ignore[override]
        """Blocks of a cluster that compute the same outputs."""
        return self.cluster if self.shared == "accumulators" else 1

    @derived
    def multipliers(self) -> int:
        """Consumer threads of a block. The producer threads follow them."""
        return LANES * self.groups * self.pingpong

    @derived
    def exchanges(self) -> bool:
        """Whether the producers are a warpgroup that releases registers to the consumers (`setmaxnreg`).

        True with more than one consumer warpgroup: a thread's equal share of registers would be too small.
        """
        return self.multipliers > LANES

    @property
    def rearranged(self) -> bool:
        """Whether producer warps rearrange windows, with channels first."""
        return self.tma_boxes == "rearranged"

    @derived
    def rearrangers(self) -> int:
        """Warps that rearrange a step together, where `rearranged`: all of them, or one where they take steps in turn.

        In turn each has stages of its own, since a thread that does not see every phase of a barrier cannot tell them apart; with one stage
        each, neither could rearrange while consumers multiply.
        """
        return 1 if self.stages % REARRANGERS == 0 and self.stages > REARRANGERS else REARRANGERS

    @property
    def slab_counts(self) -> tuple[int, ...]:  # type: ignore[override]
        """Values of `slabs` that the loader has."""
        return (1, 2, 4) if self.lines else (1, 2)

    @property
    def lines(self) -> bool:
        """Whether products take pixels of each channel as they lie in memory."""
        return self.tma_boxes in ("lines", "copied")

    @property
    def copied(self) -> bool:
        """Whether a first kernel copies the pixels that windows read."""
        return self.tma_boxes == "copied"

    @property
    def channels_last(self) -> bool:
        """Whether a first kernel copies the input to channels last."""
        return self.tma_boxes.startswith("channels_last")

    @property
    def window_rows(self) -> bool:
        """Whether pixels are rows of windows, in a copy that a first kernel makes."""
        return self.tma_boxes == "window_rows"

    @property
    def single_taps(self) -> bool:
        """Whether TMA boxes bring what one tap reads."""
        return self.tma_boxes.endswith("taps")

    @derived
    def threads(self) -> int:
        """Threads of a block: the consumers, and producers of which two warps copy, one windows and one filters, and two may rearrange."""
        return self.multipliers + (LANES if self.exchanges else (2 + REARRANGERS * self.rearranged) * WARP)

    @property
    def block_n(self) -> int:
        """Outputs of a tile."""
        return self.warp_n

    @derived
    def warp_m(self) -> int:
        """Channels of a warpgroup."""
        return self.block_m // self.groups

    @derived
    def warp_n(self) -> int:
        """Outputs of a tile."""
        return self.images * self.rows * self.cols

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread that are outputs. Columns between the rows of a halo tile do not count."""
        return -(-self.warp_m * self.warp_n // LANES)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys count as alike; the tuner's first population takes one of them."""
        return self.block_m, self.groups, self.pingpong, -(-self.warp_n // 64), self.filter_blocks > 1, self.sum_blocks, self.tma_boxes

    def features(self) -> dict[str, float]:
        """Numerical features of a tile, for the tuner's cost model."""
        more = {"images": self.images, "pingpong": self.pingpong, "taps": self.taps, "filter_stages": self.filter_stages}
        return super().features() | more | {"cluster": self.cluster, "filter_blocks": self.filter_blocks}


def channel_phases(conv: Conv2d) -> int:
    """Least number of channels, with channels first, that together are a multiple of 16 bytes."""
    return CHUNK // math.gcd(conv.height * conv.width * conv.itemsize, CHUNK)
