"""Multistage kernels: threads fill pipeline stages in shared memory ahead of the product.

A block computes one tile, from any source of windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.schedules.cuda.families.base import CudaSchedule
from im2win.schedules.cuda.kernels.multistage import pack_of, product_kernel
from im2win.schedules.cuda.kernels.output_parts import WindowsInParts, parts_kernel, parts_transform
from im2win.schedules.cuda.legality.multistage import violations
from im2win.schedules.cuda.loaders.stored_windows import transform_kernel
from im2win.schedules.cuda.model import floor
from im2win.schedules.cuda.model.multistage import Estimate, estimate
from im2win.schedules.cuda.space import multistage
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL, TRANSFORM, TRANSFORM_PARTS


def products(conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[str]:
    """The kinds of arithmetic (names in `PRODUCTS`) that a problem may be computed with on a GPU at an accuracy."""
    return [name for name in multistage.products(conv, gpu) if allows(accuracy, PRODUCTS[name].accuracy)]


def least(conv: Conv2d, gpu: Gpu, windows: WindowSource, names: Sequence[str], positions: int = 1) -> Estimate:
    """An estimate that is at most that of any tile of the space with these kinds of arithmetic; see `model.floor`.

    Args:
        positions: products of a window with each filter, see `MultistageTile`.
    """
    return floor.multistage(conv, gpu, windows, names, multistage.MOST_AHEAD, positions * multistage.most_depth(conv, windows))


@dataclass(frozen=True)
class MultistageTiles(CudaSchedule):
    """Base of schedules whose tiles are `MultistageTile`."""

    def tile(self, values: Mapping[str, Any]) -> MultistageTile:
        """The tile with these plain values.

        Raises:
            ValueError: the values are not those of a tile.
        """
        return MultistageTile.from_dict(values)

    def pack(self, conv: Conv2d, tile: MultistageTile) -> Pack:
        """The packing of filters for a tile."""
        return pack_of(conv, tile)


@dataclass(frozen=True)
class Multistage(MultistageTiles):
    """One kernel multiplies filters by windows. Where windows are stored, a transform kernel runs before it."""

    windows: WindowSource = WindowSource()  # noqa: RUF009 - frozen

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem with that accuracy; None if one does."""
        if self.windows.halo and math.prod(conv.kernel) == 1:
            return "the windows of a 1x1 kernel share no taps: implicit_gemm copies them as well"
        return None

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the stored tensor of windows; 0 where there is none."""
        return self.windows.transform_bytes(conv)

    def workspace_bytes(self, conv: Conv2d, tile: MultistageTile) -> int:
        """Bytes of the stored tensor of windows; 0 where there is none."""
        return self.windows.transform_bytes(conv)

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[MultistageTile]:
        """Every legal tile worth a trial, in a fixed order."""
        return multistage.space(conv, gpu, self.windows, products(conv, gpu, accuracy))

    def violations(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""
        return violations(conv, tile, gpu, self.windows)

    def estimate(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> Estimate:
        """The cost model's estimate for a legal tile."""
        return estimate(conv, tile, gpu, self.windows)

    def floor(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> float:
        """Seconds that no tile of the space is estimated below."""
        return floor.seconds([least(conv, gpu, self.windows, products(conv, gpu, accuracy))])

    def kernels(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> dict[str, Any]:
        """The product kernel, and the transform kernel where windows are stored."""
        functions = {SYMBOL: product_kernel(conv, tile, self.windows, SYMBOL)}
        if self.windows.axes:
            functions[TRANSFORM] = transform_kernel(conv, self.windows.oriented(conv), TRANSFORM)
        return functions


@dataclass(frozen=True)
class OutputParts(Multistage):
    """Windows are stored for one part of the output at a time (MCFA); transform and product alternate."""

    windows: WindowsInParts = WindowsInParts()  # noqa: RUF009 - frozen

    def kernels(self, conv: Conv2d, tile: MultistageTile, gpu: Gpu) -> dict[str, Any]:
        """The whole convolution, and the transforms of all parts by themselves for measuring."""
        return {
            SYMBOL: parts_kernel(conv, tile, self.windows, SYMBOL),
            TRANSFORM_PARTS: parts_transform(conv, self.windows, TRANSFORM_PARTS),
        }
