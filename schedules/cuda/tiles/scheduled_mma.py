"""The tile of TVM schedules of dense layers on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.common.caching import derived, hashed_once
from im2win.schedules.cuda.tiles.base import BaseTile
from im2win.spec.conv2d import Conv2d


@hashed_once
@dataclass(frozen=True)
class ScheduledMmaTile(BaseTile):
    """A product of filters [channels, K] by windows [K, outputs] in four levels: thread blocks, steps of the sum, warps, `mma.sync`.

    product: the kind of arithmetic, of a warp.
    block_m, block_n: output channels and outputs (pixels) of a thread block. block_k: elements of the sum in a step, which are copied to
        shared memory.
    warp_m, warp_n: output channels and outputs of a warp.
    order: loop order of the sum, outermost first: c channel, u kernel row, v kernel column. Filters are packed in it.
    stages: buffers in shared memory of a pipeline, which copies `stages - 1` steps ahead of the products; 1: copies and products alternate.
    rules: how the reconstructor rewrites what TVM generates: names of rule sets with "+" between them, or "".
    """

    product: str
    block_m: int
    block_n: int
    block_k: int
    warp_m: int
    warp_n: int
    order: str
    stages: int
    rules: str

    @property
    def warps(self) -> tuple[int, int]:
        """(warps of a block along channels, those along outputs)."""
        return self.block_m // self.warp_m, self.block_n // self.warp_n

    @derived
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps[0] * self.warps[1]

    @derived
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.warp_m * self.warp_n // 32

    @derived
    def rule_names(self) -> tuple[str, ...]:
        """Names of the reconstructor's rule sets, in order."""
        return tuple(self.rules.split("+")) if self.rules else ()

    def proven(self, conv: Conv2d) -> bool:
        """Not without tuning: kernels that are written loop by loop are faster where nothing was measured."""
        return False

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys count as alike; the tuner's first population takes one of them."""
        return self.block_m, self.block_n, self.warp_m, self.warp_n, self.block_k, self.rules

    def features(self) -> dict[str, float]:
        """Numerical features of a tile, for the tuner's cost model."""
        return {"stages": self.stages, "slabs": self.block_k // self.arithmetic.slab, "asynchronous": "copies" in self.rule_names}
