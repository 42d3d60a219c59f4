"""Legality of tiles in the design space of partial kernel fusion, stated once: sampler, user input, records and tests all use it."""

from __future__ import annotations

from im2win.device.gpu import Gpu
from im2win.numerics.winograd_error import quantised_forms
from im2win.numerics.winograd_tiling import forms
from im2win.schedules.cuda.legality.multistage import MAX_SUMS, MAX_THREADS
from im2win.schedules.studies.winograd_tc.tile import ARITHMETIC, FRAGMENTS, FUSIONS, MAPPINGS, Sizes, TensorCoreTile
from im2win.spec.conv2d import MAX_ELEMENTS, Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

STATIC_BYTES = 49152  # of static shared memory that a kernel may declare
TICKET_BYTES = 16  # more shared memory, in kernels whose blocks take their work from a counter
LAST_LEVEL_BYTES = 40 << 20  # of level-2 cache, beside the data that streams through it


def forms_of(conv: Conv2d) -> tuple[int, ...]:
    """Outputs along a side of a tile, of the forms that a problem has."""
    return quantised_forms(conv) if ELEMENT_TYPES[conv.dtype].integer else forms(conv)


def violations(conv: Conv2d, tile: TensorCoreTile, gpu: Gpu) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    counts = ("block_m", "block_n", "block_k", "groups")
    words = (
        ("fragment", tuple(FRAGMENTS)),
        ("mapping", MAPPINGS),
        ("fusion", FUSIONS),
        ("outputs", forms_of(conv)),
        ("product", (ARITHMETIC[conv.dtype],)),
    )
    rules = [
        *(
            (getattr(tile, name) in known, f"`{name}` (={getattr(tile, name)}) must be one of {', '.join(map(str, known))}")
            for name, known in words
        ),
        *((getattr(tile, name) >= 1, f"`{name}` (={getattr(tile, name)}) must be at least 1") for name in counts),
        (tile.wave >= 0, f"`wave` (={tile.wave}) must be at least 0"),
    ]
    broken = [text for holds, text in rules if not holds]
    broken = broken or [text for holds, text in _shapes(conv, tile) if not holds]
    return broken or [text for holds, text in _fits(conv, tile, gpu) if not holds]


def _shapes(conv: Conv2d, tile: TensorCoreTile) -> list[tuple[bool, str]]:
    sides = zip(("block_m", "block_n", "block_k"), (tile.block_m, tile.block_n, tile.block_k), tile.shape, strict=True)
    along = tile.shape[1]
    return [
        *((size % part == 0, f"`{name}` (={size}) must be a multiple of the fragment's {part}") for name, size, part in sides),
        (
            tile.fusion != "shmem" or tile.mapping == "sync_free",
            "`fusion` shmem is for `mapping` sync_free: a block must need all positions",
        ),
        (
            tile.size % tile.groups == 0 if tile.mapping == "sync_free" else tile.groups == 1,
            f"`groups` (={tile.groups}) must divide the tile's {tile.size} rows, and be 1 but with `mapping` sync_free",
        ),
        (tile.fusion == "llc" or tile.wave == 0, f"`wave` (={tile.wave}) must be 0 without `fusion` llc"),
        (
            tile.block_n < conv.out_channels + along,
            f"`block_n` (={tile.block_n}) must not hold {along} filters or more beyond the {conv.out_channels}",
        ),
        (
            tile.block_k < conv.in_channels + tile.shape[2],
            f"`block_k` (={tile.block_k}) must not hold {tile.shape[2]} channels or more beyond the {conv.in_channels}",
        ),
    ]


def _fits(conv: Conv2d, tile: TensorCoreTile, gpu: Gpu) -> list[tuple[bool, str]]:
    sizes = Sizes(conv, tile)
    stored, multiplied = 0 if tile.fusion == "shmem" else sizes.transformed, sizes.multiplied
    declared = STATIC_BYTES - (TICKET_BYTES if tile.fusion == "llc" else 0)
    rules = [
        (tile.wave < sizes.blocks, f"`wave` (={tile.wave}) must be less than the {sizes.blocks} blocks of tiles"),
        (tile.threads <= MAX_THREADS, f"the block's {tile.threads} threads must be at most {MAX_THREADS}"),
        (tile.accumulators <= MAX_SUMS, f"the {tile.accumulators} sums of a thread must be at most {MAX_SUMS}"),
        (sizes.staged_bytes <= declared, f"the block's {sizes.staged_bytes} bytes of operands must be at most {declared}"),
        (stored <= MAX_ELEMENTS, f"the {stored} elements of transformed tiles must be at most {MAX_ELEMENTS}"),
        (multiplied <= MAX_ELEMENTS, f"the {multiplied} elements of products must be at most {MAX_ELEMENTS}"),
    ]
    if tile.fusion == "shmem":
        needed = sizes.held_bytes + sizes.staged_bytes
        what = f"a block's {sizes.held_bytes} bytes of transformed tiles and {sizes.staged_bytes} of filters"
        rules.append((needed <= gpu.block_shared, f"{what} must be at most {gpu.block_shared} of shared memory"))
    if tile.fusion == "llc":
        at_once = min(sizes.blocks, 2 * tile.wave or gpu.multiprocessors)
        needed = sizes.held_bytes * at_once
        what = f"the {needed} bytes of transformed tiles of {at_once} blocks at once"
        rules.append((needed <= LAST_LEVEL_BYTES, f"{what} must be at most the {LAST_LEVEL_BYTES} that the last-level cache holds"))
    return rules
