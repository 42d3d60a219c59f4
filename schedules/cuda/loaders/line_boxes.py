"""Loader of lines of pixels with channels first: TMA boxes that products take as they arrive."""

from __future__ import annotations

import itertools
from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.loaders.boxes import Boxes
from im2win.schedules.cuda.primitives import Expr, call, pointer
from im2win.schedules.cuda.tiles.pixel_lines import PixelLines
from im2win.schedules.cuda.tiles.warp_specialized import LINE


class LineBoxes(Boxes):
    """The input as lines of 64 pixels of every channel of a phase, or of one block's share of these channels; see `PixelLines`.

    Args:
        field: the lines of a step.
        source: the input tensor.
    """

    _halo: PixelLines

    def __init__(self, field: PixelLines, source: Any) -> None:
        pixels, channels, images = field.axes
        strides, box = (pixels, channels * pixels, images * channels * pixels), (LINE, field.share, 1, 1)
        super().__init__(field, source, (pixels, channels, images, 1), strides, box, (1, 1, 1, 1), LINE * field.conv.itemsize)

    def copy(self, stage: tuple[Any, Expr], output_tile: Expr, part: Expr, full: Expr, channel: Expr, rank: Expr) -> None:
        """See `Boxes.copy`."""
        field, (n, _, col) = self._halo, self.place(output_tile)
        first, before = (channel + part * field.channels) // field.phases, 0 if field.sharing == 1 else rank * field.share
        group = n if field.images == 1 else n // field.images
        name = "copy_box" if field.sharing == 1 else f"copy_shared<{field.sharing}>"
        call("expect_bytes", full, field.step_bytes)
        for line, (phase, lead) in itertools.product(range(field.lines_of_a_channel), enumerate(field.leads)):
            to = pointer(*stage, ((line * field.phases + phase) * field.each + before) * LINE)
            x = col * field.tile.cols + (line * LINE + phase * field.conv.width - lead)
            call(name, to, T.address_of(self._map), x, first + before, group, 0, full)
