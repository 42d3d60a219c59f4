"""Tiles of the CPU schedules that multiply windows: what all have, and that of windows times filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from im2win.common.caching import derived, hashed_once
from im2win.packing.cpu_blocked import FilterPack
from im2win.schedules.plain import PlainTile

ORDERS = ("cuv", "cvu", "uvc")
AXES = ("channels", "windows")
PADDING = ("multiplied", "skipped")
INPUTS = ("shared", "reloaded")
VECTORS = (1, 2, 4, 8, 16)  # possible numbers of float32 lanes of a vector


@dataclass(frozen=True)
class RegisterTile(PlainTile):
    """A register tile of channels and windows, and the block of output rows that it sweeps over.

    axis: what a vector holds: "channels" (one window, `lanes` output channels) or "windows" (one channel, `lanes` neighbouring windows).
    lanes: float32 elements of a vector.
    vectors: with axis "channels", vectors of channels in the register tile; with "windows", vectors of windows.
    rows, cols: with axis "channels", rows and columns of the register tile's windows; with "windows" `rows` output rows and `cols`
        channels.
    row_block: output rows of one parallel step, for every channel block of its pass. Staging is done once for them.
    pass_blocks: channel blocks that a parallel step computes. More reuse the input of a step more often, fewer reuse a filter block more
        often.
    """

    axis: str
    lanes: int
    vectors: int
    rows: int
    cols: int
    row_block: int
    pass_blocks: int

    @derived
    def block(self) -> int:
        """Output channels of a filter block."""
        return self.lanes * self.vectors if self.axis == "channels" else self.cols

    @derived
    def accumulators(self) -> int:
        """Vector registers for accumulators."""
        return self.rows * self.cols * self.vectors

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """The register tile: the tuner begins with one tile of each."""
        return self.axis, self.lanes, self.vectors, self.rows, self.cols

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        return {
            "windows": self.axis == "windows", "lanes": self.lanes, "vectors": self.vectors, "rows": self.rows, "cols": self.cols,
            "row_block": self.row_block,
        }  # fmt: skip


@hashed_once
@dataclass(frozen=True)
class Tile(RegisterTile):
    """The tile of windows times filters: with axis "channels" inputs are broadcast, with "windows" filters.

    order: loop order of the sum, outermost first: c channel, u kernel row, v kernel column. Filters are packed in it. With "uvc", for
        layers that leave out taps in the padding, a register tile asks once for all channels whether a tap lies inside the input.
    unroll: unrolled steps of the sum in the micro-kernel: the whole innermost kernel axis, or this many channels of a 1x1 filter and in
        the order "uvc".
    chunks: of input channels. The filters of one stay in level-2 cache while the register tile sweeps over the block of output rows, whose
        sums are kept beside the product.
    padding: whether taps that fall into the padding are "multiplied" or "skipped". To skip them, a register tile holds whole output rows:
        kernel columns are left out window by window without a branch, and kernel rows by one branch of the whole tile.
    inputs: whether inputs that several K steps read are kept in registers ("shared", if the compiler sees it) or loaded by every step
        ("reloaded").
    """

    LATER: ClassVar[tuple[str, ...]] = ("chunks", "padding", "inputs")

    order: str
    unroll: int
    chunks: int = 1
    padding: str = "multiplied"
    inputs: str = "shared"

    @derived
    def pack(self) -> FilterPack:
        """The packing of filters for this tile."""
        return FilterPack(self.block, self.order)  # type: ignore[arg-type]

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        return {
            **super().features(), "cvu": self.order == "cvu", "uvc": self.order == "uvc", "unroll": self.unroll, "chunks": self.chunks,
            "skipped": self.padding == "skipped", "reloaded": self.inputs == "reloaded",
        }  # fmt: skip
