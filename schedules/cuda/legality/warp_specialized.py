"""Legality of tiles of warp-specialized kernels, stated once: sampler, user input, records and tests all use these functions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.legality import boxes
from im2win.schedules.cuda.mainloop.registers import begins_with, needed, registers
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.copied_pixels import of_pixels
from im2win.schedules.cuda.tiles.fields import field_of
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import MAX_BOX, M
from im2win.schedules.cuda.tiles.rearranged import RearrangedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile, channel_phases
from im2win.spec.conv2d import Conv2d

MAX_THREADS = 640  # four consumer warpgroups and the producers
MAX_PRODUCTS = 512  # most products of a step, whose code is unrolled
SHARED = ("windows", "filters", "accumulators")
TMA_BOXES = ("halo", "taps", "rearranged", "lines", "copied", "channels_last", "channels_last_taps", "window_rows")
FEW_BYTES = 16  # most bytes of a pixel's channels where its rows of windows are copied
CLUSTERS = (1, 2, 4)  # thread blocks of a cluster
SUM_CLUSTERS = (*CLUSTERS, 8)
LEAST = {"groups": 1, "pingpong": 1, "stages": 2, "filter_stages": 2}


def unsupported_reason(conv: Conv2d) -> str | None:
    """Why no tile computes a problem; None if one may."""
    reason = no_pixels(conv)
    return None if reason is None or no_window_rows(conv) is None else reason


def no_pixels(conv: Conv2d) -> str | None:
    """Why no tile takes the pixels of the input, or of a copy of them; None if one may."""
    if (reason := boxes.unsupported_reason(conv, "warp-specialized kernels")) is not None:
        return reason
    if conv.layout == "NHWC":
        return None
    if conv.itemsize != 2:
        return f"warp-specialized kernels rearrange elements of two bytes, channels first, not {conv.dtype}"
    many = channel_phases(conv)
    if conv.in_channels % many:
        return f"channels of {conv.height}x{conv.width} pixels are brought {many} together, as TMA boxes need, not {conv.in_channels}"
    return None


def no_lines(conv: Conv2d) -> str | None:
    """Why products cannot take pixels of each channel as they lie in memory; None if they can."""
    plain = conv.kernel == (1, 1) and conv.stride == (1, 1) and not any(conv.padding)
    return None if plain else "for windows of more than their own pixel: a 1x1 kernel without stride and padding"


def no_copy(conv: Conv2d) -> str | None:
    """Why no kernel copies the pixels that windows read; None if one does."""
    strided = conv.kernel == (1, 1) and conv.stride != (1, 1) and not any(conv.padding)
    return None if strided else "for other layers than those of a 1x1 kernel with a stride and without padding"


def no_window_rows(conv: Conv2d) -> str | None:
    """Why no tile takes rows of windows as pixels; None if one may."""
    if conv.itemsize != 2 or conv.dtype not in boxes.PRODUCTS:
        return f"for {conv.dtype}: rows of windows are copied of elements of two bytes"
    if conv.groups != 1 or conv.in_channels * conv.itemsize > FEW_BYTES:
        return f"for {conv.in_channels} channels in {conv.groups} groups: rows of windows are copied of {FEW_BYTES // 2} channels at most"
    if conv.kernel[1] == 1 or conv.dilation[1] != 1:
        return "for rows of windows that are no run of several pixels"
    if conv.stride[0] > boxes.MAX_STEP:
        return f"for a stride of {conv.stride[0]}: TMA boxes bring every {boxes.MAX_STEP}th row at the least"
    return None


def no_channels_last(conv: Conv2d) -> str | None:
    """Why no kernel copies the input to channels last; None if one does."""
    if conv.in_channels * conv.itemsize % CHUNK:
        return f"for pixels of {conv.in_channels} channels: a channels-last copy needs a multiple of {CHUNK // conv.itemsize}"
    if max(of_pixels(conv).stride) > boxes.MAX_STEP:
        return f"for a stride of {max(conv.stride)}: TMA boxes bring every {boxes.MAX_STEP}th pixel at the least"
    return None


def violations(conv: Conv2d, tile: WarpSpecializedTile, gpu: Gpu) -> list[str]:
    """Every rule that a tile breaks, as a message; empty if the tile is legal."""
    reason = unsupported_reason(conv)
    if reason is not None:
        return [reason]
    return list(_fields(conv, tile, gpu)) or list(_shapes(conv, tile)) or list(_fits(field_of(conv, tile), gpu))


def _fields(conv: Conv2d, tile: WarpSpecializedTile, gpu: Gpu) -> Iterator[str]:
    clusters = SUM_CLUSTERS if tile.shared == "accumulators" else CLUSTERS
    yield from boxes.product_rules(conv, tile, gpu)
    for name, least in LEAST.items():
        if getattr(tile, name) < least:
            yield f"`{name}` (={getattr(tile, name)}) must be at least {least}"
    if tile.shared not in SHARED:
        yield f"`shared` (={tile.shared}) must be one of {', '.join(SHARED)}"
    if tile.tma_boxes not in TMA_BOXES:
        yield f"`tma_boxes` (={tile.tma_boxes}) must be one of {', '.join(TMA_BOXES)}"
    elif tile.window_rows:
        if (reason := no_window_rows(conv)) is not None:
            yield f"`tma_boxes` (={tile.tma_boxes}) must be another one {reason}"
    elif (reason := no_pixels(conv)) is not None:
        yield f"`tma_boxes` (={tile.tma_boxes}) must be window_rows: {reason}"
    elif (tile.rearranged or tile.lines or tile.channels_last) != (conv.layout == "NCHW"):
        yield f"`tma_boxes` (={tile.tma_boxes}) must be rearranged or lines with layout NCHW, and only there, not with {conv.layout}"
    elif tile.lines and (reason := no_copy(conv) if tile.copied else no_lines(conv)) is not None:
        yield f"`tma_boxes` (={tile.tma_boxes}) must be rearranged {reason}"
    elif tile.channels_last and (reason := no_channels_last(conv)) is not None:
        yield f"`tma_boxes` (={tile.tma_boxes}) must be another one {reason}"
    if tile.rearranged and tile.window_blocks != 1:
        yield f"`shared` (={tile.shared}) must be another one, or `cluster` 1: every block rearranges windows for itself"
    if tile.cluster not in clusters:
        yield f"`cluster` (={tile.cluster}) must be one of {', '.join(map(str, clusters))}"


def _shapes(conv: Conv2d, tile: WarpSpecializedTile) -> Iterator[str]:
    one, single = field_of(conv, tile).conv, tile.single_taps
    taps = math.prod(one.kernel if tile.window_rows else conv.kernel)
    (height, width), share = one.output_size, M * tile.groups
    blocks, steps = -(-conv.out_channels // max(tile.block_m, 1)), tile.steps(conv)
    if tile.block_m < share or tile.block_m % share:
        yield f"`block_m` (={tile.block_m}) must be a multiple of {M} for each of {tile.groups} warpgroups"
    if tile.block_m >= conv.out_channels + share:
        yield f"`block_m` (={tile.block_m}) must hold less than {share} channels beyond {conv.out_channels}"
    if not 1 <= tile.images <= one.batch:
        yield f"`images` (={tile.images}) must be 1 to the {one.batch} there are"
    if not 1 <= tile.rows <= height:
        yield f"`rows` (={tile.rows}) must be 1 to the output's {height}"
    if not 1 <= tile.cols <= width:
        yield f"`cols` (={tile.cols}) must be 1 to the output's {width}"
    if tile.images != 1 and (tile.rows, tile.cols) != (height, width):
        yield f"`images` (={tile.images}) must be 1 where a tile has less than all {height} x {width} outputs of one"
    if tile.taps < 1 or taps % tile.taps:
        yield f"`taps` (={tile.taps}) must divide the kernel's {taps}"
    if single and tile.taps != 1:
        yield f"`taps` (={tile.taps}) must be 1 where TMA boxes bring what one tap reads"
    if single and taps == 1:
        yield f"`tma_boxes` (={tile.tma_boxes}) must be {'channels_last' if tile.channels_last else 'halo'} for a kernel of one tap"
    if tile.window_blocks != 1 and conv.groups != 1:
        yield f"`shared` (={tile.shared}) must be another one, or `cluster` 1, with {conv.groups} groups: blocks read different channels"
    if blocks % tile.window_blocks:
        yield f"`cluster` (={tile.cluster}) must divide the {blocks} thread blocks along channels"
    if steps % tile.sum_blocks:
        yield f"`cluster` (={tile.cluster}) must divide the {steps} steps of a tile"
    if tile.pingpong != 1 and tile.sum_blocks != 1:
        yield f"`pingpong` (={tile.pingpong}) must be 1 where blocks share accumulators"


def _fits(field: StagedHaloTile, gpu: Gpu) -> Iterator[str]:
    tile, conv = field.tile, field.conv
    if field.uncopied is not None:
        yield field.uncopied
        return
    products = math.prod(conv.kernel) * tile.units // 2 * (tile.warp_m // M)
    given, begin = registers(tile, gpu, 1), begins_with(tile, gpu, 1)
    (held, alone), (images, lines, pitch), shared = needed(field), field.part, field.shared_bytes
    boxed = (pitch - 1) * conv.stride[1] + 1, (lines - 1) * conv.stride[0] + 1, images
    box = max(field.raw_box if isinstance(field, RearrangedHaloTile) else boxed)
    yield from boxes.above(
        ("block's {} threads", tile.threads, MAX_THREADS),
        ("product's {} columns", field.columns, boxes.MAX_COLUMNS),
        ("{} products a step", products, MAX_PRODUCTS),
        ("{} elements along an axis of a halo tile's box", box, MAX_BOX),
        ("block's {} bytes of shared memory", shared, gpu.block_shared),
    )
    if held > given:
        yield f"the {held} registers of a thread must be at most the {given} that it gets"
    if alone > begin:
        yield f"the {alone} registers of a product must be at most the {begin} that a thread begins with"
    if len(field.kept) < tile.sum_blocks:
        yield f"`cluster` (={tile.cluster}) must be at most the {len(field.kept)} eights of outputs' columns"
    if field.output_tiles % tile.filter_blocks:
        yield f"`cluster` (={tile.cluster}) must divide the {field.output_tiles} tiles of outputs"
