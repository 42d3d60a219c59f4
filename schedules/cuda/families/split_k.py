"""Split-K: the sum over channels in parts, each part's product at the same time, and a second kernel that adds the parts up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.packing.split_k import parts_problem
from im2win.schedules.cuda.families.multistage import MultistageTiles, products
from im2win.schedules.cuda.kernels.split_k import pack_of_parts, split_kernel
from im2win.schedules.cuda.legality import multistage as legality
from im2win.schedules.cuda.model import multistage as model
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.space import multistage as cuda_space
from im2win.schedules.cuda.tile_scheduler.split_k import inner, partial_sums
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

SPLITS = (2, 4, 8, 16)
LEAST_CHANNELS = 32  # of a part
MOST = 12  # tiles of a split and an arithmetic that are worth a trial, the model's best


@dataclass(frozen=True)
class SplitK(MultistageTiles):
    """Tiles with `split` of at least 2."""

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a convolution with that accuracy; None if one does."""
        if conv.groups != 1:
            return f"sums are cut for one group, not {conv.groups}"
        if conv.in_channels < 2 * LEAST_CHANNELS or conv.in_channels % 2:
            return f"a part of the sum has at least {LEAST_CHANNELS} channels: {conv.in_channels} do not make two equal ones"
        return None

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the accumulators of two parts, the least there are."""
        return 2 * 4 * math.prod(conv.output_shape)

    def workspace_bytes(self, conv: Conv2d, tile: MultistageTile) -> int:
        """Bytes of the accumulators of all parts, of 4 bytes each."""
        return 4 * partial_sums(conv, tile)

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[MultistageTile]:
        """Every tile worth a trial."""
        found = []
        for split in SPLITS if self.unsupported_reason(conv, accuracy) is None else ():
            if conv.in_channels % split == 0 and conv.in_channels // split >= LEAST_CHANNELS:
                for product in products(conv, gpu, accuracy):
                    whole = cuda_space.space(parts_problem(conv, split), gpu, WindowSource(), [product])
                    tiles = [replace(tile, split=split) for tile in whole]
                    found += sorted(tiles, key=lambda tile: self.estimate(conv, tile, gpu).seconds)[:MOST]
        return found

    def violations(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks."""
        reason = self.unsupported_reason(conv, "winograd")
        if reason is not None:
            return [reason]
        if tile.split < 2 or conv.in_channels % tile.split:
            return [f"`split` (={tile.split}) must be at least 2 and divide the {conv.in_channels} channels"]
        return legality.violations(parts_problem(conv, tile.split), inner(tile), gpu, WindowSource())

    def estimate(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> Estimate:
        """The model's estimate: of the parts' products, and of adding them up from level-2 cache, or from memory."""
        parts = model.estimate(parts_problem(conv, tile.split), inner(tile), gpu, WindowSource())
        stored = self.workspace_bytes(conv, tile)
        passing = max(2 * stored - model.L2_SHARE, 0) / gpu.dram_bytes_s
        adding = stored / gpu.l2_bytes_s + conv.output_bytes / gpu.l2_bytes_s
        return replace(parts, transform=parts.transform + adding + passing + model.LAUNCH_S)

    def pack(self, conv: Conv2d, tile: MultistageTile) -> Pack:
        """How filters are packed for a tile."""
        return pack_of_parts(conv, tile)

    def kernels(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> dict[str, Any]:
        """Both kernels, in one function."""
        return {SYMBOL: split_kernel(conv, tile, SYMBOL)}
