"""Loaders of filters: `run` contiguous packed elements for each of a block's `steps`."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.arithmetic import SLAB
from im2win.schedules.cuda.primitives import CHUNK, Arena, Expr, call, padded, pointer
from im2win.schedules.cuda.tiles.multistage import MultistageTile

PHASES = "int64"  # element type of an mbarrier


def shared_bytes(tile: MultistageTile, run: int) -> int:
    """Bytes of shared memory that filters and their barriers take."""
    return padded((tile.stages, run), tile.dtype) + (padded((tile.stages,), PHASES) if tile.warpgroup else 0)


class Filters:
    """All threads issue `cp.async` copies of a step's filters, and wait for them together with those of windows."""

    def __init__(self, tile: MultistageTile, arena: Arena, packed: Any, block: Expr, steps: int, run: int, tid: Expr) -> None:
        self._tile, self._packed, self._block, self._steps, self._run, self._tid = tile, packed, block, steps, run, tid
        self.shared = arena.take("filters", (tile.stages, run), tile.dtype)

    def begin(self, step: Expr, stage: Expr) -> None:
        """Issues the copies of a step's filters to a stage."""
        tile, run = self._tile, self._run
        vector = CHUNK * tile.slab // SLAB
        start, copies = (self._block * self._steps + step) * run, run // vector
        for done in range(0, copies, tile.threads):
            at = (done + self._tid) * vector

            def one(at: Expr = at) -> None:
                call(f"copy_async<{CHUNK}>", pointer(self.shared, stage, at), pointer(self._packed, start + at))

            if done + tile.threads <= copies:
                one()
            else:
                with T.If(done + self._tid < copies), T.Then():
                    one()

    def renew(self, step: Expr, stage: Expr) -> None:
        """Issues the copies of a step's filters to a stage that was in use. All threads must have passed a barrier after reading it."""
        self.begin(step, stage)

    def wait(self, step: Expr) -> None:
        """Does nothing: the barrier of the step has completed the copies."""


class BulkFilters(Filters):
    """One thread issues a bulk copy of a step's filters. For `wgmma`, which reads shared memory itself."""

    def __init__(self, tile: MultistageTile, arena: Arena, packed: Any, block: Expr, steps: int, run: int, tid: Expr) -> None:
        super().__init__(tile, arena, packed, block, steps, run, tid)
        self._phases = arena.take("phases", (tile.stages,), PHASES)
        with T.If(tid == 0), T.Then(), T.unroll(tile.stages) as stage:
            call("init_full_barrier", pointer(self._phases, stage))

    def begin(self, step: Expr, stage: Expr) -> None:
        """One thread issues the copy of a step's filters to a stage."""
        with T.If(self._tid == 0), T.Then():
            call("copy_bulk", *self._copy(step, stage))

    def _copy(self, step: Expr, stage: Expr) -> tuple[Expr, Expr, int, Expr]:
        """(destination, source, bytes, full barrier) of a step's copy."""
        size = self._run * np.dtype(self._tile.dtype).itemsize
        from_ = pointer(self._packed, (self._block * self._steps + step) * self._run)
        return pointer(self.shared, stage, 0), from_, size, pointer(self._phases, stage)

    def wait(self, step: Expr) -> None:
        """Waits at the full barrier of the step's stage."""
        call("wait_full_barrier", pointer(self._phases, step % self._tile.stages), step // self._tile.stages % 2)
