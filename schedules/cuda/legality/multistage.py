"""Legality of tiles of multistage kernels, stated once: sampler, user input, records and tests all use these functions."""

from __future__ import annotations

from collections.abc import Iterator

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import MULTIPLIERS, SHARED_PRODUCTS
from im2win.schedules.cuda.kernels.multistage import shared_bytes
from im2win.schedules.cuda.loaders import channel_planes, im2col_taps
from im2win.schedules.cuda.loaders.halo_tile import HaloLoader
from im2win.schedules.cuda.mma.fma import fma_lanes
from im2win.schedules.cuda.tiles.multistage import MAX_HELD, ORDERS, MultistageTile, promoted
from im2win.schedules.cuda.windows import WindowSource
from im2win.schedules.cuda.winograd.rows import TileRows
from im2win.spec.conv2d import Conv2d

MAX_THREADS = 512
MAX_SUMS = 168  # most registers of a thread for accumulators; the rest of its 255 hold operands and addresses
COUNTS = ("block_m", "block_n", "warp_m", "warp_n", "slabs")
SIZES = ("images", "rows", "cols")
OTHERS = 40  # registers of a thread for addresses and the like


def violations(conv: Conv2d, tile: MultistageTile, gpu: Gpu, windows: WindowSource) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    if tile.outputs or tile.band:
        return [f"`outputs` (={tile.outputs}) and `band` (={tile.band}) must be 0: they are for Winograd's form"]
    if tile.split != 1:
        return [f"`split` (={tile.split}) must be 1: it is for split-K"]
    return product_violations(conv, tile, gpu, windows)


def product_violations(conv: Conv2d, tile: MultistageTile, gpu: Gpu, windows: WindowSource) -> list[str]:
    """Every rule that the tile of a product breaks, without those of transforms before or after it."""
    return multiplier_violations(conv, tile, gpu) or window_violations(conv, tile, gpu, windows)


def multiplier_violations(conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> list[str]:
    """Every rule that the tile of a product breaks wherever its windows come from: those of its fields and of its multipliers."""
    return list(_fields(tile)) or list(_warpgroups(conv, tile, gpu) if tile.warpgroup else _warps(conv, tile))


def window_violations(conv: Conv2d, tile: MultistageTile, gpu: Gpu, windows: WindowSource) -> list[str]:
    """Every rule that a tile without `multiplier_violations` breaks with these windows: those of its shape and of what must fit."""
    return list(_shapes(conv, tile, windows)) or list(_fits(conv, tile, gpu, windows))


def sum_registers(conv: Conv2d, tile: MultistageTile) -> int:
    """Registers of a thread for accumulators."""
    return tile.positions * tile.accumulators * (2 if promoted(conv, tile) else 1)


def word_registers(tile: MultistageTile) -> int:
    """Registers of a thread for windows that `wgmma` reads, or that are still to be transformed."""
    return tile.halves * tile.word_registers + (4 * tile.positions if tile.in_rows else 0)


def _fields(tile: MultistageTile) -> Iterator[str]:
    if tile.product not in SHARED_PRODUCTS:
        yield f"`product` (={tile.product}) must be one of {', '.join(SHARED_PRODUCTS)}"
    if tile.order not in ORDERS:
        yield f"`order` (={tile.order}) must be one of {', '.join(ORDERS)}"
    if tile.stages < 2:
        yield f"`stages` (={tile.stages}) must be at least 2"
    for least, names in ((1, COUNTS), (0, SIZES)):
        for name in names:
            if getattr(tile, name) < least:
                yield f"`{name}` (={getattr(tile, name)}) must be at least {least}"
    if tile.fetched not in (0, 1):
        yield f"`fetched` (={tile.fetched}) must be 0 or 1"


def _warps(conv: Conv2d, tile: MultistageTile) -> Iterator[str]:
    lanes = fma_lanes(tile) if tile.product == "fma" else (4, 8)
    across, along, sums = 4 * lanes[0], lanes[1], sum_registers(conv, tile)
    if tile.warp_m % across:
        yield f"`warp_m` (={tile.warp_m}) must be a multiple of {across}"
    if tile.warp_n % along:
        yield f"`warp_n` (={tile.warp_n}) must be a multiple of {along}"
    if sums > MAX_SUMS:
        yield f"the {sums} sums of a thread must be at most {MAX_SUMS}"


def _warpgroups(conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> Iterator[str]:
    multiple = MULTIPLIERS[tile.dtype].columns
    held = sum_registers(conv, tile) + word_registers(tile)
    if not gpu.warpgroups:
        yield f"`product` (={tile.product}) needs compute capability 9.0, not {gpu.arch}"
    if tile.stages < 3:
        yield f"`stages` (={tile.stages}) must be at least 3 for a warpgroup"
    if tile.warp_m % multiple:
        yield f"`warp_m` (={tile.warp_m}) must be a multiple of {multiple}"
    if tile.warp_m > 256:
        yield f"`warp_m` (={tile.warp_m}) must be at most 256"
    if tile.warp_n % 64:
        yield f"`warp_n` (={tile.warp_n}) must be a multiple of 64"
    if held > MAX_HELD:
        yield f"the {held} registers of a thread for sums and words must be at most {MAX_HELD}"
    if (held + OTHERS) * tile.threads > gpu.registers:
        yield f"the block's {tile.threads} threads of {held + OTHERS} registers must have at most {gpu.registers}"


def _shapes(conv: Conv2d, tile: MultistageTile, windows: WindowSource) -> Iterator[str]:
    if tile.dtype != conv.dtype:
        yield f"`product` (={tile.product}) multiplies {tile.dtype}, not {conv.dtype}"
    if tile.block_m % tile.warp_m:
        yield f"`warp_m` (={tile.warp_m}) must divide `block_m` (={tile.block_m})"
    if tile.block_n % tile.warp_n:
        yield f"`warp_n` (={tile.warp_n}) must divide `block_n` (={tile.block_n})"
    if tile.threads > MAX_THREADS:
        yield f"the block's {tile.threads} threads must be at most {MAX_THREADS}"
    if not (tile.images > 0) == (tile.rows > 0) == (tile.cols > 0):
        yield "`images`, `rows` and `cols` must all be 0 or none"
    if tile.halo != windows.halo:
        yield f"windows staged by {windows.staged} {'need a' if windows.halo else 'have no'} halo tile"
    if tile.order == "Cuvc" and not tile.halo:
        yield "`order` Cuvc is for halo tiles"
    if tile.order == "uvc" and tile.halo:
        yield "`order` uvc is not for halo tiles"
    if tile.fetched and (tile.halo or not im2col_taps.fetches(conv, tile.order, windows)):
        yield "`fetched` (=1) is for windows that are close in memory while the sum's elements are not"


def _fits(conv: Conv2d, tile: MultistageTile, gpu: Gpu, windows: WindowSource) -> Iterator[str]:
    needed, channels = shared_bytes(conv, tile, windows), conv.out_channels // conv.groups
    if needed > gpu.block_shared:
        yield f"the block's {needed} bytes of shared memory must be at most {gpu.block_shared}"
    if tile.block_m >= channels + 16:
        yield f"`block_m` (={tile.block_m}) must not hold 16 channels or more beyond a group's {channels}"
    if tile.halo:
        yield from _halo_fits(conv, tile)
        return
    lanes = im2col_taps.lanes_along_sum(conv, tile, windows)
    if tile.block_n * lanes % tile.threads:
        yield f"`block_n` (={tile.block_n}) must be a multiple of the {tile.threads // lanes} windows copied at a time"


def _halo_fits(conv: Conv2d, tile: MultistageTile) -> Iterator[str]:
    for name, most in zip(SIZES, (conv.batch, *conv.output_size), strict=True):
        if getattr(tile, name) > most:
            yield f"`{name}` (={getattr(tile, name)}) must be at most the output's {most}"
    many = tile.images * tile.rows * tile.cols
    if many > tile.block_n:
        yield f"the halo tile's {many} windows must be at most `block_n` (={tile.block_n})"
    if not tile.planes:
        taps = (TileRows if tile.in_rows else HaloLoader).taps(conv)
        if taps < tile.ahead:
            yield f"the {tile.ahead} steps that copies run ahead must be at most the {taps} that share channels"
        return
    rows = channel_planes.rows(conv)
    if tile.product != "fma":
        yield "halo tiles in `order` cuv are for `product` fma"
    if rows % tile.slabs:
        yield f"`slabs` (={tile.slabs}) must divide the {rows} rows that the kernel has in all channels"
