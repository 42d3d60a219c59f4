"""Blocks that stay, as a row's CUDA plan: its tiles, which are legal and worth a trial, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.schedules.cuda.families.base import OneKernel, Parts
from im2win.schedules.cuda.kernels.persistent import persistent_kernel
from im2win.schedules.cuda.legality.persistent import problems, unable
from im2win.schedules.cuda.model.persistent import estimate
from im2win.schedules.cuda.space.persistent import space
from im2win.schedules.cuda.tiles.persistent import PersistentTile


@dataclass(frozen=True)
class PersistentPlan(OneKernel):
    """The only plan whose tiles are `PersistentTile`."""

    def parts(self) -> Parts:
        """Its tiles and what is known of them."""
        return Parts(PersistentTile, unable, problems, space, estimate, persistent_kernel)

    def shape(self, tile: Any) -> tuple[Any, ...]:
        """What makes two tiles alike enough that one of them is enough to begin with."""
        return tile.block_m, tile.groups, -(-tile.warp_n // 64)
