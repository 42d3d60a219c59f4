"""Grids of persistent kernels: as many thread blocks as run at once, each of which computes tile after tile."""

from __future__ import annotations

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.mainloop.registers import resident
from im2win.schedules.cuda.tiles.fields import field_of
from im2win.schedules.cuda.tiles.persistent import KIB, HaloTile, PersistentTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d

PROCESSORS = 16  # multiprocessors that are sure to be neighbours; clusters of four leave those beyond a multiple of it idle


def resident_grid(conv: Conv2d, tile: PersistentTile, gpu: Gpu) -> int:
    """Thread blocks of a kernel with resident filters: at most as many as run at once, equally many for every block of channels."""
    field, blocks = HaloTile(conv, tile), tile.pack(conv).blocks(conv)
    at_once = gpu.multiprocessors * max(gpu.shared // (field.shared_bytes + KIB), 1)
    return blocks * max(min(-(-field.output_tiles // tile.groups), at_once // blocks), 1)


def staged_grid(conv: Conv2d, tile: WarpSpecializedTile, gpu: Gpu) -> int:
    """Thread blocks of a warp-specialized kernel: at most as many as run at once, in whole clusters."""
    field = field_of(conv, tile)
    processors = gpu.multiprocessors
    if tile.cluster > 2 and processors >= PROCESSORS:
        processors -= processors % PROCESSORS
    at_once = processors * resident(field, gpu)
    work = field.output_tiles * tile.pack(conv).blocks(conv) * tile.sum_blocks
    return max(min(work, at_once) // tile.cluster, 1) * tile.cluster
