"""The tile of the depthwise schedule on CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.packing.cpu_channels import ChannelPack
from im2win.schedules.plain import PlainTile
from im2win.spec.conv2d import Conv2d

AXES = ("channels", "windows")


@dataclass(frozen=True)
class DepthwiseTile(PlainTile):
    """What a vector holds, the register tile, and the block of output rows that a parallel step computes.

    axis: what a vector holds: "channels" (one window, `lanes` channels of different groups) or "windows" (one channel, `lanes`
        neighbouring windows).
    lanes: float32 elements of a vector.
    vectors: vectors of channels, or with axis "windows" vectors of windows, in the register tile.
    rows, cols: output rows of the register tile, and with axis "channels" its output columns; with "windows" `cols` is 1.
    row_block: output rows of a parallel step, for every channel block of its pass.
    pass_blocks: channel blocks that a parallel step computes.
    """

    axis: str
    lanes: int
    vectors: int
    rows: int
    cols: int
    row_block: int
    pass_blocks: int

    @property
    def block(self) -> int:
        """Output channels of a filter block."""
        return self.lanes * self.vectors if self.axis == "channels" else 1

    @property
    def pack(self) -> ChannelPack:
        """The packing of filters for this tile."""
        return ChannelPack(self.block)

    @property
    def accumulators(self) -> int:
        """Vector registers for accumulators."""
        return self.rows * self.cols * self.vectors

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """The register tile: the tuner begins with one tile of each."""
        return "depthwise", self.axis, self.lanes, self.vectors, self.rows, self.cols

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        return {
            "windows": self.axis == "windows", "lanes": self.lanes, "vectors": self.vectors, "rows": self.rows, "cols": self.cols,
            "row_block": self.row_block,
        }  # fmt: skip


def in_place(conv: Conv2d, tile: DepthwiseTile) -> bool:
    """Whether vectors are read from the input, which needs no copy then: channels side by side, each with one filter."""
    return tile.axis == "channels" and conv.layout == "NHWC" and conv.out_channels == conv.groups
