"""The tile of the Winograd schedule on CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.packing.winograd import WinogradPack
from im2win.schedules.plain import PlainTile


@dataclass(frozen=True)
class WinogradTile(PlainTile):
    """The form F(m x m, kernel), the row block of Winograd tiles that a parallel step transforms, and the register tile.

    outputs: m.
    depth: input channels in a vector of the input transform; a group's channels are padded with zeros to whole vectors.
    lanes: output channels in a vector of the product and of the output transform.
    vectors, cols: of the register tile: vectors of output channels, and Winograd tiles of the row block.
    row_block: rows of Winograd tiles of a parallel step.
    images: images of a parallel step; more than one only if a row block is a whole image.
    pass_blocks: channel blocks that a parallel step computes; each pass transforms the input once more.
    unroll: input channels unrolled in the micro-kernel.
    """

    outputs: int
    depth: int
    lanes: int
    vectors: int
    cols: int
    row_block: int
    images: int
    pass_blocks: int
    unroll: int

    @property
    def block(self) -> int:
        """Output channels of a filter block."""
        return self.lanes * self.vectors

    @property
    def pack(self) -> WinogradPack:
        """The transform and packing of filters for this tile."""
        return WinogradPack(self.outputs, self.block, "bijck", self.depth)

    @property
    def accumulators(self) -> int:
        """Vector registers for accumulators."""
        return self.cols * self.vectors

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """The register tile and the form: the tuner begins with one tile of each."""
        return "winograd", self.lanes, self.vectors, self.cols, self.outputs

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        return {
            "lanes": self.lanes, "vectors": self.vectors, "rows": 1, "cols": self.cols, "row_block": self.row_block, "unroll": self.unroll,
            "outputs": self.outputs,
        }  # fmt: skip
