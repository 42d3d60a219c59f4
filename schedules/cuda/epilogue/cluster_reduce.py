"""Reduction of accumulators across a cluster whose blocks compute the same outputs, each for its part of the steps.

Every block writes some columns of the tile of outputs. It receives the accumulators of these columns from all other blocks in its shared
memory, and adds them to its own.
"""

from __future__ import annotations

import itertools

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.epilogue.lane_exchange import TileEpilogue
from im2win.schedules.cuda.mma.wgmma_shared_rows import StagedProduct
from im2win.schedules.cuda.primitives import WORD, Arena, Expr, call, pointer
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import EIGHT, PHASES, M
from im2win.schedules.cuda.tiles.warp_specialized import WARP

FOUR = 4  # accumulators of a thread for 64 channels and eight columns


class SharedSums:
    """The exchange of accumulators between the blocks of a cluster, once a tile of outputs.

    Args:
        rank: of the block in its cluster.
        again: whether a block computes several tiles.
    """

    def __init__(self, arena: Arena, field: StagedHaloTile, tid: Expr, rank: Expr, *, again: bool) -> None:
        self._again = again
        self._field, self._tid, self._rank, self._blocks = field, tid, rank, field.tile.sum_blocks
        self._received = arena.take("received", field.received, field.tile.sum_dtype)
        self._full, self._read = arena.take("sums_full", (1,), PHASES), arena.take("sums_read", (1,), PHASES)

    def start(self) -> None:
        """One thread initialises the barriers."""
        call("init_full_barrier", pointer(self._full, 0))
        call(f"init_empty_barrier<{self._blocks * self._field.tile.multipliers // WARP}>", pointer(self._read, 0))

    def write(self, product: StagedProduct, epilogue: TileEpilogue, item: Expr) -> None:
        """Exchanges the accumulators of a tile, and emits the epilogue of the columns that this block writes.

        Args:
            item: index of the tile among those of the block.
        """
        self._await_read(item)
        for rank, columns in enumerate(self._field.written):
            with T.If(self._rank != rank), T.Then():
                self._send(product, rank, columns)
        for rank, columns in enumerate(self._field.written):
            with T.If(self._rank == rank), T.Then():
                self._add(product, columns, item)
                product.keep(columns)
                epilogue.write(product)

    def end(self, count: Expr) -> None:
        """After the last tile: waits until all blocks have read what this block sent, so that no access to shared memory is in flight."""
        self._await_read(count)

    def _await_read(self, item: Expr) -> None:
        """Waits until all blocks have read what they received for the tile before."""
        call("wait_empty_barrier", pointer(self._read, 0), (item + 1) % 2)

    def _place(self, sender: Expr, i: int, j: int) -> Expr:
        """Address of a thread's four accumulators from block `sender`, of the i-th product and the j-th run of columns."""
        rows, tile = self._field.tile.warp_m // M, self._field.tile
        return pointer(self._received, sender, ((j * rows + i) * tile.multipliers + self._tid) * FOUR)

    def _send(self, product: StagedProduct, rank: int, columns: list[int]) -> None:
        sender = self._rank - (self._rank > rank).astype("int32")
        for (j, column), i in itertools.product(enumerate(columns), range(product.rows)):
            call(f"send_four<{self._blocks}>", self._place(sender, i, j), product.four(i, column), rank, pointer(self._full, 0))

    def _add(self, product: StagedProduct, columns: list[int], item: Expr) -> None:
        tile = self._field.tile
        with T.If(self._tid == 0), T.Then():
            size = (self._blocks - 1) * len(columns) * tile.block_m * EIGHT * WORD
            call("expect_bytes", pointer(self._full, 0), size)
        call("wait_full_barrier", pointer(self._full, 0), item % 2)
        for sender, (j, column), i in itertools.product(range(self._blocks - 1), enumerate(columns), range(product.rows)):
            call("add_four", product.four(i, column), self._place(sender, i, j))
        if self._again:
            call("warp_barrier")  # all lanes have read what other blocks overwrite after the release
        call(f"arrive_empty_barrier<{self._blocks}>", pointer(self._read, 0))
