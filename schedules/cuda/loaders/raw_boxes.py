"""Loader of halo tiles with channels first: TMA boxes of pixels of each channel, which warps rearrange to the channels of each pixel."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.loaders.boxes import Boxes
from im2win.schedules.cuda.primitives import CHUNK, Expr, call, pointer
from im2win.schedules.cuda.tiles.persistent import EIGHT
from im2win.schedules.cuda.tiles.rearranged import QUAD, RearrangedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import LINE


class RawBoxes(Boxes):
    """The input as raw boxes; see `RearrangedHaloTile`.

    Args:
        field: the halo tile of a step.
        source: the input tensor.
    """

    _halo: RearrangedHaloTile

    def __init__(self, field: RearrangedHaloTile, source: Any) -> None:
        conv = field.conv
        plane, row_bytes, row_step = conv.height * conv.width, field.line * conv.itemsize, field.row_step
        image, sizes, strides = conv.in_channels * plane, (0, 0, 0, 0), (0, 0, 0)
        if field.sparse:
            sizes = conv.width, conv.in_channels, conv.output_size[0], conv.batch
            strides, row_step = (plane, conv.stride[0] * conv.width, image), 1
        elif field.form == "rows":
            sizes, strides = (conv.width, conv.in_channels, conv.height, conv.batch), (plane, conv.width, image)
        elif field.form == "runs":
            sizes, strides = (plane, conv.in_channels, conv.batch, 1), (plane, image, conv.batch * image)
        else:
            sizes, strides = (field.run, image // field.run, conv.batch, 1), (field.run, image, conv.batch * image)
            row_bytes = CHUNK
        super().__init__(field, source, sizes, strides, field.raw_box, (1, 1, row_step, 1), row_bytes)

    def copy(self, stage: tuple[Any, Expr], output_tile: Expr, part: Expr, full: Expr, channel: Expr, rank: Expr) -> None:
        """See `Boxes.copy`. Every block copies for itself."""
        field, conv, tile = self._halo, self._halo.conv, self._halo.tile
        n, row, col = self.place(output_tile)
        first = channel + part * field.channels
        y, x = row * (tile.rows * conv.stride[0]) - conv.padding[0], col * (tile.cols * conv.stride[1]) - conv.padding[1]
        call("expect_bytes", full, field.raw_boxes * field.box_elements * conv.itemsize)
        for number in range(field.raw_boxes):
            at: tuple[Expr, Expr, Expr, Expr]
            if field.sparse:
                at = number * field.line, first, row * tile.rows, n
            elif field.form == "rows":
                at = x - field.lead + number * LINE, first, y, n
            elif field.form == "runs":
                begin = x if field.one_row else y * conv.width - field.lead_of(row)
                at = begin + number * LINE, first, n, 0
            else:
                at = 0, first * (field.raw_rows * field.raw_cols) // field.run, n, 0
            call("copy_box", pointer(*stage, number * field.box_elements), T.address_of(self._map), *at, full)

    def table(self, places: Any, thread: Expr) -> None:
        """Emits the tables of where pixels go, one for each of `leads`, by the block's threads.

        The entry of a pixel of an eight: where the eight lies in the raw boxes of the first channel (upper half), and the pixel of a stage
        (lower half), both in units of 16 bytes.
        """
        field = self._halo
        for first in range(0, field.places, field.tile.threads):
            at = first + thread
            with T.If(at < field.places), T.Then():
                T.buffer_store(places, self._entry(at), [at])

    def _entry(self, at: Expr) -> Expr:
        field, conv = self._halo, self._halo.conv
        (images, rows, eights), pixel = field.eights, at % EIGHT
        eight, number = at // EIGHT % field.steps_of_eights, at // (EIGHT * field.steps_of_eights)
        within, row, image = eight % eights, eight // eights % rows, eight // (eights * rows)
        lead: Expr = field.leads[0]
        for index, other in enumerate(field.leads[1:], 1):
            lead = tirx.Select(number == index, other, lead)
        col = within * EIGHT + pixel - lead
        exists, conditions = [image < images], [image < images, col >= 0]
        if field.form == "images":
            from_ = (image * field.channels * field.raw_cols * field.raw_rows) // EIGHT + within
            exists.append(within * EIGHT - lead < field.raw_rows * field.raw_cols)
        else:
            line, per_line = (row if field.form == "rows" else image) * field.channels, field.line // EIGHT
            if field.sparse:
                line = (image * rows + row) * field.channels
            from_ = within // per_line * (field.box_elements // EIGHT) + line * per_line + within % per_line
        if field.form == "rows":
            conditions.append(col < field.raw_cols)
            y, x = row * field.row_step, col
        else:
            conditions.append(col < field.raw_rows * field.raw_cols)
            y, x = col // field.raw_cols, col % field.raw_cols + conv.padding[1]
            y = y + conv.padding[0] if field.form == "images" else y
        (line, below), (right, beside) = ((value // s, value % s) for value, s in zip((y, x), conv.stride, strict=True))
        conditions += [line < field.lines, right < field.pitch, below < field.planes[0], beside < field.planes[1]]
        place = (below * field.planes[1] + beside) * field.plane + (image * field.lines + line) * field.pitch + right
        nowhere = field.stage_pixels - EIGHT + pixel
        return tirx.Select(tirx.all(*exists), from_, 0) * (1 << 16) + tirx.Select(tirx.all(*conditions), place, nowhere)

    def rearrange(self, stage: tuple[Any, Expr], raw: tuple[Any, Expr], places: Any, output_tile: Expr, warp: Expr) -> None:
        """Emits the moves of a step from its raw boxes to its stage of windows, by one warp.

        Args:
            stage, raw: (buffer, index of its stage). places: see `table`. warp: its index among those that rearrange the step together.
        """
        field = self._halo
        quads, eights, unit = field.tile.units // QUAD, field.steps_of_eights, field.stage_pixels * CHUNK
        to, from_, warps = pointer(*stage, 0), pointer(*raw, 0), field.tile.rearrangers
        if field.form == "images":
            pixels = field.raw_rows * field.raw_cols
            call(f"rearrange_images<{warps}, {quads}, {field.phases}, {eights}>", to, from_, pointer(places, 0), unit, warp, pixels)
            return
        which = self.place(output_tile)[1] % len(field.leads) * (eights * EIGHT) if len(field.leads) > 1 else 0
        name = "rearrange_lines" if field.line == LINE else "rearrange_short_lines"
        call(f"{name}<{warps}, {quads}, {eights}>", to, from_, pointer(places, which), unit, warp)
