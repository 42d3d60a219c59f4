"""Filter packing of split-K kernels, whose sum is cut into parts (numpy only, no compiler)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.packing.mma_fragments import CudaPack
from im2win.spec.conv2d import Conv2d


@functools.lru_cache(maxsize=1024)
def parts_problem(conv: Conv2d, split: int) -> Conv2d:
    """The partial sums as one convolution: each part is a group with all filters, and there is no epilogue.

    Raises:
        ConvError: `split` does not divide the channels.
    """
    plain = {"bias": False, "residual": False, "activation": "none", "out_dtype": None}
    return conv.with_(out_channels=split * conv.out_channels, groups=split, **plain)


@dataclass(frozen=True)
class SplitPack:
    """Filters packed as `CudaPack` packs those of `parts_problem`; for problems of one group.

    Attributes:
        split: parts of the sum.
        form, block, order, slabs, run, parts: see `CudaPack`.
    """

    split: int
    form: str
    block: int
    order: str
    slabs: int
    run: int = 1
    parts: int = 0

    @property
    def inner(self) -> CudaPack:
        """The packing of the filters of `parts_problem`."""
        return CudaPack(self.form, self.block, self.order, self.slabs, self.run, self.parts)

    def shape(self, conv: Conv2d) -> tuple[int, int, int]:
        """Shape of the packed filter, in elements."""
        return self.inner.shape(parts_problem(conv, self.split))

    def filter(self, conv: Conv2d, w: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Packs filters of `conv.filter_shape` into `shape(conv)`, contiguous."""
        problem = parts_problem(conv, self.split)
        by_part = w.reshape(len(w), self.split, -1, *w.shape[2:]).swapaxes(0, 1)
        return self.inner.filter(problem, np.ascontiguousarray(by_part).reshape(problem.filter_shape))
