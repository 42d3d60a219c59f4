"""Grids of persistent kernels: so many thread blocks as run at once, each computing halo tile after halo tile."""

from __future__ import annotations

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.mainloop.registers import resident
from im2win.schedules.cuda.tiles.persistent import KIB, HaloTile, PersistentTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d

PROCESSORS = 16  # multiprocessors that are neighbours at least: larger clusters than pairs leave some of those beyond them idle


def resident_grid(conv: Conv2d, tile: PersistentTile, gpu: Gpu) -> int:
    """Thread blocks with resident filters: no more than run at once, as many for every block of channels."""
    field, blocks = HaloTile(conv, tile), tile.pack(conv).blocks(conv)
    at_once = gpu.multiprocessors * max(gpu.shared // (field.shared_bytes + KIB), 1)
    return blocks * max(min(-(-field.patches // tile.groups), at_once // blocks), 1)


def staged_grid(conv: Conv2d, tile: WarpSpecializedTile, gpu: Gpu) -> int:
    """Thread blocks with staged filters: no more than run at once, in whole clusters."""
    field = tile.field(conv)
    processors = gpu.multiprocessors
    if tile.cluster > 2 and processors >= PROCESSORS:
        processors -= processors % PROCESSORS
    at_once = processors * resident(field, gpu)
    work = field.patches * tile.pack(conv).blocks(conv) * tile.sum_blocks
    return max(min(work, at_once) // tile.cluster, 1) * tile.cluster
