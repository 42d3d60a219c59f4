"""The numbers of a CPU schedule."""

from __future__ import annotations

from dataclasses import dataclass

from im2win.packing.cpu_blocked import FilterPack
from im2win.schedules.plain import PlainTile

ORDERS = ("cuv", "cvu")
AXES = ("channels", "windows")
VECTORS = (1, 2, 4, 8, 16)  # float32 lanes a vector may have


@dataclass(frozen=True)
class Tile(PlainTile):
    """A register tile, the strip of output rows it sweeps, and the order of the sums.

    axis: what a vector holds: "channels" (one window, `lanes` output channels; inputs are broadcast) or "windows" (one channel, `lanes`
        neighbouring windows; filters are broadcast).
    lanes: float32 elements of a vector.
    vectors: on the channels axis, vectors of channels in the register tile; on the windows axis, vectors of windows.
    rows, cols: on the channels axis, the windows of the register tile; on the windows axis `rows` output rows and `cols` channels.
    strip: output rows that one parallel step computes (for every channel block of its pass); what is staged is staged per strip.
    pass_blocks: channel blocks computed per strip before the next strip: the larger, the more often an input strip is reused; the smaller,
        the more often a filter block is.
    order: the order of the sum, outermost first: c channel, u kernel row, v kernel column. Filters are packed in it.
    unroll: steps of the sum unrolled in the micro-kernel (the innermost kernel axis as a whole, or this many channels of a 1x1 filter).
    """

    axis: str
    lanes: int
    vectors: int
    rows: int
    cols: int
    strip: int
    pass_blocks: int
    order: str
    unroll: int

    @property
    def block(self) -> int:
        """Output channels of a filter block."""
        return self.lanes * self.vectors if self.axis == "channels" else self.cols

    @property
    def pack(self) -> FilterPack:
        """How filters are packed for this tile."""
        return FilterPack(self.block, self.order)  # type: ignore[arg-type]

    @property
    def accumulators(self) -> int:
        """Vector registers that hold sums."""
        return self.rows * self.cols * self.vectors
