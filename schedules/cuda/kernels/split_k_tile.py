"""The numbers of a schedule that cuts the sum."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from im2win.packing.split_k import SplitPack, parts_problem
from im2win.schedules.cuda.kernels.multistage import pack_of
from im2win.schedules.cuda.tiles.multistage import CudaTile
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class SplitTile(CudaTile):
    """A tile of the product that every part computes.

    split: parts of the sum, neighbouring channels each.
    """

    split: int = 1

    @property
    def inner(self) -> CudaTile:
        """The tile of the products alone."""
        return CudaTile(**{field.name: getattr(self, field.name) for field in fields(CudaTile)})

    def pack(self, conv: Conv2d) -> SplitPack:
        """How filters are packed."""
        values = asdict(pack_of(parts_problem(conv, self.split), self.inner))
        values.pop("outputs")
        return SplitPack(self.split, **values)

    def sums_of(self, conv: Conv2d) -> int:
        """Sums of all parts, elements."""
        return self.split * math.prod(conv.output_shape)
