"""The layout of halo tiles that producer warps rearrange, with channels first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from im2win.common.caching import derived
from im2win.schedules.cuda.primitives import CHUNK, Expr, padded
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import EIGHT, KIB, MAX_BOX, PHASES
from im2win.schedules.cuda.tiles.warp_specialized import LINE, channel_phases

TOGETHER = 8  # matrices, of eight pixels and 32 channels, that such a warp takes at a time
QUAD = 4  # 16-byte units of each of these pixels at a time


@dataclass(frozen=True)
class RearrangedHaloTile(StagedHaloTile):
    """The halo tile with channels first, which warps rearrange from raw boxes; see `HaloTile` for the result.

    What raw boxes bring, in `form`, depends on what begins at a multiple of 16 bytes, as TMA requires.
    "runs": lines of 64 neighbouring pixels of one channel, the same pixels of all channels of a step one after the other. Lines are cut
    from whole input rows without gaps. "rows": the same with lines cut from each row, for tiles narrower than the output, or where windows
    read only some of the rows (`sparse`).
    "images": all pixels of whole images, as they lie in memory. `phases` channels then begin at as many places modulo 16 bytes.

    Zeros around an image that lie in no box come from threads, which clear stages once.
    """

    margin = 0

    @derived
    def form(self) -> str:
        """What raw boxes bring: "runs", "rows" or "images"."""
        if self.phases > 1:
            return "images"
        whole = self.one_row or self.tile.cols == self.conv.output_size[1]
        return "runs" if whole and not self.sparse else "rows"

    @derived
    def sparse(self) -> bool:
        """Whether raw boxes leave out rows between those that windows of whole rows read, as a tensor map of every stride-th row does."""
        conv, down = self.conv, self.conv.stride[0]
        alone = down > 1 and conv.kernel == (1, 1) and not any(conv.padding)
        aligned = self.phases == 1 and down * conv.width % self.tile.unit == 0
        return alone and aligned and self.tile.cols == conv.output_size[1]

    @derived
    def line(self) -> int:
        """Pixels of a channel that lie side by side in a raw box of runs or rows."""
        return LINE // 2 if self.sparse and self.raw_cols <= LINE // 2 else LINE

    @derived
    def phases(self) -> int:
        """Least number of channels that together are a multiple of 16 bytes."""
        return channel_phases(self.conv)

    @property
    def one_row(self) -> bool:
        """Whether an image is one row of pixels, of which tiles take parts."""
        return self.conv.height == 1 and self.conv.kernel == (1, 1) and not any(self.conv.padding)

    @derived
    def uncopied(self) -> str | None:
        """Why no raw boxes bring halo tiles of this shape; None if they do."""
        tile, conv, unit, (height, width) = self.tile, self.conv, self.tile.unit, self.conv.output_size
        if self.form == "images":
            if (tile.rows, tile.cols) != (height, width):
                return f"`rows` and `cols` must be {height} and {width}: channels of {conv.height}x{conv.width} pixels come whole"
            if tile.units % self.phases:
                return f"`slabs` (={tile.slabs}) must be 2: 16 bytes hold every {self.phases}th channel"
            return None if self.run else f"`slabs` (={tile.slabs}) must divide channels in equal steps"
        if self.form == "rows" and conv.width % unit and not self.sparse:
            return f"`cols` (={tile.cols}) must be {width}: rows of {conv.width} pixels do not begin at multiples of {CHUNK} bytes"
        if tile.cols != width and tile.cols * conv.stride[1] % unit:
            return f"`cols` (={tile.cols}) times the stride must be a multiple of {unit}: boxes begin at multiples of {CHUNK} bytes"
        return None

    @derived
    def raw_rows(self) -> int:
        """Input rows of an image in raw boxes. Of rows cut in parts, those that no window reads are left out if windows have one tap."""
        if self.form == "images":
            return self.conv.height
        return self.lines if self.row_step > 1 else (self.lines - 1) * self.conv.stride[0] + self.planes[0]

    @property
    def row_step(self) -> int:
        """Input rows from one row of raw boxes to the next."""
        return self.conv.stride[0] if self.form == "rows" and self.planes[0] == 1 else 1

    @derived
    def raw_cols(self) -> int:
        """Pixels of an input row in raw boxes."""
        if self.one_row and self.form == "runs":
            return (self.tile.cols - 1) * self.conv.stride[1] + 1
        return (self.pitch - 1) * self.conv.stride[1] + self.planes[1] if self.form == "rows" else self.conv.width

    @derived
    def _row_pixels(self) -> int:
        """Pixels of a channel from one row of tiles to the next."""
        return self.tile.rows * self.conv.stride[0] * self.conv.width

    def lead_of(self, row: Expr) -> Expr:
        """Elements of a run before the first row of the tiles in row `row`: boxes begin at multiples of 16 bytes."""
        unit = self.tile.unit
        return (row * self._row_pixels + -self.conv.padding[0] * self.conv.width % unit) % unit

    @derived
    def leads(self) -> list[int]:
        """Elements of a channel in raw boxes before what windows read, a number for each table: of rows, of runs, of a phase in images."""
        if self.form == "rows":
            return [self.lead]
        if self.form == "runs":
            return [0] if self.one_row else [self.lead_of(row) for row in range(self._lead_period)]
        return [phase * self.raw_rows * self.raw_cols % self.tile.unit for phase in range(self.phases)]

    @derived
    def _lead_period(self) -> int:
        """Rows of tiles after which leads of runs repeat."""
        return min(self.tile.unit // math.gcd(self._row_pixels, self.tile.unit), self.counts[0])

    @derived
    def eights(self) -> tuple[int, int, int]:
        """Eights of neighbouring elements of a channel in raw boxes: [images, rows, eights of a row], where a run counts as one row."""
        rows, cols = (self.raw_rows, self.raw_cols) if self.form == "rows" else (1, self.raw_rows * self.raw_cols)
        return self.tile.images, rows, -(-(cols + max(self.leads)) // EIGHT)

    @derived
    def together(self) -> int:
        """Eights that a warp takes at a time: of all channels of a step, or in images of 32 channels."""
        return TOGETHER if self.form == "images" else TOGETHER * QUAD // self.tile.units

    @derived
    def steps_of_eights(self) -> int:
        """Eights of one table, padded to as many as the warps of a step take at a time."""
        at_a_time = self.tile.rearrangers * self.together
        return -(-math.prod(self.eights) // at_a_time) * at_a_time

    @derived
    def places(self) -> int:
        """Entries of the tables of where pixels go."""
        return len(self.leads) * self.steps_of_eights * EIGHT

    @derived
    def channels(self) -> int:
        """Channels of a step."""
        return self.tile.units * self.tile.unit

    @derived
    def run(self) -> int:
        """Elements of the innermost axis of boxes of images: a divisor of all that they begin at, at most 256; 0 if there is none."""
        together = math.gcd(self.conv.in_channels, self.channels, self.tile.pack(self.conv).channels(self.conv))
        whole = together * self.raw_rows * self.raw_cols
        return max((run for run in range(self.tile.unit, MAX_BOX + 1, self.tile.unit) if whole % run == 0), default=0)

    @derived
    def raw_box(self) -> tuple[int, int, int, int]:
        """Elements of a raw box along the axes of its tensor map."""
        if self.form == "images":
            return self.run, self.channels * self.raw_rows * self.raw_cols // max(self.run, 1), self.tile.images, 1
        if self.form == "runs":
            return LINE, self.channels, self.tile.images, 1
        if self.sparse:
            return self.line, self.channels, self.raw_rows, self.tile.images
        return LINE, self.channels, (self.raw_rows - 1) * self.row_step + 1, 1

    @derived
    def raw_boxes(self) -> int:
        """Raw boxes of a step, one after the other in a stage."""
        return 1 if self.form == "images" else -(-self.eights[2] * EIGHT // self.line)

    @derived
    def box_elements(self) -> int:
        """Elements of a raw box."""
        if self.form == "images":
            return self.tile.images * self.channels * self.raw_rows * self.raw_cols
        return self.tile.images * (self.raw_rows if self.form == "rows" else 1) * self.channels * self.line

    @derived
    def pixels(self) -> int:
        """Pixels that a step copies."""
        return self.raw_boxes * self.box_elements // self.channels

    @derived
    def stage_pixels(self) -> int:
        """Pixels that a stage has room for, with eight for those that no window reads."""
        return super().stage_pixels + EIGHT

    @derived
    def raw_buffer(self) -> tuple[int, int]:
        """Shape of the pipeline stages of raw boxes: [stages, elements], padded to whole KiB with room for eights behind the last pixel."""
        size = (self.raw_boxes * self.box_elements + (EIGHT if self.form == "images" else 0)) * self.conv.itemsize
        return self.tile.stages, -(-size // KIB) * KIB // self.conv.itemsize

    @derived
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block takes."""
        buffers = padded(self.raw_buffer, self.tile.dtype) + padded((self.places,), "int32")
        return super().shared_bytes + buffers + 2 * padded((self.tile.stages,), PHASES)
