"""Legality of tiles of multistage kernels, stated once: sampler, user input, records and tests all use these functions."""

from __future__ import annotations

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import MULTIPLIERS, PRODUCTS
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
    counts = ("block_m", "block_n", "warp_m", "warp_n", "slabs")
    rules = [
        (tile.product in PRODUCTS, f"`product` (={tile.product}) must be one of {', '.join(PRODUCTS)}"),
        (tile.order in ORDERS, f"`order` (={tile.order}) must be one of {', '.join(ORDERS)}"),
        (tile.stages >= 2, f"`stages` (={tile.stages}) must be at least 2"),
        *((getattr(tile, name) >= 1, f"`{name}` (={getattr(tile, name)}) must be at least 1") for name in counts),
        *((getattr(tile, name) >= 0, f"`{name}` (={getattr(tile, name)}) must be at least 0") for name in ("images", "rows", "cols")),
    ]
    broken = [text for holds, text in rules if not holds]
    broken = broken or [text for holds, text in (_warpgroups(conv, tile, gpu) if tile.warpgroup else _warps(conv, tile)) if not holds]
    broken = broken or [text for holds, text in _shapes(conv, tile, windows) if not holds]
    return broken or [text for holds, text in _fits(conv, tile, gpu, windows) if not holds]


def sum_registers(conv: Conv2d, tile: MultistageTile) -> int:
    """Registers of a thread for accumulators."""
    return tile.positions * tile.accumulators * (2 if promoted(conv, tile) else 1)


def word_registers(tile: MultistageTile) -> int:
    """Registers of a thread for windows that `wgmma` reads, or that are still to be transformed."""
    return tile.halves * tile.word_registers + (4 * tile.positions if tile.in_rows else 0)


def _warps(conv: Conv2d, tile: MultistageTile) -> list[tuple[bool, str]]:
    lanes = fma_lanes(tile) if tile.product == "fma" else (4, 8)
    across, along, sums = 4 * lanes[0], lanes[1], sum_registers(conv, tile)
    return [
        (tile.warp_m % across == 0, f"`warp_m` (={tile.warp_m}) must be a multiple of {across}"),
        (tile.warp_n % along == 0, f"`warp_n` (={tile.warp_n}) must be a multiple of {along}"),
        (sums <= MAX_SUMS, f"the {sums} sums of a thread must be at most {MAX_SUMS}"),
    ]


def _warpgroups(conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> list[tuple[bool, str]]:
    multiple = MULTIPLIERS[tile.dtype].columns
    held = sum_registers(conv, tile) + word_registers(tile)
    return [
        (gpu.warpgroups, f"`product` (={tile.product}) needs compute capability 9.0, not {gpu.arch}"),
        (tile.stages >= 3, f"`stages` (={tile.stages}) must be at least 3 for a warpgroup"),
        (tile.warp_m % multiple == 0, f"`warp_m` (={tile.warp_m}) must be a multiple of {multiple}"),
        (tile.warp_m <= 256, f"`warp_m` (={tile.warp_m}) must be at most 256"),
        (tile.warp_n % 64 == 0, f"`warp_n` (={tile.warp_n}) must be a multiple of 64"),
        (held <= MAX_HELD, f"the {held} registers of a thread for sums and words must be at most {MAX_HELD}"),
        (
            (held + OTHERS) * tile.threads <= gpu.registers,
            f"the block's {tile.threads} threads of {held + OTHERS} registers must have at most {gpu.registers}",
        ),
    ]


def _shapes(conv: Conv2d, tile: MultistageTile, windows: WindowSource) -> list[tuple[bool, str]]:
    return [
        (tile.dtype == conv.dtype, f"`product` (={tile.product}) multiplies {tile.dtype}, not {conv.dtype}"),
        (tile.block_m % tile.warp_m == 0, f"`warp_m` (={tile.warp_m}) must divide `block_m` (={tile.block_m})"),
        (tile.block_n % tile.warp_n == 0, f"`warp_n` (={tile.warp_n}) must divide `block_n` (={tile.block_n})"),
        (tile.threads <= MAX_THREADS, f"the block's {tile.threads} threads must be at most {MAX_THREADS}"),
        ((tile.images > 0) == (tile.rows > 0) == (tile.cols > 0), "`images`, `rows` and `cols` must all be 0 or none"),
        (tile.halo == windows.halo, f"windows staged by {windows.staged} {'need a' if windows.halo else 'have no'} halo tile"),
        ((tile.order == "Cuvc") <= tile.halo, "`order` Cuvc is for halo tiles"),
        ((tile.order == "uvc") <= (not tile.halo), "`order` uvc is not for halo tiles"),
    ]


def _fits(conv: Conv2d, tile: MultistageTile, gpu: Gpu, windows: WindowSource) -> list[tuple[bool, str]]:
    rows, needed = channel_planes.rows(conv), shared_bytes(conv, tile, windows)
    rules = [
        (needed <= gpu.block_shared, f"the block's {needed} bytes of shared memory must be at most {gpu.block_shared}"),
        (
            tile.block_m < conv.out_channels // conv.groups + 16,
            f"`block_m` (={tile.block_m}) must not hold 16 channels or more beyond a group's {conv.out_channels // conv.groups}",
        ),
    ]
    if not tile.halo:
        lanes = im2col_taps.lanes_along_sum(conv, tile, windows)
        even = tile.block_n * lanes % tile.threads == 0
        return [*rules, (even, f"`block_n` (={tile.block_n}) must be a multiple of the {tile.threads // lanes} windows copied at a time")]
    sizes = zip(("images", "rows", "cols"), (tile.images, tile.rows, tile.cols), (conv.batch, *conv.output_size), strict=True)
    many = tile.images * tile.rows * tile.cols
    rules += [(size <= most, f"`{name}` (={size}) must be at most the output's {most}") for name, size, most in sizes]
    rules += [(many <= tile.block_n, f"the halo tile's {many} windows must be at most `block_n` (={tile.block_n})")]
    if tile.planes:
        return [
            *rules,
            (tile.product == "fma", "halo tiles in `order` cuv are for `product` fma"),
            (rows % tile.slabs == 0, f"`slabs` (={tile.slabs}) must divide the {rows} rows that the kernel has in all channels"),
        ]
    taps = (TileRows if tile.in_rows else HaloLoader).taps(conv)
    return [*rules, (taps >= tile.ahead, f"the {tile.ahead} steps that copies run ahead must be at most the {taps} that share channels")]
