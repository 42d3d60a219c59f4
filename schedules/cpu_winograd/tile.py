"""The numbers of a Winograd schedule on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from im2win.packing.winograd import WinogradPack
from im2win.schedules.plain import PlainTile


@dataclass(frozen=True)
class WinogradTile(PlainTile):
    """The form F(m x m, kernel), the strip of tiles that a parallel step transforms, and the register tile that multiplies it.

    outputs: m.
    depth: input channels in a vector of the input transform; a group's are filled up with zeros to whole vectors.
    lanes: output channels in a vector of the product and of the output transform.
    vectors, cols: of the register tile: vectors of output channels, and tiles of the strip.
    strip: rows of tiles that a parallel step computes.
    images: of so many images; more than one where a strip is a whole image.
    pass_blocks: channel blocks computed per strip before the next strip; each pass transforms the input once more.
    unroll: input channels unrolled in the micro-kernel.
    """

    outputs: int
    depth: int
    lanes: int
    vectors: int
    cols: int
    strip: int
    images: int
    pass_blocks: int
    unroll: int

    @property
    def block(self) -> int:
        """Output channels of a filter block."""
        return self.lanes * self.vectors

    @property
    def pack(self) -> WinogradPack:
        """How filters are transformed and packed for this tile."""
        return WinogradPack(self.outputs, self.block, "bijck", self.depth)

    @property
    def accumulators(self) -> int:
        """Vector registers that hold sums."""
        return self.cols * self.vectors

    # What `schedules.cpu.tile.Tile` calls these, for whoever compares tiles of all algorithms.

    @property
    def axis(self) -> str:
        """What a vector of sums holds."""
        return "channels"

    @property
    def rows(self) -> int:
        """Rows of the register tile: tiles of a strip lie in one line."""
        return 1

    @property
    def order(self) -> str:
        """The order of the sum."""
        return "cuv"
