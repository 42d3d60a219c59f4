"""Persistent kernels whose halo tiles TMA copies. Filters stay resident in shared memory, or pass through pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.schedules.cuda.arithmetic import NATIVE, WARPGROUP_ONLY
from im2win.schedules.cuda.families.base import CudaSchedule
from im2win.schedules.cuda.kernels.persistent import persistent_kernel
from im2win.schedules.cuda.kernels.warp_specialized import warp_specialized_kernel
from im2win.schedules.cuda.legality import boxes
from im2win.schedules.cuda.legality import persistent as persistent_legality
from im2win.schedules.cuda.legality import warp_specialized as warp_specialized_legality
from im2win.schedules.cuda.model import floor
from im2win.schedules.cuda.model import persistent as persistent_model
from im2win.schedules.cuda.model import warp_specialized as warp_specialized_model
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.space import persistent as persistent_space
from im2win.schedules.cuda.space import warp_specialized as warp_specialized_space
from im2win.schedules.cuda.tiles.fields import copy_bytes
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

Tile = TypeVar("Tile", bound=PersistentTile)


@dataclass(frozen=True)
class Tma(CudaSchedule, Generic[Tile]):
    """A schedule with one kernel and one class of tiles. Its fields implement methods, or are numbers of its floor."""

    tiles: type[Tile]
    unsupported: Callable[[Conv2d], str | None]
    rules_broken: Callable[[Conv2d, Tile, Gpu], list[str]]
    worth_a_trial: Callable[[Conv2d, Gpu], list[Tile]]
    model: Callable[[Conv2d, Tile, Gpu], Estimate]
    begin_cycles: int
    kernel: Callable[[Conv2d, Tile, Gpu, str], Any]
    copy_bytes: Callable[[Conv2d, Tile], int] = lambda conv, tile: 0
    more_types: tuple[str, ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types of the problems that it may compute."""
        return (*NATIVE, *self.more_types)

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem; None if one does."""
        return self.unsupported(conv)

    def workspace_bytes(self, conv: Conv2d, tile: Tile) -> int:
        """Bytes of the copy of the input that a first kernel makes; 0 where there is none."""
        return self.copy_bytes(conv, tile)

    def tile(self, values: Mapping[str, Any]) -> Tile:
        """The tile with these plain values.

        Raises:
            ValueError: the values are not those of a tile.
        """
        return self.tiles.from_dict(values)

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[Tile]:
        """Every legal tile worth a trial, in a fixed order."""
        return self.worth_a_trial(conv, gpu)

    def violations(self, conv: Conv2d, tile: Tile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""
        return self.rules_broken(conv, tile, gpu)

    def estimate(self, conv: Conv2d, tile: Tile, gpu: Gpu) -> Estimate:
        """The cost model's estimate for a legal tile."""
        return self.model(conv, tile, gpu)

    def floor(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> float:
        """Seconds that no tile of the space is estimated below."""
        if self.unsupported(conv) is not None:
            return floor.seconds([])
        return floor.seconds([floor.persistent(conv, gpu, boxes.PRODUCTS[conv.dtype], self.begin_cycles)])

    def pack(self, conv: Conv2d, tile: Tile) -> Pack:
        """The packing of filters for a tile."""
        return tile.pack(conv)

    def kernels(self, conv: Conv2d, tile: Tile, gpu: Gpu) -> dict[str, Any]:
        """The kernel, by its symbol."""
        return {SYMBOL: self.kernel(conv, tile, gpu, SYMBOL)}


PERSISTENT = Tma(
    PersistentTile, persistent_legality.unsupported_reason, persistent_legality.violations, persistent_space.space,
    persistent_model.estimate, persistent_model.BEGIN_CYCLES, persistent_kernel,
)  # fmt: skip
"""Filters resident in shared memory; every warpgroup copies and multiplies halo tiles of its own."""
WARP_SPECIALIZED = Tma(
    WarpSpecializedTile, warp_specialized_legality.unsupported_reason, warp_specialized_legality.violations, warp_specialized_space.space,
    warp_specialized_model.estimate, warp_specialized_model.BEGIN_CYCLES, warp_specialized_kernel,
    copy_bytes, tuple(WARPGROUP_ONLY),
)  # fmt: skip
"""Filters and windows in pipeline stages, which producer warps fill and consumer warpgroups empty."""
