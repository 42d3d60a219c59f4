"""The tile of the schedules of dot products on CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from im2win.common.caching import derived, hashed_once
from im2win.packing.cpu_dot import DotPack
from im2win.schedules.cpu_dot.instructions import INSTRUCTIONS
from im2win.schedules.plain import PlainTile
from im2win.spec.conv2d import Conv2d

AXES = ("channels", "windows", "depthwise")
WORDS = ("stored", "shuffled")


def axis_of(conv: Conv2d) -> str:
    """What the vectors of a problem hold: what lies side by side in its layout."""
    if conv.layout == "NCHW":
        return "windows"
    return "depthwise" if conv.depthwise and conv.out_channels == conv.groups else "channels"


@hashed_once
@dataclass(frozen=True)
class DotTile(PlainTile):
    """A register tile of channels and windows, or one of AMX tiles.

    instruction: a name of the table in `instructions`. group: elements of its words.
    axis: what a vector holds: "channels" (one window, `lanes` output channels), "windows" (one channel, `lanes` neighbouring windows) or
        "depthwise" (one window, `lanes` channels of different groups).
    lanes: words of a vector.
    vectors: vectors of the register tile along its axis; with AMX, tiles.
    cols: windows of the register tile, or its channels with axis "windows"; with AMX, tiles of `rows` of them.
    rows: rows of an AMX tile; 1 for vectors.
    row_block: output rows of one parallel step, whose input is copied once.
    pass_blocks: channel blocks that a parallel step computes: a part of a group's, or those of several whole groups.
    along: what a word has neighbouring elements of: "channels", or kernel "columns" with axis "windows"; "taps": channels, copied for each
        tap.
    words: whether words of columns are "stored" in the copy, or "shuffled" out of a copy of padded rows as vectors are multiplied.
    """

    LATER: ClassVar[tuple[str, ...]] = ("along", "words")

    instruction: str
    group: int
    axis: str
    lanes: int
    vectors: int
    cols: int
    rows: int
    row_block: int
    pass_blocks: int
    along: str = "channels"
    words: str = "stored"

    @derived
    def block(self) -> int:
        """Output channels of a filter block."""
        return self.cols * self.rows if self.axis == "windows" else self.lanes * self.vectors

    @derived
    def windows(self) -> int:
        """Windows of the register tile."""
        return self.lanes * self.vectors if self.axis == "windows" else self.cols * self.rows

    @derived
    def accumulators(self) -> int:
        """Registers for accumulators: vectors, or AMX tiles."""
        return self.cols * self.vectors

    @derived
    def pack(self) -> DotPack:
        """The packing of filters for this tile."""
        shift = next((one.shift for one in INSTRUCTIONS if one.name == self.instruction and one.group == self.group), 0)
        order = "lines" if self.instruction == "amx" and self.axis == "windows" else "steps"
        return DotPack(self.block, self.group, shift, order, int(self.axis == "depthwise"), self.along)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """The register tile: the tuner begins with one tile of each."""
        return self.instruction, self.axis, self.lanes, self.vectors, self.cols, self.rows, self.along, self.words

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        return {
            "windows": self.axis == "windows", "lanes": self.lanes, "vectors": self.vectors, "rows": self.rows, "cols": self.cols,
            "row_block": self.row_block, "columns": self.along == "columns", "shuffled": self.words == "shuffled",
        }  # fmt: skip
