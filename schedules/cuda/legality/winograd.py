"""Legality of Winograd tiles, stated once: in bands of transformed tiles, or along rows while windows are loaded."""

from __future__ import annotations

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
    known = row_forms(conv)
    rules = [
        (tile.product in PRODUCTS and tile.warpgroup, f"`product` (={tile.product}) must be a warpgroup's for tiles of rows"),
        (tile.outputs in known, f"`outputs` (={tile.outputs}) must be one of {', '.join(map(str, known)) or 'none'} for rows of {conv}"),
        (tile.band == 0, f"`band` (={tile.band}) must be 0 for tiles of rows"),
        (tile.order == "Cuvc", f"`order` (={tile.order}) must be Cuvc for tiles of rows"),
    ]
    broken = [text for holds, text in rules if not holds]
    return broken or [text for holds, text in _row_words(conv, tile) if not holds]


def _row_words(conv: Conv2d, tile: MultistageTile) -> list[tuple[bool, str]]:
    return [
        (tile.halves == 2 or tile.slabs == 1, f"`slabs` (={tile.slabs}) must be 1 where registers hold one slab only"),
        (not promoted(windows_of(conv, tile), tile), "sums of tiles of rows must not be so long that they are kept in parts"),
    ]
