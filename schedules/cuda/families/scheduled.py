"""TVM schedules of dense layers: one body for every algorithm of `compute`, rewritten by the reconstructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.schedules.cuda.arithmetic import NATIVE
from im2win.schedules.cuda.families.base import CudaSchedule, Reconstruction
from im2win.schedules.cuda.legality import scheduled as legality
from im2win.schedules.cuda.legality import scheduled_mma as mma_legality
from im2win.schedules.cuda.model import scheduled as model
from im2win.schedules.cuda.model import scheduled_mma as mma_model
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.scheduled import dense, tensorized
from im2win.schedules.cuda.scheduled.gemm import Stage
from im2win.schedules.cuda.scheduled.passes import PIPELINE, WARP_PIPELINE
from im2win.schedules.cuda.space.scheduled import space
from im2win.schedules.cuda.space.scheduled_mma import SLABS
from im2win.schedules.cuda.space.scheduled_mma import space as mma_space
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.schedules.cuda.tiles.scheduled_mma import ScheduledMmaTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL, TRANSFORM_PARTS

Tile = ScheduledTile | ScheduledMmaTile

ALIGNMENT = 128  # bytes, of a tensor between kernels
RULES = "pipelines+copies"  # of all tiles of the space
MORE_RULES = {ScheduledTile: "wide+bounds", ScheduledMmaTile: "bounds"}  # of some tiles besides: they pay on some layers only
MOST = 12  # tiles that have them, those that the cost model ranks first


@dataclass(frozen=True)
class Scheduled(CudaSchedule):
    """Schedules of one algorithm's definition: of float32 on CUDA cores (`ScheduledTile`), of narrow types on tensor cores.

    define: the definition, (conv, pack) -> the kernel's tensors. stage: how its transform is treated.
    stored: bytes of the tensor of windows, by the algorithm's formula.
    """

    define: Callable[..., Sequence[Any]]
    stage: Stage
    stored: Callable[[Conv2d], int]

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem with that accuracy; None if one does."""
        return mma_legality.unsupported_reason(conv) if conv.dtype in NATIVE else legality.unsupported_reason(conv)

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the tensor of windows in global memory; 0 where there is none."""
        return self.stored(conv) if self.stage.stored else 0

    def workspace_bytes(self, conv: Conv2d, tile: Tile) -> int:
        """Bytes of the tensor of windows in global memory, rounded up to whole lines."""
        return -(-self.transform_bytes(conv) // ALIGNMENT) * ALIGNMENT

    def tile(self, values: Mapping[str, Any]) -> Tile:
        """The tile with these plain values.

        Raises:
            ValueError: the values are not those of a tile.
        """
        return ScheduledMmaTile.from_dict(values) if "warp_m" in values else ScheduledTile.from_dict(values)

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[Any]:
        """Every legal tile worth a trial, in a fixed order: those of one rule set, and those that are ranked first with more rules."""
        tiles: list[Any] = list(mma_space(conv, gpu) if conv.dtype in NATIVE else space(conv, gpu, order_of_windows=self.stage.order))
        first = sorted(tiles, key=lambda tile: self.estimate(conv, tile, gpu).seconds)[:MOST]
        more = [replace(tile, rules=f"{RULES}+{MORE_RULES[type(tile)]}") for tile in first if tile.rules == RULES]
        return tiles + [tile for tile in more if not self.violations(conv, tile, gpu)]

    def violations(self, conv: Conv2d, tile: Tile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""
        if isinstance(tile, ScheduledMmaTile) and conv.dtype in NATIVE:
            return mma_legality.violations(conv, tile, gpu)
        if isinstance(tile, ScheduledTile) and conv.dtype not in NATIVE:
            return legality.violations(conv, tile, gpu)
        return [f"`product` (={tile.product}) of the tile is not for {conv.dtype}"]

    def estimate(self, conv: Conv2d, tile: Tile, gpu: Gpu) -> Estimate:
        """The cost model's estimate for a legal tile."""
        if isinstance(tile, ScheduledMmaTile):
            return mma_model.estimate(conv, tile, gpu, self.transform_bytes(conv))
        apart = 1 if self.stage.apart is None else self.stage.apart(conv)
        return model.estimate(conv, tile, gpu, self.transform_bytes(conv), apart)

    def floor(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> float:
        """Seconds that no tile of the space is estimated below."""
        if (row := NATIVE.get(conv.dtype)) is not None:
            return mma_model.floor(conv, gpu, row.kind, self.transform_bytes(conv), max(SLABS) * row.slab)
        return model.floor(conv, gpu, self.transform_bytes(conv))

    def pack(self, conv: Conv2d, tile: Tile) -> Pack:
        """The packing of filters for a tile."""
        return tensorized.pack_of(conv, tile) if isinstance(tile, ScheduledMmaTile) else dense.pack_of(conv, tile)

    def reconstruction(self, tile: Tile) -> Reconstruction:
        """How the reconstructor rewrites what TVM generates."""
        return Reconstruction(tile.rule_names, 0, WARP_PIPELINE if isinstance(tile, ScheduledMmaTile) else PIPELINE, must=False)

    def kernels(self, conv: Conv2d, tile: Tile, gpu: Gpu) -> dict[str, Any]:
        """The kernels of a legal tile: the convolution, with its transform where that is stored, and the transform alone for measuring."""
        tensors = self.define(conv, self.pack(conv, tile))
        if isinstance(tile, ScheduledMmaTile):
            found = {SYMBOL: tensorized.kernel(conv, tensors, self.stage, tile)}
        else:
            found = {SYMBOL: dense.kernel(conv, tensors, self.stage, tile)}
        if self.stage.stored:
            found[TRANSFORM_PARTS] = dense.transform(tensors, self.stage.name)
        return found
