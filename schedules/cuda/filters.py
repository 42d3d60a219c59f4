"""Filters on their way to shared memory."""

from __future__ import annotations

from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.shared import CHUNK, Arena, Expr, call, pointer
from im2win.schedules.cuda.tile import SLAB, CudaTile


class Filters:
    """The filters of a block's channels, `steps` times `run` elements, which lie one after the other as they are packed."""

    def __init__(self, tile: CudaTile, arena: Arena, packed: Any, block: Expr, steps: int, run: int, tid: Expr) -> None:
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
