"""Depthwise layers on CUDA cores: sums over a kernel's taps, bound by memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.schedules.cuda.families.base import CudaSchedule, Reconstruction
from im2win.schedules.cuda.legality.depthwise import unsupported_reason, violations
from im2win.schedules.cuda.model.depthwise import estimate
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.scheduled import depthwise
from im2win.schedules.cuda.scheduled.passes import PIPELINE
from im2win.schedules.cuda.space.depthwise import space
from im2win.schedules.cuda.tiles.depthwise import DepthwiseTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL


@dataclass(frozen=True)
class Depthwise(CudaSchedule):
    """Schedules of `compute.depthwise` with a `DepthwiseTile`."""

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem with that accuracy; None if one does."""
        return unsupported_reason(conv)

    def tile(self, values: Mapping[str, Any]) -> DepthwiseTile:
        """The tile with these plain values.

        Raises:
            ValueError: the values are not those of a tile.
        """
        return DepthwiseTile.from_dict(values)

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[DepthwiseTile]:
        """Every legal tile worth a trial, in a fixed order."""
        return list(space(conv, gpu))

    def violations(self, conv: Conv2d, tile: DepthwiseTile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""
        return violations(conv, tile, gpu)

    def estimate(self, conv: Conv2d, tile: DepthwiseTile, gpu: Gpu) -> Estimate:
        """The cost model's estimate for a legal tile."""
        return estimate(conv, tile, gpu)

    def pack(self, conv: Conv2d, tile: DepthwiseTile) -> Pack:
        """The packing of filters for a tile."""
        return depthwise.pack_of(conv, tile)

    def reconstruction(self, tile: DepthwiseTile) -> Reconstruction:
        """How the reconstructor rewrites what TVM generates."""
        return Reconstruction((), 0, PIPELINE)

    def kernels(self, conv: Conv2d, tile: DepthwiseTile, gpu: Gpu) -> dict[str, Any]:
        """The kernel of a legal tile."""
        return {SYMBOL: depthwise.kernel(conv, tile)}
