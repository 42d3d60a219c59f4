"""Loader of halo tiles as TMA boxes: one box for every parity plane of a step, or one part of it by each block of a cluster."""

from __future__ import annotations

import itertools
import math
from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.loaders.boxes import Axes, Boxes
from im2win.schedules.cuda.primitives import Expr, call, pointer
from im2win.schedules.cuda.tiles.persistent import HaloTile
from im2win.spec.conv2d import Conv2d


class TmaBoxes(Boxes):
    """The input as TMA boxes.

    Channels last, a box holds the channels of a step of every stride-th pixel. Channels first, a box holds rows of each channel.

    Args:
        conv: the problem that boxes are cut from.
        halo: the halo tile of a step.
        source: the input tensor.
        strides: elements from one pixel, row and image to the next, where they do not follow one another.
    """

    def __init__(self, conv: Conv2d, halo: HaloTile, source: Any, strides: tuple[int, int, int] | None = None) -> None:
        self._conv, self._part = conv, halo.part
        tile, (height, width) = halo.tile, (conv.height, conv.width)
        channels = tile.units * tile.unit
        box: Axes
        if halo.boxed:
            images, lines, pitch = self._part
            sizes, steps = (conv.in_channels, width, height, conv.batch), (1, conv.stride[1], conv.stride[0], 1)
            box = (channels, (pitch - 1) * steps[1] + 1, (lines - 1) * steps[2] + 1, images)
        else:
            sizes, steps, (_, rows, cols) = (width, height, conv.in_channels, conv.batch), (1, 1, 1, 1), halo.raw
            box = (cols, rows, channels, 1)
        strides = strides or (sizes[0], math.prod(sizes[:2]), math.prod(sizes[:3]))
        super().__init__(halo, source, sizes, strides, box, steps, halo.pixel_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes that arrive in a step."""
        halo = self._halo
        return (halo.pixels * halo.tile.units * halo.tile.unit if halo.boxed else math.prod(halo.raw)) * self._conv.itemsize

    def copy(self, stage: tuple[Any, Expr], output_tile: Expr, part: Expr, full: Expr, channel: Expr, rank: Expr = 0) -> None:
        """See `Boxes.copy`."""
        conv, halo, tile = self._conv, self._halo, self._halo.tile
        unit = tile.units * tile.unit
        n, row, col = self.place(output_tile)
        top, left = row * tile.rows, col * tile.cols
        y, x = top * conv.stride[0] - conv.padding[0], left * conv.stride[1] - conv.padding[1]
        if halo.single_taps:
            part, tap = part // math.prod(conv.kernel), part % math.prod(conv.kernel)
            y, x = y + tap // conv.kernel[1] * conv.dilation[0], x + tap % conv.kernel[1] * conv.dilation[1]
        if not halo.boxed:
            call("expect_bytes", full, self.step_bytes)
            call("copy_box", pointer(*stage, 0), T.address_of(self._map), x - halo.lead, y, channel + part * unit, n, full)
            return
        images, lines, pitch = self._part
        first: Expr = 0
        if halo.sharing > 1:
            if images < halo.images:
                n = n + rank * images
            elif lines < halo.lines:
                y = y + rank * (lines * conv.stride[0])
            elif pitch < halo.pitch:
                x = x + rank * (pitch * conv.stride[1])
            first = rank * (images * lines * pitch)
        name = "copy_box" if halo.sharing == 1 else f"copy_shared<{halo.sharing}>"
        call("expect_bytes", full, self.step_bytes)
        for number, (row_, col) in enumerate(itertools.product(*map(range, halo.planes))):
            to = pointer(*stage, (number * halo.plane + first) * unit)
            call(name, to, T.address_of(self._map), channel + part * unit, x + col, y + row_, n, full)
