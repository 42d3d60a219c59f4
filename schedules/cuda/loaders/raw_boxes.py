"""Loader of halo tiles with channels first: TMA boxes of pixels of each channel, which warps rearrange to the channels of each pixel."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.loaders.tma_boxes import ENCODE, PROMOTED, SWIZZLES
from im2win.schedules.cuda.primitives import CHUNK, Expr, call, pointer
from im2win.schedules.cuda.tiles.persistent import EIGHT
from im2win.schedules.cuda.tiles.rearranged import LINE, QUAD, RearrangedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import WARP


class RawBoxes:
    """The input as raw boxes; see `RearrangedHaloTile`.

    Args:
        field: the halo tile of a step.
        source: the input tensor.
    """

    def __init__(self, field: RearrangedHaloTile, source: Any) -> None:
        self._field, conv = field, field.conv
        plane, size, swizzle = conv.height * conv.width, conv.itemsize, SWIZZLES[LINE * conv.itemsize]
        image = conv.in_channels * plane
        if field.form == "rows":
            sizes, strides = (conv.width, conv.in_channels, conv.height, conv.batch), (plane, conv.width, image)
        elif field.form == "runs":
            sizes, strides = (plane, conv.in_channels, conv.batch, 1), (plane, image, conv.batch * image)
        else:
            sizes, strides = (field.run, image // field.run, conv.batch, 1), (field.run, image, conv.batch * image)
            swizzle = SWIZZLES[CHUNK]
        self._map = tirx.Var("boxes", T.handle("tensormap").ty)
        T.Bind(T.tvm_stack_alloca("tensormap", 1), var=self._map)
        given = (*sizes, *(stride * size for stride in strides), *field.raw_box, 1, 1, field.row_step, 1)
        T.evaluate(T.call_packed(ENCODE, self._map, conv.dtype, 4, source.data, *given, 0, swizzle, PROMOTED, 0))

    def _place(self, output_tile: Expr) -> tuple[Expr, Expr, Expr]:
        """(first image, row, column) of a tile of outputs, the latter two among the tiles of an image."""
        down, across = self._field.counts
        return output_tile // (down * across) * self._field.images, output_tile // across % down, output_tile % across

    def copy(self, stage: tuple[Any, Expr], output_tile: Expr, part: Expr, full: Expr, channel: Expr, rank: Expr = 0) -> None:
        """Emits the copies of a step's raw boxes; one thread must execute them. See `TmaBoxes.copy`; `rank` is unused."""
        field, conv, tile = self._field, self._field.conv, self._field.tile
        n, row, col = self._place(output_tile)
        first = channel + part * field.channels
        y, x = row * (tile.rows * conv.stride[0]) - conv.padding[0], col * (tile.cols * conv.stride[1]) - conv.padding[1]
        call("expect_bytes", full, field.raw_boxes * field.box_elements * conv.itemsize)
        for number in range(field.raw_boxes):
            at: tuple[Expr, Expr, Expr, Expr]
            if field.form == "rows":
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
        field = self._field
        for first in range(0, field.places, field.tile.threads):
            at = first + thread
            with T.If(at < field.places), T.Then():
                T.buffer_store(places, self._entry(at), [at])

    def _entry(self, at: Expr) -> Expr:
        field, conv = self._field, self._field.conv
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
            line = (row if field.form == "rows" else image) * field.channels
            from_ = within // (LINE // EIGHT) * (field.box_elements // EIGHT) + line * (LINE // EIGHT) + within % (LINE // EIGHT)
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

    def rearrange(self, stage: tuple[Any, Expr], raw: tuple[Any, Expr], places: Any, output_tile: Expr, thread: Expr) -> None:
        """Emits the moves of a step from its raw boxes to its stage of windows, by the warps that rearrange.

        Args:
            stage, raw: (buffer, index of its stage). places: see `table`. thread: index of the thread among those that rearrange.
        """
        field = self._field
        quads, eights, unit = field.tile.units // QUAD, field.steps_of_eights, field.stage_pixels * CHUNK
        to, from_, warp = pointer(*stage, 0), pointer(*raw, 0), thread // WARP
        if field.form == "images":
            pixels = field.raw_rows * field.raw_cols
            call(f"rearrange_images<{quads}, {field.phases}, {eights}>", to, from_, pointer(places, 0), unit, warp, pixels)
            return
        which = self._place(output_tile)[1] % len(field.leads) * (eights * EIGHT) if len(field.leads) > 1 else 0
        call(f"rearrange_lines<{quads}, {eights}>", to, from_, pointer(places, which), unit, warp)
