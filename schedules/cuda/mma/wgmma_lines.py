"""The micro-kernel of a consumer warpgroup whose windows are lines of pixels, each of one channel."""

from __future__ import annotations

from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.mma.wgmma_shared_rows import StagedProduct
from im2win.schedules.cuda.primitives import CHUNK, Expr, call, local, pointer
from im2win.schedules.cuda.tiles.persistent import M
from im2win.schedules.cuda.tiles.pixel_lines import PixelLines
from im2win.schedules.cuda.tiles.warp_specialized import LINE, WarpSpecializedTile
from im2win.spec.conv2d import Conv2d


class LineProduct(StagedProduct):
    """The products of a warpgroup's channels with a stage of lines, with accumulators for every phase; see `PixelLines`."""

    _field: PixelLines

    def __init__(self, conv: Conv2d, tile: WarpSpecializedTile, filters: Any, stages: Any, tid: Expr) -> None:
        super().__init__(conv, tile, filters, stages, tid)
        more = self._field.phases - 1
        self._shifted = local("shifted", (more, self._rows, self._cols, 4), tile.sum_dtype) if more else None

    def clear(self) -> None:
        """Clears the accumulators, at the beginning of a tile."""
        super().clear()
        if self._shifted is not None:
            with T.unroll(self._field.phases - 1) as phase, T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
                T.buffer_store(self._shifted, T.float32(0), [phase, i, j, r])

    def _wait(self) -> None:
        super()._wait()
        if self._shifted is not None:
            with T.unroll(self._field.phases - 1) as phase, T.unroll(self._rows) as i, T.unroll(self._cols) as j, T.unroll(4) as r:
                call("hold", pointer(self._shifted, phase, i, j, r))

    def finish(self) -> None:
        """After the last step: waits for all products, and adds the sums of all phases."""
        super().finish()
        for phase, lead in enumerate(self._field.leads[1:]):
            for i in range(self._rows):
                call(f"add_shifted<{self._cols}, {lead}>", pointer(self._sums, i, 0, 0), pointer(self._shifted, phase, i, 0, 0))

    def multiply_taps(self, first: int, window: Expr, filters: Expr) -> None:
        """Issues the products of a step. See `StagedProduct.multiply_taps`; there is one tap."""
        tile, f, many = self._tile, self._field, self._field.phases
        multiplier = MULTIPLIERS[tile.dtype]
        name = f"wgmma_lines_{multiplier.kind}<{f.columns}>"
        call("begin_products")
        for k in range(f.each // multiplier.depth):
            for phase in range(many):
                for i in range(self._rows):
                    at = (2 * k * many + phase) * tile.block_m + (self._first + i) * M
                    sums = pointer(self._shifted, phase - 1, i, 0, 0) if phase else pointer(self._sums, i, 0, 0)
                    a = pointer(self._filters, filters, at * tile.unit)
                    b = pointer(self._stages, window, (phase * f.each + k * multiplier.depth) * LINE)
                    call(name, sums, a, many * tile.block_m * CHUNK, b, f.channels * LINE * self._conv.itemsize)
        call("commit_products")
