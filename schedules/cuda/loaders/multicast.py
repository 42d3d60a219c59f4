"""Thread blocks in clusters that share the way of filters to shared memory: each copies a part, for all of them at once.

Level-2 cache hands out a step's filters once a cluster, not once a block. A slot may be written again when every block has read it: each
says so to all others, and its copying thread waits for that only behind the step's products, by when it has long been said.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.loaders.filters import PHASES, BulkFilters
from im2win.schedules.cuda.primitives import Arena, Expr, call, padded, pointer
from im2win.schedules.cuda.tiles.multistage import CudaTile

_CALL = re.compile(r"im2win::(?:copy_shared|send_four)<(\d+)>")
_KERNEL = re.compile(r'extern "C" __global__ void (?=(?:__launch_bounds__\(\d+\) )?(?P<name>\w+)\()')


def shared_bytes(tile: CudaTile) -> int:
    """Bytes of shared memory that a cluster takes beside its blocks' own."""
    return padded((tile.stages,), PHASES) if tile.cluster > 1 else 0


def block_place(block: Expr, channel_blocks: int, cluster: int) -> tuple[Expr, Expr]:
    """(block along channels, block along windows): the former run fastest, or the blocks of a cluster do, which are along windows."""
    if cluster == 1:
        return block % channel_blocks, block // channel_blocks
    whole, rank = block // cluster, block % cluster
    return whole % channel_blocks, whole // channel_blocks * cluster + rank


class SharedFilters(BulkFilters):
    """Copied as a whole at the word of one thread in every block of a cluster, each a part."""

    def __init__(self, tile: CudaTile, arena: Arena, packed: Any, block: Expr, steps: int, run: int, tid: Expr) -> None:
        super().__init__(tile, arena, packed, block, steps, run, tid)
        self._releases = arena.take("releases", (tile.stages,), PHASES)
        with T.If(tid == 0), T.Then(), T.unroll(tile.stages) as stage:
            call(f"start_releases<{tile.cluster}>", pointer(self._releases, stage))
        call("cluster_barrier")

    def renew(self, step: Expr, slot: Expr) -> None:
        """Behind a barrier, when all threads have read the slot: says so to the cluster; the copy has to wait, see `follow`."""
        with T.If(self._tid == 0), T.Then():
            call(f"release<{self._tile.cluster}>", pointer(self._releases, slot))

    def follow(self, step: Expr, slot: Expr) -> None:
        """Behind the next products: copies a step's filters to the slot, once all blocks have said that they have read it."""
        tile = self._tile
        with T.If(self._tid == 0), T.Then():
            call("wait_releases", pointer(self._releases, slot), (step - tile.ahead) // tile.stages % 2)
        self.begin(step, slot)

    def begin(self, step: Expr, slot: Expr) -> None:
        """Begins to copy a step's filters to a slot that nobody has read."""
        with T.If(self._tid == 0), T.Then():
            call(f"copy_shared<{self._tile.cluster}>", *self._copy(step, slot))


def cluster_functions(source: str) -> str:
    """Device functions, in namespace im2win, for sources that call them; nothing for others."""
    return (Path(__file__).parent / "multicast.hpp").read_text() if _CALL.search(source) else ""


def with_clusters(kernels: str) -> str:
    """The source of kernels in which those that call functions of a cluster say how many blocks one has."""
    parts = re.split(r'(?=extern "C" __global__)', kernels)
    sizes = {match["name"]: size[1] for part in parts if (match := _KERNEL.match(part)) and (size := _CALL.search(part))}

    def said(match: re.Match[str]) -> str:
        size = sizes.get(match["name"])
        return match[0] + (f"__cluster_dims__({size}, 1, 1) " if size else "")

    return _KERNEL.sub(said, kernels) if sizes else kernels
