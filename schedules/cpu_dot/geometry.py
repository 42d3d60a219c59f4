"""Where the input of a block of output rows lies in its copy, and how register tiles sweep over it.

The copy has words of neighbouring channels, and zeros around the input. Kernels of one row or column read only every stride-th row or
column, and only these are copied.

With axis "windows" it is [row phase][column phase][word of channels][row][column]: of a layer with stride s, the rows y with the same y % s
lie together, and so do columns. Neighbouring windows then read neighbouring words, and the windows of a row block are one line: those of
the next row follow behind the columns that only the last windows of a row read. A register tile may cross the end of a row. Sums at places
that are no window are dropped.

With axis "windows" and words along the kernel's columns it is [row][channel][word of columns][window]: a window's place holds what it
reads of the row, so that windows of any stride read neighbouring words, and all steps of the sum are at one distance. Every output row is
a line of its own, up to whole register tiles.

With axis "windows" and words along taps it is [tap][word of channels][window], copied out of what it is along channels: all windows of a
row block are one line without gaps, and every register tile begins at a cache line.

Where words of columns are shuffled out of rows, the copy is [channel][row][column] of elements. Lines are as before, but small maps of
stride 1 are one line, as if columns were words.

With the other axes it is [row][column][word]. The windows of a row block are one line in the same way if the stride is 1; else each output
row is a line of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from im2win.common.caching import derived
from im2win.packing.cpu_dot import chunk_of
from im2win.schedules.cpu_dot.tile import DotTile
from im2win.spec.conv2d import Conv2d

CACHE_LINE = 16  # words
SHUFFLED_BYTES = 64  # of a row, out of which words are shuffled


@dataclass(frozen=True)
class Geometry:
    """The copy and the lines of a problem's row block with a tile. Pairs are (rows, columns)."""

    conv: Conv2d
    tile: DotTile

    @derived
    def words(self) -> int:
        """Words of a copied pixel: those of a group's channels, or of a block's with axis "depthwise". Along columns, those of a window's
        row; along taps, of a window."""
        if self.repeated:
            return self.tile.pack.steps(self.conv)
        return self.tile.block if self.tile.axis == "depthwise" else self.tile.pack.words(self.conv)

    @derived
    def expanded(self) -> bool:
        """Whether the copy holds a window's words of columns, or of all taps, at its place."""
        return self.repeated or (self.tile.along == "columns" and not self.shuffled)

    @derived
    def repeated(self) -> bool:
        """Whether the copy holds the inputs of each tap."""
        return self.tile.along == "taps"

    @derived
    def once(self) -> Geometry:
        """The same without taps, out of which inputs are copied for each."""
        return Geometry(self.conv, replace(self.tile, along="channels"))

    @derived
    def shuffled(self) -> bool:
        """Whether the copy holds rows of elements, and vectors of words of columns are shuffled out of them."""
        return self.tile.words == "shuffled"

    @derived
    def steps(self) -> tuple[int, int]:
        """Distance of copied rows and columns in the input."""
        return tuple(s if k == 1 else 1 for s, k in zip(self.conv.stride, self.conv.kernel, strict=True))  # type: ignore[return-value]

    @derived
    def strides(self) -> tuple[int, int]:
        """Strides in the copy."""
        return tuple(s // step for s, step in zip(self.conv.stride, self.steps, strict=True))  # type: ignore[return-value]

    @derived
    def cycles(self) -> tuple[int, int]:
        """Rows and columns that are told apart by their phase: the strides with axis "windows", else 1."""
        return self.strides if self.tile.axis == "windows" and self.tile.along == "channels" else (1, 1)

    @derived
    def phases(self) -> tuple[int, int]:
        """Phases that taps read."""
        return tuple(c // math.gcd(d, c) for c, d in zip(self.cycles, self.conv.dilation, strict=True))  # type: ignore[return-value]

    def phase(self, axis: int, tap: Any) -> Any:
        """The place of a tap's phase among those that are copied."""
        cycle = self.cycles[axis]
        return tap * self.conv.dilation[axis] % cycle // (cycle // self.phases[axis]) if self.phases[axis] > 1 else 0

    def first(self, axis: int, place: int) -> int:
        """The first row or column, in the copy before it is parted, of the phase at a place."""
        return place * (self.cycles[axis] // self.phases[axis])

    def offset(self, axis: int, tap: Any) -> Any:
        """Rows or columns from a window to what a tap reads, inside its phase."""
        return tap * self.conv.dilation[axis] // self.cycles[axis] if self.cycles[axis] > 1 else tap * self.conv.dilation[axis]

    def tap(self, u: Any, v: Any, w: Any) -> Any:
        """Words of the copy from a window's first to what a tap reads of its word `w` of channels."""
        if self.repeated:
            return ((u * self.conv.kernel[1] + v) * self.once.words + w) * self.size[1]
        if self.expanded:
            return (self.offset(0, u) * self.words + w) * self.size[1]
        if self.shuffled:
            rows, cols = self.size
            of_row = -(-self.conv.kernel[1] // self.tile.group)  # words of a channel
            return (w // of_row * rows + self.offset(0, u)) * cols + w % of_row * self.tile.group
        inside = self.offset(0, u) * self.size[1] + self.offset(1, v)
        if self.tile.axis != "windows":
            return inside * self.words + (0 if self.tile.axis == "depthwise" else w)
        phase = self.phase(0, u) * self.phases[1] + self.phase(1, v)
        return (phase * self.words + w) * self.plane + inside

    @derived
    def size(self) -> tuple[int, int]:
        """Rows and columns of a phase of the copy."""
        outputs = self.tile.row_block, self.conv.output_size[1]
        if self.repeated:  # with what the last row's vectors write beyond it, and an odd number of cache lines
            places = max(self.tiles * self.tile.windows, self.line + CACHE_LINE - 1)
            return 1, (-(-places // CACHE_LINE) | 1) * CACHE_LINE
        if self.expanded:
            return (outputs[0] - 1) * self.strides[0] + int(self.offset(0, self.conv.kernel[0] - 1)) + 1, self.tiles * self.tile.windows
        if self.shuffled:
            last_column = (self.conv.output_size[1] - 1) * self.strides[1] + self.conv.kernel[1]
            return (outputs[0] - 1) * self.strides[0] + int(self.offset(0, self.conv.kernel[0] - 1)) + 1, last_column
        between = (s // c for s, c in zip(self.strides, self.cycles, strict=True))
        last = (self.offset(axis, self.conv.kernel[axis] - 1) for axis in (0, 1))
        rows, cols = ((n - 1) * s + int(reach) + 1 for n, s, reach in zip(outputs, between, last, strict=True))
        return rows, cols

    @derived
    def flat(self) -> bool:
        """Whether the windows of a row block are one line."""
        if self.shuffled:
            return self.strides == (1, 1) and self.conv.output_size[1] < self.tile.lanes
        return self.repeated or (not self.expanded and (self.tile.axis == "windows" or self.strides == (1, 1)))

    @derived
    def lines(self) -> int:
        """Lines of a row block."""
        return 1 if self.flat else self.tile.row_block

    @derived
    def pitch(self) -> int:
        """Places of a line from one output row to the next."""
        return self.size[1] if self.flat and not self.repeated else self.conv.output_size[1]

    @derived
    def line(self) -> int:
        """Places of a line."""
        return (self.tile.row_block - 1) * self.pitch + self.conv.output_size[1] if self.flat else self.conv.output_size[1]

    @derived
    def tiles(self) -> int:
        """Register tiles of a line; the last one is the last places, some of which the tile before has as well, unless there is room."""
        return -(-self.line // self.tile.windows)

    @derived
    def plane(self) -> int:
        """Words of a phase of the copy, of one word of channels with axis "windows"."""
        if self.shuffled:
            elements = math.prod(self.size) * self.conv.in_channels // self.conv.groups + SHUFFLED_BYTES
            return -(-elements // self.tile.group)
        if self.tile.axis != "windows" or self.expanded:
            return math.prod(self.size) * self.words
        lines = -(-math.prod(self.size) // CACHE_LINE)
        return (lines | 1) * CACHE_LINE  # an odd number, so that the words of a pixel do not share few sets of the level-1 cache

    @derived
    def copied(self) -> int:
        """Words of the copy, with those that a register tile wider than its line reads."""
        if self.tile.axis != "windows" or self.tile.along != "channels":
            return self.plane + (max(self.tile.windows - self.line, 0) if self.shuffled else 0)
        return self.words * math.prod(self.phases) * self.plane + max(self.tile.windows - self.line, 0)

    @derived
    def by_tile(self) -> bool:
        """Whether the epilogue follows the product of a register tile, whose windows are of one row, or rows follow one another."""
        return self.tile.axis != "windows" or self.expanded or self.pitch == self.conv.output_size[1]

    @derived
    def held(self) -> int:
        """Sums that are kept until their epilogue: of all places of a line, or of a register tile, and with AMX of two."""
        if not self.by_tile:
            return self.tile.block * self.held_line
        return self.tile.block * self.tile.windows * (2 if self.tile.instruction == "amx" else 1)

    @derived
    def places(self) -> tuple[int, ...]:
        """The first windows of a register tile's vectors that shuffle their words: where a line ends before the tile, the last overlap."""
        lanes, whole = self.tile.lanes, self.flat or self.line < self.tile.lanes
        return tuple(j * lanes if whole else min(j * lanes, self.line - lanes) for j in range(self.tile.vectors))

    @derived
    def held_line(self) -> int:
        """Places of a line whose sums are kept."""
        line = max(self.line, self.tile.windows)
        return -(-line // self.tile.lanes) * self.tile.lanes if self.finishes_lines else line

    @derived
    def finishes_lines(self) -> bool:
        """Whether the epilogue is that of lines, in whole vectors, since rows are shorter than those."""
        return not self.by_tile and self.conv.output_size[1] < self.tile.lanes and not self.conv.residual

    @derived
    def chunk(self) -> int:
        """Words of a row of an AMX tile of inputs or filters: the most that divide the steps of the sum that lie side by side."""
        return chunk_of(self.run)

    @derived
    def over_columns(self) -> bool:
        """Whether the steps that lie side by side include those of a kernel's row."""
        if self.tile.axis == "windows":
            return self.tile.along == "channels" and self.words == 1 and self.phases[1] == 1
        return self.conv.dilation[1] == 1 or self.conv.kernel[1] == 1

    @derived
    def run(self) -> int:
        """Steps of the sum that lie side by side, or at one distance."""
        if self.tile.axis == "windows":
            return self.tile.pack.run(self.conv)
        return self.words * (self.conv.kernel[1] if self.over_columns else 1)
