"""What every tile of a CUDA schedule answers, whatever its family."""

from __future__ import annotations

from typing import Any, Protocol

from im2win.schedules.cuda.arithmetic import PRODUCTS, Product
from im2win.schedules.plain import PlainTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


class CudaTile(Protocol):
    """The numbers of a CUDA schedule, as callers outside the schedule see them.

    product: the kind of arithmetic, a name in `arithmetic.PRODUCTS`.
    block_m, block_n: output channels and outputs of a thread block. warp_m, warp_n: those of a warp or warpgroup.
    threads: of a block. accumulators: of a thread.
    accuracy: what of a float32 comes out, or "winograd" where transformed tiles are rounded.
    deduplication_key: tiles with equal keys are so alike that the tuner begins with one of them.
    """

    @property
    def product(self) -> str: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def warp_m(self) -> int: ...
    @property
    def warp_n(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def accumulators(self) -> int: ...
    @property
    def arithmetic(self) -> Product: ...
    @property
    def dtype(self) -> str: ...
    @property
    def accuracy(self) -> Accuracy: ...
    @property
    def deduplication_key(self) -> tuple[Any, ...]: ...
    def proven(self, conv: Conv2d) -> bool: ...
    def features(self) -> dict[str, float]: ...
    def as_dict(self) -> dict[str, Any]: ...


class BaseTile(PlainTile):
    """What a tile's kind of arithmetic says."""

    product: str

    @property
    def arithmetic(self) -> Product:
        """What `product` names."""
        return PRODUCTS[self.product]

    @property
    def dtype(self) -> str:
        """Element type of input and filter."""
        return self.arithmetic.dtype

    @property
    def sum_dtype(self) -> str:
        """Type of the accumulators."""
        return self.arithmetic.sum_dtype

    @property
    def accuracy(self) -> Accuracy:
        """What of a float32 comes out."""
        return self.arithmetic.accuracy

    def proven(self, conv: Conv2d) -> bool:
        """Whether a tile that nobody tuned for this problem may be used."""
        return True
