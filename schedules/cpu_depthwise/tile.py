"""The tile of the depthwise schedule on CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.packing.cpu_channels import ChannelPack
from im2win.schedules.plain import PlainTile

AXES = ("channels", "windows")
STAGES = ("rows", "none")


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
    stage: "rows" copies the padded input rows of a parallel step and channel block into the order of the vectors; "none" reads vectors of
        channels from the input.
    """

    axis: str
    lanes: int
    vectors: int
    rows: int
    cols: int
    row_block: int
    pass_blocks: int
    stage: str

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
        return "depthwise", self.axis, self.lanes, self.vectors, self.rows, self.cols, self.stage

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        return {
            "windows": self.axis == "windows", "lanes": self.lanes, "vectors": self.vectors, "rows": self.rows, "cols": self.cols,
            "row_block": self.row_block,
        }  # fmt: skip
