"""What all loaders of TMA boxes share: their tensor map, and the place of a tile of outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import CHUNK, Expr
from im2win.schedules.cuda.tiles.persistent import HaloTile
from im2win.spec.dtypes import STORED

ENCODE = "runtime.cuTensorMapEncodeTiled"  # TVM's function that encodes a tensor map with the CUDA driver
SWIZZLES = {CHUNK: 0, 64: 2, 128: 3}  # the driver's enumerators of swizzle modes by bytes of a row
PROMOTED = 2  # the driver's enumerator of 128-byte promotion in level-2 cache

Axes = tuple[int, int, int, int]


class Boxes(ABC):
    """The input of a kernel as TMA boxes of one tensor map.

    Args:
        halo: the halo tile of a step, whose problem boxes are cut from.
        source: the input tensor.
        sizes: elements of the tensor along four axes, the innermost first. strides: elements from one to the next of the last three axes.
        box, steps: elements of a box along each axis with those between, and how far apart those are that it takes.
        row_bytes: bytes of a row of the box in shared memory, whose 16-byte units are swizzled.
    """

    def __init__(
        self, halo: HaloTile, source: Any, sizes: Axes, strides: tuple[int, int, int], box: Axes, steps: Axes, row_bytes: int
    ) -> None:
        self._halo, conv = halo, halo.conv
        self._map = tirx.Var("boxes", T.handle("tensormap").ty)
        T.Bind(T.tvm_stack_alloca("tensormap", 1), var=self._map)
        shape = (*sizes, *(stride * conv.itemsize for stride in strides), *box, *steps)
        T.evaluate(T.call_packed(ENCODE, self._map, STORED[conv.dtype], 4, source.data, *shape, 0, SWIZZLES[row_bytes], PROMOTED, 0))

    def place(self, output_tile: Expr) -> tuple[Expr, Expr, Expr]:
        """(first image, row, column) of a tile of outputs, the latter two among the tiles of an image."""
        down, across = self._halo.counts
        return output_tile // (down * across) * self._halo.images, output_tile // across % down, output_tile % across

    @abstractmethod
    def copy(self, stage: tuple[Any, Expr], output_tile: Expr, part: Expr, full: Expr, channel: Expr, rank: Expr) -> None:
        """Emits the copies of a step; one thread must execute them.

        Args:
            stage: (buffer, index of its stage).
            output_tile: index of the tile of outputs. part: index of the step in the tile.
            full: the full barrier, which counts the bytes that arrive.
            channel: the first input channel of the tile's first step.
            rank: of the block in a cluster whose blocks share the copies.
        """
