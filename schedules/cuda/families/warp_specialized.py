"""Filters and windows in steps, as a row's CUDA plan: its tiles, which are legal and worth a trial, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.schedules.cuda.families.base import OneKernel, Parts
from im2win.schedules.cuda.kernels.warp_specialized import streamed_kernel
from im2win.schedules.cuda.legality.warp_specialized import problems, unable
from im2win.schedules.cuda.model.warp_specialized import estimate
from im2win.schedules.cuda.space.warp_specialized import space
from im2win.schedules.cuda.tiles.warp_specialized import StreamedTile


@dataclass(frozen=True)
class StreamedPlan(OneKernel):
    """The only plan whose tiles are `StreamedTile`."""

    def parts(self) -> Parts:
        """Its tiles and what is known of them."""
        return Parts(StreamedTile, unable, problems, space, estimate, streamed_kernel)

    def shape(self, tile: Any) -> tuple[Any, ...]:
        """What makes two tiles alike enough that one of them is enough to begin with."""
        return tile.block_m, tile.groups, tile.turns, -(-tile.warp_n // 64), tile.filter_blocks > 1, tile.sum_blocks, tile.boxes
