"""A sum in parts, as a row's CUDA plan: its tiles, which are legal and worth a trial, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.packing.split_k import parts_problem
from im2win.schedules.cuda.families.base import CudaFamily
from im2win.schedules.cuda.kernels.split_k import split_kernel
from im2win.schedules.cuda.kernels.split_k_tile import SplitTile
from im2win.schedules.cuda.legality import multistage as legality
from im2win.schedules.cuda.model import multistage as model
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.plan import CudaPlan
from im2win.schedules.cuda.space import multistage as cuda_space
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

SPLITS = (2, 4, 8, 16)
LEAST_CHANNELS = 32  # of a part
MOST = 12  # tiles of a split and an arithmetic that are worth a trial, the model's best


@dataclass(frozen=True)
class SplitPlan(CudaFamily):
    """The only plan whose tiles are `SplitTile`."""

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the sums of two parts, the least there are."""
        return 2 * 4 * math.prod(conv.output_shape)

    def made_bytes(self, conv: Conv2d, tile: Any) -> int:
        """Bytes of the sums of all parts, of 4 bytes each."""
        return 4 * int(tile.sums_of(conv))

    def unable(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a convolution with that accuracy; None if one does."""
        if conv.groups != 1:
            return f"sums are cut for one group, not {conv.groups}"
        if conv.in_channels < 2 * LEAST_CHANNELS or conv.in_channels % 2:
            return f"a part of the sum has at least {LEAST_CHANNELS} channels: {conv.in_channels} do not make two equal ones"
        return None

    def tile(self, values: Mapping[str, Any]) -> SplitTile:
        """A tile from its plain values; ValueError if they are none."""
        return SplitTile.from_dict(values)

    def space(self, conv: Conv2d, gpu: Gpu) -> list[SplitTile]:
        """Every tile worth a trial."""
        found = []
        for split in SPLITS if self.unable(conv, "winograd") is None else ():
            if conv.in_channels % split == 0 and conv.in_channels // split >= LEAST_CHANNELS:
                for product in cuda_space.products(conv, gpu):
                    whole = cuda_space.space(parts_problem(conv, split), gpu, CudaPlan(), [product])
                    tiles = [SplitTile(**asdict(tile), split=split) for tile in whole]
                    found += sorted(tiles, key=lambda tile: self.estimate(conv, tile, gpu).seconds)[:MOST]
        return found

    def problems(self, conv: Conv2d, tile: Any, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks."""
        reason = self.unable(conv, "winograd")
        if reason is not None:
            return [reason]
        if tile.split < 2 or conv.in_channels % tile.split:
            return [f"`split` (={tile.split}) must be at least 2 and divide the {conv.in_channels} channels"]
        return legality.problems(parts_problem(conv, tile.split), tile.inner, gpu, CudaPlan())

    def estimate(self, conv: Conv2d, tile: Any, gpu: Gpu) -> Estimate:
        """The model's estimate: of the parts' products, and of adding them up from level-2 cache, or from memory."""
        products = model.estimate(parts_problem(conv, tile.split), tile.inner, gpu, CudaPlan())
        stored = self.made_bytes(conv, tile)
        passing = max(2 * stored - model.L2_SHARE, 0) / gpu.dram_bytes_s
        adding = stored / gpu.l2_bytes_s + conv.output_bytes / gpu.l2_bytes_s
        return replace(products, transform=products.transform + adding + passing + model.LAUNCH_S)

    def pack(self, conv: Conv2d, tile: Any) -> Pack:
        """How filters are packed for a tile."""
        pack: Pack = tile.pack(conv)
        return pack

    def shape(self, tile: Any) -> tuple[Any, ...]:
        """What makes two tiles alike enough that one of them is enough to begin with."""
        return tile.split, tile.product, tile.warp_m, tile.warp_n

    def kernels(self, conv: Conv2d, tile: Any, gpu: Gpu) -> dict[str, Any]:
        """The kernels, in one function by its name."""
        return {SYMBOL: split_kernel(conv, tile, SYMBOL)}
