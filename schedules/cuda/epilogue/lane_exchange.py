"""Epilogues of persistent kernels: lanes exchange accumulators so that stores are wide, and columns that are no outputs are dropped."""

from __future__ import annotations

import itertools
from typing import Any, cast

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.epilogue.output_columns import Outputs
from im2win.schedules.cuda.epilogue.requantise import exchanged, store_word
from im2win.schedules.cuda.epilogue.store import Epilogue, finished, value_type
from im2win.schedules.cuda.mma.wgmma_shared import SharedProduct
from im2win.schedules.cuda.primitives import Expr, call, local, pointer
from im2win.schedules.cuda.tiles.persistent import EIGHT, PersistentTile, channel_run
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

LANE_OF_NEXT = 4  # lanes between the one that holds two channels and the one of the next two
BYTES = 8  # bytes that a lane stores at a time


def two_outputs(conv: Conv2d, pair: list[Expr]) -> Expr:
    """Two outputs as one word; outputs of one byte fill its lower half."""
    return T.call_extern("uint32", f"im2win::{ELEMENT_TYPES[conv.out_dtype].pair or 'two_f16'}", *pair)


def tile_epilogue(conv: Conv2d, tile: PersistentTile, tensors: dict[str, Any], operand: Outputs, first: Expr) -> TileEpilogue:
    """The epilogue of a tile of outputs, for channels from `first` on, with the widest stores that the layout and alignment allow."""
    kind = TileEpilogue
    if conv.residual or conv.out_itemsize > 2:
        pass
    elif conv.layout == "NHWC":
        kind = _Channels if ELEMENT_TYPES[conv.out_dtype].itemsize == 1 and conv.out_channels % 4 == 0 else kind
    else:
        width = BYTES // conv.out_itemsize
        aligned = operand.pitch % width == 0 and conv.output_size[1] % width == 0 and tile.cols % (2 * width) == 0
        kind = _Columns if aligned and operand.images == tile.sum_blocks == 1 else kind
    return kind(conv, tile, tensors, operand, first)


class TileEpilogue(Epilogue):
    """Writes the accumulators of a tile of outputs.

    A thread holds two channels of two neighbouring columns. These are two neighbours in memory, which as int8 or float16 are less than a
    store of 4 bytes. Where alignment allows it, lanes exchange accumulators before they store; see `tile_epilogue`.
    """

    def __init__(self, conv: Conv2d, tile: PersistentTile, tensors: dict[str, Any], operand: Outputs, first: Expr) -> None:
        self._conv, self._tile, self._tensors, self._operand = conv, cast(Any, tile), tensors, operand
        self._first, self._group = first, tirx.const(0, "int32")
        self._run = channel_run(conv) if conv.layout == "NHWC" else operand.run_of_outputs
        self._values = local("values", (self._run,), value_type(conv))

    def _counted(self) -> int:
        """Channels among which a block's are counted: all, since a block may hold several groups."""
        return self._conv.out_channels

    def _inside(self, channel: Expr) -> list[Expr]:
        """The condition under which a channel exists; empty if it always does."""
        return [channel < self._conv.out_channels] if self._conv.out_channels % self._tile.block_m else []

    def _finished(self, product: SharedProduct, vectors: dict[str, Any], i: int, half: int, j: int, e: int) -> Expr:
        return finished(self._conv, self._tile.sum_dtype, vectors, product.sum(i, half, j, e), i * 2 + half, 0)

    def _vectors(self, product: SharedProduct) -> dict[str, Any]:
        """Bias and scale of a thread's channels in registers, by name, two for every product.

        Channels beyond the last read the last one's.
        """
        vectors: dict[str, Any] = {}
        for name in ("bias", "scale"):
            if name in self._tensors:
                vectors[name] = local(f"vector_{name}", (2 * product.rows,), self._conv.dtypes[name])
                for i, half in itertools.product(range(product.rows), range(2)):
                    channel = T.min(self._first + product.channel(i, half), self._conv.out_channels - 1)
                    T.buffer_store(vectors[name], self._tensors[name][channel], [i * 2 + half])
        return vectors


class _Channels(TileEpilogue):
    """Outputs of one byte, channels last: lanes 4*g + t with g and g + 1, g even, exchange their values of columns 2*t and 2*t + 1.

    Each then stores four channels of one column.
    """

    def write(self, product: SharedProduct) -> None:
        """Emits the stores."""
        conv, (out_h, out_w), vectors = self._conv, self._conv.output_size, self._vectors(product)
        column, channel = product.fours()
        words = local("words", (product.rows,), "uint32")
        for j in product.kept:
            for i in range(product.rows):
                pairs = [[self._finished(product, vectors, i, half, j, e) for half in range(2)] for e in range(2)]
                T.buffer_store(words, exchanged(conv.out_dtype, pairs, LANE_OF_NEXT), [i])
            n, m, x, conditions = self._operand.output((j * EIGHT, column))
            start = ((n * out_h + m) * out_w + x) * conv.out_channels

            def store(start: Expr = start) -> None:
                for i in range(product.rows):
                    at = self._first + channel(i)
                    self._guarded(self._inside(at), lambda i=i, at=at: store_word(self._tensors["output"], start + at, words[i]))  # type: ignore[misc]

            self._guarded(conditions, store)


class _Columns(TileEpilogue):
    """Channels first: lanes with the same channels exchange neighbouring columns, and each stores eight bytes of one channel.

    Four lanes hold a run of eight columns. All four exchange int8 values of four such runs; pairs of lanes exchange float16 values of two
    runs. The four lanes then store 32 neighbouring bytes of one channel. Where a row has too few columns left, they store 16 bytes of each
    of two channels.

    A row of outputs may begin in the middle of a run. The first four of eight outputs are then in the last two lanes of this run, and the
    others in the first two lanes of the next run.
    """

    def write(self, product: SharedProduct) -> None:
        """Emits the stores."""
        conv, tile, vectors, eights = self._conv, self._tile, self._vectors(product), self._tile.cols // EIGHT
        lanes = BYTES // (2 * conv.out_itemsize)  # lanes that exchange
        pieces = local("pieces", (2, eights + 1), "uint32")  # words of two outputs, for each of two channels and each run
        for row_, i in itertools.product(range(tile.rows), range(product.rows)):
            first, shift = divmod(row_ * self._operand.pitch, EIGHT)
            for half, k in itertools.product(range(2), range(eights + (shift > 0))):
                pair = [self._finished(product, vectors, i, half, first + k, e) for e in range(2)]
                T.buffer_store(pieces, two_outputs(conv, pair), [half, k])
            for at in range(0, eights, lanes):
                many = min(lanes, eights - at)
                for half in range(0, 2, lanes // many):
                    self._store_eights(product, pieces, (row_, i, half, at), lanes, many, shift > 0)

    def _store_eights(
        self, product: SharedProduct, pieces: Any, place: tuple[int, int, int, int], lanes: int, many: int, shifted: bool
    ) -> None:
        """Emits the stores of `many` runs of eight outputs in a row.

        They belong to one channel, or with fewer runs than lanes to both channels of a thread.

        Args:
            place: (row of outputs, product, which of two channels, first run). lanes: lanes that exchange.
            shifted: whether the row begins in the middle of a run.
        """
        conv, t, (row_, i, half, at) = self._conv, product.t, place
        own, eight = local("own", (lanes,), "uint32"), local("eight", (2,), "uint32")
        for k in range(lanes):
            of, which = half + k // many, at + k % many
            piece = pieces[of, which]
            T.buffer_store(own, tirx.Select(t < 2, pieces[of, which + 1], piece) if shifted else piece, [k])
        call(f"gather_eight<{lanes}>", pointer(eight, 0), pointer(own, 0))
        mine, within = t % lanes, ((t + 2) % 4 if shifted else t) // lanes
        column = (at + mine % many) * EIGHT + within * (2 * lanes)
        channel = self._first + product.channel(i, half + mine // many)
        n, m, x, conditions = self._operand.at(tirx.const(row_, "int32"), column)
        to = pointer(self._tensors["output"], ((n * conv.out_channels + channel) * conv.output_size[0] + m) * conv.output_size[1] + x)
        self._guarded([*conditions, *self._inside(channel)], lambda: call("store_eight", to, pointer(eight, 0)))
