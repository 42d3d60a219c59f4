"""Legality of the tiles of TVM schedules of dense layers on GPUs, stated once."""

from __future__ import annotations

import math

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import CORE_PRODUCTS
from im2win.schedules.cuda.tiles.scheduled import ORDERS, ScheduledTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

RULES = ("pipelines", "copies", "wide", "bounds", "unroll")  # names of rule sets, in the order in which they are applied
NEED_STAGES = ("pipelines", "unroll")  # rules for pipelines
STATIC_SHARED = 49152  # bytes of shared memory that a kernel may declare
MAX_REGISTERS, MAX_THREADS, MAX_STAGES = 255, 1024, 4
OTHERS = 40  # registers for addresses and operands on their way
MAX_BODY = 4096  # products of a step of a thread, which are unrolled
SPARE_BYTES = 16
LANES = 32  # of a warp
STRIPS = (1, 2, 4)


def unsupported_reason(conv: Conv2d) -> str | None:
    """Why no tile computes a problem; None if one does."""
    if conv.dtype != "float32":
        return f"TVM's schedules of dense layers multiply float32, not {conv.dtype}"
    if conv.depthwise or conv.out_channels // conv.groups < 8:
        return "a thread block has channels of one group, at least eight"
    return None


def unknown_rules(rules: str) -> list[str]:
    """A message where a tile's rules are not some of `RULES` in their order, with "+" between them."""
    named = rules.split("+") if rules else []
    if named == [name for name in RULES if name in named]:
        return []
    return [f"`rules` (={rules}) must be '' or names among {', '.join(RULES)}, in this order, with + between them"]


def depth(conv: Conv2d) -> int:
    """Products in one sum."""
    return math.prod(conv.filter_shape[1:])


def along_terms(conv: Conv2d, order: str) -> bool:
    """Whether neighbouring elements of a window, not of neighbouring windows, are neighbours in memory.

    Channels last they are the channels of a tap; in the im2win tensor the taps of a channel, in the order of a window, "cvu".
    """
    return order == "cvu" or (conv.layout == "NHWC" and order == "uvc")


def registers(tile: ScheduledTile) -> int:
    """Registers of a thread: sums, operands of a product, and others."""
    return tile.accumulators + tile.thread_m + tile.thread_n + OTHERS


def shared_bytes(conv: Conv2d, tile: ScheduledTile) -> int:
    """Bytes of shared memory of a thread block."""
    spare = SPARE_BYTES * tile.stages * tile.block_k if conv.layout == "NHWC" or along_terms(conv, tile.order) else 0
    return tile.shared_elements * conv.itemsize + spare


def violations(conv: Conv2d, tile: ScheduledTile, gpu: Gpu) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    if (reason := unsupported_reason(conv)) is not None:
        return [reason]
    counts = ("block_m", "block_n", "block_k", "thread_m", "thread_n", "stages")
    broken = [f"`{name}` (={getattr(tile, name)}) must be at least 1" for name in counts if getattr(tile, name) < 1]
    if tile.product != CORE_PRODUCTS.get(conv.dtype):
        broken.append(f"`product` (={tile.product}) must be {CORE_PRODUCTS.get(conv.dtype)} for {conv.dtype}")
    if tile.order not in ORDERS:
        broken.append(f"`order` (={tile.order}) must be among {', '.join(map(repr, ORDERS))}")
    broken += unknown_rules(tile.rules)
    if not broken and tile.threads < LANES:  # other rules divide by a block's threads and warps
        broken.append(f"a thread block (={tile.threads}) must have at least a warp of {LANES} threads")
    return broken or [text for holds, text in _rules(conv, tile, gpu) if not holds]


def _rules(conv: Conv2d, tile: ScheduledTile, gpu: Gpu) -> list[tuple[bool, str]]:
    channels, most = conv.out_channels // conv.groups, min(STATIC_SHARED, gpu.block_shared)
    steps = -(-depth(conv) // tile.block_k)
    return [
        (channels % tile.block_m == 0, f"`block_m` (={tile.block_m}) must divide the {channels} channels of a group"),
        (tile.block_m % tile.thread_m == 0, f"`thread_m` (={tile.thread_m}) must divide `block_m` (={tile.block_m})"),
        (tile.block_n % tile.thread_n == 0, f"`thread_n` (={tile.thread_n}) must divide `block_n` (={tile.block_n})"),
        (
            tile.strip in STRIPS and tile.thread_n % tile.strip == 0,
            f"`strip` (={tile.strip}) must be among {STRIPS} and divide `thread_n` (={tile.thread_n})",
        ),
        (tile.threads <= MAX_THREADS, f"a thread block (={tile.threads}) must have at most {MAX_THREADS} threads"),
        (tile.threads % 32 == 0, f"a thread block (={tile.threads}) must have whole warps of 32 threads"),
        (
            tile.block_m * tile.block_k % tile.threads == 0 and tile.block_n * tile.block_k % tile.threads == 0,
            f"a step's filters (={tile.block_m * tile.block_k}) and windows (={tile.block_n * tile.block_k}) must be shared out evenly "
            f"among {tile.threads} threads",
        ),
        (
            tile.lanes in (0, LANES) and (not tile.lanes or (tile.block_n % LANES == 0 and tile.block_k % (tile.threads // LANES) == 0)),
            f"`lanes` (={tile.lanes}) must be 0, or {LANES} with `block_n` (={tile.block_n}) a multiple of it and `block_k` "
            f"(={tile.block_k}) of the block's warps",
        ),
        (
            not tile.lanes or not along_terms(conv, tile.order),
            f"`lanes` (={tile.lanes}) must be 0 where the elements of a window are neighbours in memory",
        ),
        (tile.stages <= MAX_STAGES, f"`stages` (={tile.stages}) must be at most {MAX_STAGES}"),
        (tile.stages == 1 or tile.stages <= steps, f"`stages` (={tile.stages}) must be at most the {steps} steps of the sum"),
        *((tile.stages > 1 or name not in tile.rule_names, f"`rules` (={name}) needs at least 2 `stages`") for name in NEED_STAGES),
        (shared_bytes(conv, tile) <= most, f"filters and windows in shared memory (={shared_bytes(conv, tile)} bytes) must fit {most}"),
        (
            registers(tile) <= min(MAX_REGISTERS, gpu.registers // tile.threads),
            f"sums and operands (={registers(tile)}) must fit a thread's registers",
        ),
        (
            tile.accumulators * tile.block_k <= MAX_BODY,
            f"the products of a step (={tile.accumulators * tile.block_k} in a thread) must be at most {MAX_BODY}",
        ),
        (ELEMENT_TYPES[conv.out_dtype].itemsize == conv.itemsize, f"outputs (={conv.out_dtype}) must be of the input's type"),
    ]
