"""Legality of Winograd tiles, stated once: in bands of transformed tiles, or along rows while windows are loaded."""

from __future__ import annotations

from collections.abc import Iterator

from im2win.device.gpu import Gpu
from im2win.numerics.winograd_tiling import forms, row_forms
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.schedules.cuda.kernels.multistage import product_of, windows_of
from im2win.schedules.cuda.legality import multistage
from im2win.schedules.cuda.tiles.multistage import MultistageTile, promoted
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d

ROWS = WindowSource(staged="rows")


def violations(conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    if tile.halo:
        return _row_form(conv, tile) or multistage.product_violations(windows_of(conv, tile), tile, gpu, ROWS)
    known = forms(conv)
    if tile.outputs not in known:
        taps = f"{conv.dtype} and a kernel of {conv.kernel[0]} taps"
        return [f"`outputs` (={tile.outputs}) must be one of {', '.join(map(str, known))} for {taps}"]
    if tile.band < 0:
        return [f"`band` (={tile.band}) must be at least 0"]
    return multistage.violations(*product_of(conv, tile), gpu, WindowSource())


def _row_form(conv: Conv2d, tile: MultistageTile) -> list[str]:
    """Every rule that a tile breaks for Winograd along rows."""
    return list(_row_fields(conv, tile)) or list(_row_words(conv, tile))


def _row_fields(conv: Conv2d, tile: MultistageTile) -> Iterator[str]:
    known = row_forms(conv)
    if tile.product not in PRODUCTS or not tile.warpgroup:
        yield f"`product` (={tile.product}) must be a warpgroup's for tiles of rows"
    if tile.outputs not in known:
        yield f"`outputs` (={tile.outputs}) must be one of {', '.join(map(str, known)) or 'none'} for rows of {conv}"
    if tile.band != 0:
        yield f"`band` (={tile.band}) must be 0 for tiles of rows"
    if tile.order != "Cuvc":
        yield f"`order` (={tile.order}) must be Cuvc for tiles of rows"


def _row_words(conv: Conv2d, tile: MultistageTile) -> Iterator[str]:
    if tile.halves != 2 and tile.slabs != 1:
        yield f"`slabs` (={tile.slabs}) must be 1 where registers hold one slab only"
    if promoted(windows_of(conv, tile), tile):
        yield "sums of tiles of rows must not be so long that they are kept in parts"
