"""Filters and windows in steps, as a row's CUDA plan: its tiles, which are legal and worth a trial, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from im2win.problem import Conv2d
from im2win.reference import Accuracy
from im2win.schedules.cuda_family import CudaFamily

if TYPE_CHECKING:
    import tvm

    from im2win.gpu import Gpu
    from im2win.packs import Pack
    from im2win.schedules.cuda.model import Estimate
    from im2win.schedules.streamed.tile import StreamedTile


@dataclass(frozen=True)
class StreamedPlan(CudaFamily):
    """The only plan whose tiles are `StreamedTile`."""

    def made_bytes(self, conv: Conv2d, tile: Any) -> int:
        """Nothing is made between kernels: there is one."""
        return 0

    def unable(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a convolution with that accuracy; None if one does."""
        from im2win.schedules.streamed.legality import unable

        return unable(conv)

    def tile(self, values: Mapping[str, Any]) -> StreamedTile:
        """A tile from its plain values; ValueError if they are none."""
        from im2win.schedules.streamed.tile import StreamedTile

        return StreamedTile.from_dict(values)

    def space(self, conv: Conv2d, gpu: Gpu) -> list[StreamedTile]:
        """Every tile worth a trial."""
        from im2win.schedules.streamed.space import space

        return space(conv, gpu)

    def problems(self, conv: Conv2d, tile: Any, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks."""
        from im2win.schedules.streamed.legality import problems

        return problems(conv, tile, gpu)

    def estimate(self, conv: Conv2d, tile: Any, gpu: Gpu) -> Estimate:
        """The model's estimate."""
        from im2win.schedules.streamed.model import estimate

        return estimate(conv, tile, gpu)

    def pack(self, conv: Conv2d, tile: Any) -> Pack:
        """How filters are packed for a tile."""
        pack: Pack = tile.pack(conv)
        return pack

    def shape(self, tile: Any) -> tuple[Any, ...]:
        """What makes two tiles alike enough that one of them is enough to begin with."""
        return tile.block_m, tile.groups, tile.turns, -(-tile.warp_n // 64)

    def lower(self, conv: Conv2d, tile: Any, gpu: Gpu) -> tvm.IRModule:
        """The kernel to compile."""
        from im2win.codegen import SYMBOL
        from im2win.cuda_codegen import kernel_module
        from im2win.schedules.streamed.kernel import streamed_kernel

        return kernel_module({SYMBOL: streamed_kernel(conv, tile, gpu, SYMBOL)})
