"""Split-K: the products of several parts of the input channels run at the same time, and a second kernel adds their accumulators."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.packing.split_k import parts_problem
from im2win.schedules.cuda.families.multistage import MultistageTiles, least, products
from im2win.schedules.cuda.kernels.split_k import pack_of_parts, split_kernel
from im2win.schedules.cuda.legality import multistage as legality
from im2win.schedules.cuda.model import floor
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
LEAST_CHANNELS = 32  # least number of input channels of a part
SHORT = 1.4  # factor on the products of parts with channels last and elements of two bytes: their pipelines hardly fill before they end
MOST = 12  # tiles kept for each number of parts and kind of arithmetic: those that the cost model ranks first


@dataclass(frozen=True)
class SplitK(MultistageTiles):
    """Schedules of `MultistageTile`s with `split` >= 2."""

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem with that accuracy; None if one does."""
        if conv.groups != 1:
            return f"sums are cut for one group, not {conv.groups}"
        if conv.in_channels < 2 * LEAST_CHANNELS or conv.in_channels % 2:
            return f"a part of the sum has at least {LEAST_CHANNELS} channels: {conv.in_channels} do not make two equal ones"
        return None

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the accumulators of two parts, the least number of parts."""
        return 2 * 4 * math.prod(conv.output_shape)

    def workspace_bytes(self, conv: Conv2d, tile: MultistageTile) -> int:
        """Bytes of the accumulators of all parts, 4 bytes each."""
        return 4 * partial_sums(conv, tile)

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[MultistageTile]:
        """Every legal tile worth a trial, in a fixed order."""
        found = []
        for split in self._splits(conv, accuracy):
            for product in products(conv, gpu, accuracy):
                whole = cuda_space.space(parts_problem(conv, split), gpu, WindowSource(), [product])
                best = sorted(whole, key=lambda part: _estimate(conv, part, split, gpu).seconds)[:MOST]
                found += [replace(part, split=split) for part in best]
        return found

    def floor(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> float:
        """Seconds that no tile of the space is estimated below."""
        kinds = products(conv, gpu, accuracy)
        parts = ((split, least(parts_problem(conv, split), gpu, WindowSource(), kinds)) for split in self._splits(conv, accuracy))
        return floor.seconds(_added(conv, one, split, gpu) for split, one in parts)

    def _splits(self, conv: Conv2d, accuracy: Accuracy) -> list[int]:
        """Numbers of parts that leave each part enough channels."""
        if self.unsupported_reason(conv, accuracy) is not None:
            return []
        return [split for split in SPLITS if conv.in_channels % split == 0 and conv.in_channels // split >= LEAST_CHANNELS]

    def violations(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""
        reason = self.unsupported_reason(conv, "winograd")
        if reason is not None:
            return [reason]
        if tile.split < 2 or conv.in_channels % tile.split:
            return [f"`split` (={tile.split}) must be at least 2 and divide the {conv.in_channels} channels"]
        return legality.violations(parts_problem(conv, tile.split), inner(tile), gpu, WindowSource())

    def estimate(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> Estimate:
        """The cost model's estimate: the products of the parts, and the addition of their accumulators from level-2 cache or memory."""
        return _estimate(conv, inner(tile), tile.split, gpu)

    def pack(self, conv: Conv2d, tile: MultistageTile) -> Pack:
        """The packing of filters for a tile."""
        return pack_of_parts(conv, tile)

    def kernels(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> dict[str, Any]:
        """Both kernels, in one function."""
        return {SYMBOL: split_kernel(conv, tile, SYMBOL)}


def _estimate(conv: Conv2d, part: MultistageTile, split: int, gpu: Gpu) -> Estimate:
    """The estimate for a tile of one part's product."""
    estimated = model.estimate(parts_problem(conv, split), part, gpu, WindowSource())
    if conv.layout == "NHWC" and conv.itemsize == 2:
        estimated = replace(estimated, compute=SHORT * estimated.compute)
    return _added(conv, estimated, split, gpu)


def _added(conv: Conv2d, parts: Estimate, split: int, gpu: Gpu) -> Estimate:
    """The estimate of the parts' products, and of the addition of their accumulators from level-2 cache or memory."""
    stored = 4 * split * math.prod(conv.output_shape)
    passing = max(2 * stored - model.L2_SHARE, 0) / gpu.dram_bytes_s
    adding = stored / gpu.l2_bytes_s + conv.output_bytes / gpu.l2_bytes_s
    return replace(parts, transform=parts.transform + adding + passing + model.LAUNCH_S)
