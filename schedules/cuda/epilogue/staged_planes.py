"""Epilogue with channels first through shared memory: every warp stores runs of neighbouring outputs of a channel."""

from __future__ import annotations

import itertools
from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.epilogue.lane_exchange import TileEpilogue
from im2win.schedules.cuda.epilogue.output_columns import StagedOutputs
from im2win.schedules.cuda.epilogue.store import finished
from im2win.schedules.cuda.mma.wgmma_shared_rows import StagedProduct
from im2win.schedules.cuda.primitives import Expr, call, named
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import EIGHT
from im2win.schedules.cuda.tiles.warp_specialized import WARP


class StagedPlanes(TileEpilogue):
    """Accumulators of eight channels at a time pass through a buffer of the warp, [images, 8 channels, outputs of the tile].

    There they lie as in the output, but for the rest of every channel, so that lanes store up to 16 bytes each, side by side. Before them
    the buffer has the residual, which lanes load in the same way.
    """

    _operand: StagedOutputs

    def __init__(
        self, field: StagedHaloTile, tensors: dict[str, Any], operand: StagedOutputs, first: Expr, buffer: Any, tid: Expr
    ) -> None:  # fmt: skip
        super().__init__(field.conv, field.tile, tensors, operand, first)
        self._field, self._buffer, self._lane = field, buffer, tid % WARP
        self._begin = tid // WARP * field.output_buffer[1]

    def write(self, product: Any) -> None:
        """Emits the stores."""
        vectors = self._vectors(product)
        for i, half in itertools.product(range(product.rows), range(2)):
            if i or half:
                call("warp_barrier")
            channel = self._first + (product.channel(i, half) - product.g)
            if self._conv.residual:
                self._runs(channel, self._buffer, self._tensors["residual"], load=True)
                call("warp_barrier")
            self._stage(product, vectors, i, half)
            call("warp_barrier")
            self._runs(channel, self._tensors["output"], self._buffer, load=False)  # products of the next tile wait for all lanes

    def _stage(self, product: StagedProduct, vectors: dict[str, Any], i: int, half: int) -> None:
        tile = self._field.tile
        pitch = self._field.output_pitch
        for j in product.kept:
            for e in range(0, 2, self._run):
                image, down, col, conditions = self._operand.place((j * EIGHT, product.t * 2 + e))
                at = self._begin + (image * EIGHT + product.g) * pitch + down * tile.cols + col

                def store(at: Expr = at, e: int = e, j: int = j) -> None:
                    for k in range(self._run):
                        value, tensors = product.sum(i, half, j, e + k), {**vectors, "residual": self._buffer}
                        T.buffer_store(self._values, finished(self._conv, tile.sum_dtype, tensors, value, i * 2 + half, at + k), [k])
                    _copy(self._buffer, at, self._values, 0, self._run)

                self._guarded(conditions, store)

    def _runs(self, channel: Expr, to: Any, from_: Any, *, load: bool) -> None:
        """Emits the copies between tensor and buffer of the outputs of eight channels, from `channel` on."""
        field, conv, tile = self._field, self._field.conv, self._field.tile
        (height, width), outputs, wide = conv.output_size, tile.rows * tile.cols, field.stored
        (n, top, left), count = self._operand.corner, tile.images * EIGHT * outputs // wide
        for first in range(0, count, WARP):
            at = (first + self._lane) * wide
            image, of, rest = at // (EIGHT * outputs), at // outputs % EIGHT, at % outputs
            down, right = rest // tile.cols, rest % tile.cols
            place = ((n + image) * conv.out_channels + channel + of) * (height * width) + (top + down) * width + left + right
            conditions = [first + self._lane < count] if first + WARP > count else []
            ends = ((n + image, conv.batch, tile.images), (top + down, height, tile.rows), (left + right, width, tile.cols))
            conditions += [value < end for value, end, size in ends if end % size]
            conditions += self._inside(channel + of)
            held = self._begin + at + (image * EIGHT + of) * (field.output_pitch - outputs)
            places = (held, place) if load else (place, held)
            self._guarded(conditions, lambda places=places: _copy(to, places[0], from_, places[1], wide))  # type: ignore[misc]


def _copy(to: Any, at: Expr, from_: Any, begin: Expr, count: int) -> None:
    """Emits the copy of `count` neighbouring elements, which begin at a multiple of their number."""
    if count == 1:
        T.buffer_store(to, from_[begin], [at])
        return
    first, second = (named("run", T.bind(place // count)) * count if not isinstance(place, int) else place for place in (at, begin))
    with T.vectorized(count) as k:
        T.buffer_store(to, from_[second + k], [first + k])
