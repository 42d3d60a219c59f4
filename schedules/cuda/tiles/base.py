"""The protocol that tiles of every CUDA schedule implement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from im2win.common.caching import derived
from im2win.schedules.cuda.arithmetic import MULTIPLIERS, PRODUCTS, Product
from im2win.schedules.plain import PlainTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


class CudaTile(Protocol):
    """The parameters of a CUDA schedule, as callers outside the schedule see them.

    product: the kind of arithmetic, a name in `arithmetic.PRODUCTS`.
    block_m, block_n: output channels and outputs (pixels) of a thread block. warp_m, warp_n: those of a warp or warpgroup.
    threads: threads of a block. accumulators: accumulators of a thread.
    accuracy: accuracy of a float32 result, or "winograd" where transformed tiles are rounded to another type.
    deduplication_key: tiles with equal keys count as alike; the tuner's first population takes one of them.
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
    def in_type(self, dtype: str) -> Any: ...
    def as_dict(self) -> dict[str, Any]: ...


class BaseTile(PlainTile):
    """Properties that follow from a tile's kind of arithmetic."""

    product: str

    @derived
    def arithmetic(self) -> Product:
        """The kind of arithmetic that `product` names."""
        return PRODUCTS[self.product]

    @derived
    def dtype(self) -> str:
        """Element type of input and filter."""
        return self.arithmetic.dtype

    def in_type(self, dtype: str) -> Any:
        """The tile with the same kind of arithmetic in another element type; both have tensor-core products of their own."""
        changed: Any = self
        return replace(changed, product=self.product.replace(MULTIPLIERS[self.dtype].kind, MULTIPLIERS[dtype].kind))

    @property
    def sum_dtype(self) -> str:
        """Element type of the accumulators."""
        return self.arithmetic.sum_dtype

    @property
    def accuracy(self) -> Accuracy:
        """Accuracy of a float32 result."""
        return self.arithmetic.accuracy

    def proven(self, conv: Conv2d) -> bool:
        """Whether the tile may serve a problem that it was not tuned for."""
        return True
