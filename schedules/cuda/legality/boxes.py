"""Rules of kernels whose input comes by TMA boxes, persistent or warp-specialized."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from im2win.device.gpu import Gpu
from im2win.packing.wgmma_smem import SLAB, ChunkPack
from im2win.schedules.cuda.arithmetic import NATIVE, WARPGROUP_ONLY
from im2win.schedules.cuda.primitives import CHUNK
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d

PRODUCTS = {dtype: f"wg_{row.kind}" for dtype, row in (NATIVE | WARPGROUP_ONLY).items()}
BLOCKS = (64, 128, 192, 256)  # output channels of a block that are worth a trial
SLABS = (1, 2)  # of 64 bytes of a pixel, that a step may take
MAX_COLUMNS = 256  # most columns of a product
MAX_STEP = 8  # largest element stride of a TMA box


def unsupported_reason(conv: Conv2d, kernels: str, dtypes: Collection[str] = tuple(PRODUCTS)) -> str | None:
    """Why no kernel of this kind computes a problem; None if one may. kernels: what the kind is called. dtypes: what it multiplies."""
    if conv.dtype not in dtypes:
        return f"{kernels} multiply {' or '.join(dtypes)}, not {conv.dtype}"
    if conv.depthwise:
        return f"{kernels} multiply several channels of a group: depthwise layers have a schedule of their own"
    if not blocks_of(conv):
        return f"no block of {', '.join(map(str, BLOCKS))} filters has whole groups, or a part of one, in whole steps of {SLAB} bytes"
    if conv.layout == "NHWC" and conv.in_channels * conv.itemsize % CHUNK:
        return f"a pixel's channels must be a multiple of {CHUNK} bytes, as TMA boxes need, not {conv.in_channels * conv.itemsize}"
    if conv.layout == "NHWC" and max(conv.stride) > MAX_STEP:
        return f"TMA boxes bring every {MAX_STEP}th pixel at the least, not every {max(conv.stride)}th"
    return None


def product_rules(conv: Conv2d, tile: PersistentTile | WarpSpecializedTile, gpu: Gpu) -> Iterator[str]:
    """The rules of a tile's products that it breaks."""
    if tile.product != PRODUCTS[conv.dtype]:
        yield f"`product` (={tile.product}) must be {PRODUCTS[conv.dtype]} for {conv.dtype}"
    if not gpu.warpgroups:
        yield f"`product` (={tile.product}) needs compute capability 9.0, not {gpu.arch}"
    if tile.slabs not in tile.slab_counts:
        yield f"`slabs` (={tile.slabs}) must be one of {', '.join(map(str, tile.slab_counts))}"
    yield from group_rules(conv, ChunkPack(tile.block_m, tile.slabs))


def group_rules(conv: Conv2d, pack: ChunkPack) -> Iterator[str]:
    """The rules of problems of several groups that filters packed in this way break."""
    if not pack.whole(conv):
        yield f"`block_m` (={pack.block}) must hold whole groups of {conv.out_channels // conv.groups} filters, or a part of one"
    elif pack.blocks(conv) > 1 and conv.groups > 1 and pack.channels(conv) % pack.step(conv):
        taken = pack.channels(conv)
        yield f"`slabs` (={pack.slabs}) must cut the {taken} input channels of a block's groups into whole steps of {pack.step(conv)}"


def blocks_of(conv: Conv2d) -> list[int]:
    """Those of `BLOCKS` that hold whole groups, or a part of one, in whole steps."""
    return [block for block in BLOCKS if any(not list(group_rules(conv, ChunkPack(block, slabs))) for slabs in SLABS)]


def above(*limits: tuple[str, int, int]) -> Iterator[str]:
    """The limits, (what, number, most), that a number exceeds, as messages. `what` has a place {} for the number."""
    for what, number, most in limits:
        if number > most:
            yield f"the {what.format(number)} must be at most {most}"
