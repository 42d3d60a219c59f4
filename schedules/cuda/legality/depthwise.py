"""Legality of depthwise tiles on GPUs, stated once."""

from __future__ import annotations

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import CORE_PRODUCTS
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.depthwise import DepthwiseTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

STAGED = ("window", "row")
MAX_REGISTERS, MAX_THREADS = 255, 1024
OTHERS = 40  # registers for addresses, conditions and outputs on their way
MAX_BODY = 4096  # products of a thread that are unrolled


def unsupported_reason(conv: Conv2d) -> str | None:
    """Why no tile computes a problem; None if one does."""
    if not conv.depthwise:
        return "it is for depthwise layers, which have a group for every input channel"
    if conv.out_channels != conv.groups and conv.layout == "NHWC":
        return "channels with several filters are not side by side in the input"
    if conv.dtype not in CORE_PRODUCTS:
        return f"its products are those of {' and '.join(CORE_PRODUCTS)}, not {conv.dtype}"
    return None


def tasks(conv: Conv2d, rows: int, cols: int) -> list[int]:
    """Numbers of tiles of outputs that a block may have, ascending: parts of a row of tiles, rows of an image, or images.

    Channels first, channels come before images. Other numbers make indices that TVM does not take for affine.
    """
    counts, whole, numbers = [-(-conv.output_size[1] // cols), -(-conv.output_size[0] // rows), conv.batch], 1, set()
    if conv.layout == "NCHW":
        counts.insert(2, conv.out_channels)
    for count in counts:
        numbers |= {whole * one for one in range(1, count + 1) if count % one == 0}
        whole *= count
    return sorted(numbers)


def inputs_of(conv: Conv2d, tile: DepthwiseTile) -> tuple[int, int]:
    """Rows and columns of the input that a thread reads at a time."""
    (down, across), rows = conv.stride, 1 if tile.staged == "row" else conv.window[0]
    return (tile.rows - 1) * down + rows, (tile.cols - 1) * across + conv.window[1]


def registers(conv: Conv2d, tile: DepthwiseTile) -> int:
    """Registers of a thread: sums, inputs and filters of a kernel row."""
    rows, cols = inputs_of(conv, tile)
    words = max(tile.vector * conv.itemsize / 4, 1)
    return round(tile.accumulators + words * (rows * cols + conv.kernel[1])) + OTHERS


def unrolled(conv: Conv2d, tile: DepthwiseTile) -> int:
    """Products in the longest stretch of code without a loop."""
    return tile.accumulators * conv.kernel[1] * (1 if tile.staged == "row" else conv.kernel[0])


def violations(conv: Conv2d, tile: DepthwiseTile, gpu: Gpu) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    if (reason := unsupported_reason(conv)) is not None:
        return [reason]
    counts = ("vector", "rows", "cols", "channels", "tasks")
    broken = [f"`{name}` (={getattr(tile, name)}) must be at least 1" for name in counts if getattr(tile, name) < 1]
    if tile.staged not in STAGED:
        broken.append(f"`staged` (={tile.staged}) must be {' or '.join(STAGED)}")
    if tile.product != CORE_PRODUCTS[conv.dtype]:
        broken.append(f"`product` (={tile.product}) must be {CORE_PRODUCTS[conv.dtype]} for {conv.dtype}")
    return broken or [text for holds, text in _rules(conv, tile, gpu) if not holds]


def _rules(conv: Conv2d, tile: DepthwiseTile, gpu: Gpu) -> list[tuple[bool, str]]:
    (out_h, out_w), size = conv.output_size, max(conv.itemsize, ELEMENT_TYPES[conv.out_dtype].itemsize)
    across = -(-out_w // tile.cols)
    return [
        (tile.vector == 1 or conv.layout == "NHWC", f"`vector` (={tile.vector}) must be 1 in NCHW"),
        (
            tile.tasks in tasks(conv, tile.rows, tile.cols),
            f"`tasks` (={tile.tasks}) must divide the {across} tiles of a row, or be whole rows or whole images that divide the others",
        ),
        (tile.channels == 1 or conv.layout == "NHWC", f"`channels` (={tile.channels}) must be 1 in NCHW"),
        (tile.vector & (tile.vector - 1) == 0, f"`vector` (={tile.vector}) must be a power of two"),
        (tile.vector * size <= CHUNK, f"`vector` (={tile.vector}) must be at most {CHUNK} bytes"),
        (
            conv.out_channels % tile.block_m == 0,
            f"`vector` times `channels` (={tile.block_m}) must divide the {conv.out_channels} channels",
        ),
        (tile.rows <= out_h, f"`rows` (={tile.rows}) must be at most the output's rows (={out_h})"),
        (tile.cols <= out_w, f"`cols` (={tile.cols}) must be at most the output's columns (={out_w})"),
        (tile.threads <= MAX_THREADS, f"`channels` times `tasks` (={tile.threads}) must be at most {MAX_THREADS} threads"),
        (
            registers(conv, tile) <= min(MAX_REGISTERS, gpu.registers // tile.threads),
            f"sums, inputs and filters (={registers(conv, tile)}) must fit a thread's registers",
        ),
        (
            unrolled(conv, tile) <= MAX_BODY,
            f"the products that are unrolled (={unrolled(conv, tile)}) must be at most {MAX_BODY}",
        ),
    ]
