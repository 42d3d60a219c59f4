"""TVM schedules of dense layers: one body for every algorithm of `compute`, rewritten by the reconstructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.packing.cpu_blocked import FilterPack
from im2win.schedules.cuda.families.base import CudaSchedule, Reconstruction
from im2win.schedules.cuda.legality.scheduled import unsupported_reason, violations
from im2win.schedules.cuda.model import scheduled as model
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.scheduled import dense
from im2win.schedules.cuda.scheduled.gemm import Stage
from im2win.schedules.cuda.scheduled.passes import PIPELINE
from im2win.schedules.cuda.space.scheduled import space
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL, TRANSFORM_PARTS

ALIGNMENT = 128  # bytes, of a tensor between kernels


@dataclass(frozen=True)
class Scheduled(CudaSchedule):
    """Schedules of one algorithm's definition with a `ScheduledTile`.

    define: the definition, (conv, pack) -> the kernel's tensors. stage: how its transform is treated.
    stored: bytes of the tensor of windows, by the algorithm's formula.
    """

    define: Callable[[Conv2d, FilterPack], Sequence[Any]]
    stage: Stage
    stored: Callable[[Conv2d], int]

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem with that accuracy; None if one does."""
        return unsupported_reason(conv)

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the tensor of windows in global memory; 0 where there is none."""
        return self.stored(conv) if self.stage.stored else 0

    def workspace_bytes(self, conv: Conv2d, tile: ScheduledTile) -> int:
        """Bytes of the tensor of windows in global memory, rounded up to whole lines."""
        return -(-self.transform_bytes(conv) // ALIGNMENT) * ALIGNMENT

    def tile(self, values: Mapping[str, Any]) -> ScheduledTile:
        """The tile with these plain values.

        Raises:
            ValueError: the values are not those of a tile.
        """
        return ScheduledTile.from_dict(values)

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[ScheduledTile]:
        """Every legal tile worth a trial, in a fixed order."""
        return list(space(conv, gpu, order_of_windows=self.stage.order))

    def violations(self, conv: Conv2d, tile: ScheduledTile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""
        return violations(conv, tile, gpu)

    def estimate(self, conv: Conv2d, tile: ScheduledTile, gpu: Gpu) -> Estimate:
        """The cost model's estimate for a legal tile."""
        apart = 1 if self.stage.apart is None else self.stage.apart(conv)
        return model.estimate(conv, tile, gpu, self.transform_bytes(conv), apart)

    def floor(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> float:
        """Seconds that no tile of the space is estimated below."""
        return model.floor(conv, gpu, self.transform_bytes(conv))

    def pack(self, conv: Conv2d, tile: ScheduledTile) -> Pack:
        """The packing of filters for a tile."""
        return dense.pack_of(conv, tile)

    def reconstruction(self, tile: ScheduledTile) -> Reconstruction:
        """How the reconstructor rewrites what TVM generates."""
        return Reconstruction(tile.rule_names, 0, PIPELINE, must=False)

    def kernels(self, conv: Conv2d, tile: ScheduledTile, gpu: Gpu) -> dict[str, Any]:
        """The kernels of a legal tile: the convolution, with its transform where that is stored, and the transform alone for measuring."""
        tensors = self.define(conv, dense.pack_of(conv, tile))
        found = {SYMBOL: dense.kernel(conv, tensors, self.stage, tile)}
        if self.stage.stored:
            found[TRANSFORM_PARTS] = dense.transform(tensors, self.stage.name)
        return found
