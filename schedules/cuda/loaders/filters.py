"""Filters on their way to shared memory: a block's, `steps` times `run` elements, one after the other as they are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.arithmetic import SLAB
from im2win.schedules.cuda.primitives import CHUNK, Arena, Expr, call, padded, pointer
from im2win.schedules.cuda.tiles.multistage import MultistageTile

PHASES = "int64"  # type of a barrier that counts what lands


def shared_bytes(tile: MultistageTile, run: int) -> int:
    """Bytes of shared memory that filters take."""
    return padded((tile.stages, run), tile.dtype) + (padded((tile.stages,), PHASES) if tile.warpgroup else 0)


class Filters:
    """Copied by all threads, who wait for them as for windows."""

    def __init__(self, tile: MultistageTile, arena: Arena, packed: Any, block: Expr, steps: int, run: int, tid: Expr) -> None:
        self._tile, self._packed, self._block, self._steps, self._run, self._tid = tile, packed, block, steps, run, tid
        self.shared = arena.take("filters", (tile.stages, run), tile.dtype)

    def begin(self, step: Expr, slot: Expr) -> None:
        """Begins to copy a step's filters."""
        tile, run = self._tile, self._run
        vector = CHUNK * tile.slab // SLAB
        start, copies = (self._block * self._steps + step) * run, run // vector
        for done in range(0, copies, tile.threads):
            at = (done + self._tid) * vector

            def one(at: Expr = at) -> None:
                call(f"copy_async<{CHUNK}>", pointer(self.shared, slot, at), pointer(self._packed, start + at))

            if done + tile.threads <= copies:
                one()
            else:
                with T.If(done + self._tid < copies), T.Then():
                    one()

    def renew(self, step: Expr, slot: Expr) -> None:
        """Behind a barrier, when all threads have read the slot: copies a step's filters to it."""
        self.begin(step, slot)

    def wait(self, step: Expr) -> None:
        """Behind the step's barrier they have landed."""


class BulkFilters(Filters):
    """Copied as a whole at the word of one thread: for products that read shared memory by themselves."""

    def __init__(self, tile: MultistageTile, arena: Arena, packed: Any, block: Expr, steps: int, run: int, tid: Expr) -> None:
        super().__init__(tile, arena, packed, block, steps, run, tid)
        self._phases = arena.take("phases", (tile.stages,), PHASES)
        with T.If(tid == 0), T.Then(), T.unroll(tile.stages) as stage:
            call("start_phases", pointer(self._phases, stage))

    def begin(self, step: Expr, slot: Expr) -> None:
        """Begins to copy a step's filters."""
        with T.If(self._tid == 0), T.Then():
            call("copy_bulk", *self._copy(step, slot))

    def _copy(self, step: Expr, slot: Expr) -> tuple[Expr, Expr, int, Expr]:
        """To where, from where, bytes, and the barrier that counts them."""
        size = self._run * np.dtype(self._tile.dtype).itemsize
        from_ = pointer(self._packed, (self._block * self._steps + step) * self._run)
        return pointer(self.shared, slot, 0), from_, size, pointer(self._phases, slot)

    def wait(self, step: Expr) -> None:
        """Until they have landed."""
        call("wait_bulk", pointer(self._phases, step % self._tile.stages), step // self._tile.stages % 2)
