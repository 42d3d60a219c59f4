"""Sums of the same outputs in the blocks of a cluster, each of its part of the steps.

Every block writes some columns of the patch. It gets the sums of these from all others, in its shared memory, and adds them to its own.
"""

from __future__ import annotations

import itertools

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.epilogue.lane_exchange import PatchEpilogue
from im2win.schedules.cuda.mma.wgmma_shared_rows import StagedProduct
from im2win.schedules.cuda.primitives import WORD, Arena, Expr, call, pointer
from im2win.schedules.cuda.tiles.persistent import EIGHT, PHASES, M
from im2win.schedules.cuda.tiles.warp_specialized import WARP, StagedHaloTile

FOUR = 4  # sums that a thread holds of 64 channels and eight columns


class SharedSums:
    """What blocks of a cluster send each other, once a patch.

    Args:
        rank: of the block in its cluster.
        again: whether a block computes several patches.
    """

    def __init__(self, arena: Arena, field: StagedHaloTile, tid: Expr, rank: Expr, *, again: bool) -> None:
        self._again = again
        self._field, self._tid, self._rank, self._blocks = field, tid, rank, field.tile.sum_blocks
        self._received = arena.take("received", field.received, field.tile.sum_dtype)
        self._landed, self._read = arena.take("sums_landed", (1,), PHASES), arena.take("sums_read", (1,), PHASES)

    def start(self) -> None:
        """One thread starts the barriers."""
        call("start_phases", pointer(self._landed, 0))
        call(f"start_slot<{self._blocks * self._field.tile.multipliers // WARP}>", pointer(self._read, 0))

    def write(self, product: StagedProduct, epilogue: PatchEpilogue, turn: Expr) -> None:
        """Exchanges the sums of a patch, and emits the stores of those columns that are this block's."""
        self._await_read(turn)
        for rank, columns in enumerate(self._field.written):
            with T.If(self._rank != rank), T.Then():
                self._send(product, rank, columns)
        for rank, columns in enumerate(self._field.written):
            with T.If(self._rank == rank), T.Then():
                self._add(product, columns, turn)
                product.keep(columns)
                epilogue.write(product)

    def end(self, count: Expr) -> None:
        """Behind the last patch: until no other block reads what this one sent, or sends it something."""
        self._await_read(count)

    def _await_read(self, turn: Expr) -> None:
        """Until all have read what they got in the turn before."""
        call("wait_slot", pointer(self._read, 0), (turn + 1) % 2)

    def _place(self, sender: Expr, i: int, j: int) -> Expr:
        """Of a thread's four sums of a block."""
        rows, tile = self._field.tile.warp_m // M, self._field.tile
        return pointer(self._received, sender, ((j * rows + i) * tile.multipliers + self._tid) * FOUR)

    def _send(self, product: StagedProduct, rank: int, columns: list[int]) -> None:
        sender = self._rank - (self._rank > rank).astype("int32")
        for (j, column), i in itertools.product(enumerate(columns), range(product.rows)):
            call(f"send_four<{self._blocks}>", self._place(sender, i, j), product.four(i, column), rank, pointer(self._landed, 0))

    def _add(self, product: StagedProduct, columns: list[int], turn: Expr) -> None:
        tile = self._field.tile
        with T.If(self._tid == 0), T.Then():
            size = (self._blocks - 1) * len(columns) * tile.block_m * EIGHT * WORD
            call("expect_bytes", pointer(self._landed, 0), size)
        call("wait_bulk", pointer(self._landed, 0), turn % 2)
        for sender, (j, column), i in itertools.product(range(self._blocks - 1), enumerate(columns), range(product.rows)):
            call("add_four", product.four(i, column), self._place(sender, i, j))
        if self._again:
            call("warp_barrier")  # all lanes have read what others may write over then
        call(f"release_slot<{self._blocks}>", pointer(self._read, 0))
