"""The search space of TVM schedules of dense layers on tensor cores: legal tiles worth a trial."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import NATIVE
from im2win.schedules.cuda.legality.scheduled import depth
from im2win.schedules.cuda.legality.scheduled_mma import LINES, unsupported_reason, violations
from im2win.schedules.cuda.tiles.scheduled_mma import ScheduledMmaTile
from im2win.spec.conv2d import Conv2d

CHANNELS, OUTPUTS = (32, 48, 64, 96, 128, 256), (64, 128, 256)  # of a thread block
OWN = (32, 48, 64)  # channels, or outputs, of a warp
SLABS = (1, 2)  # of 64 bytes, in a step of the sum
STAGES = (2, 3, 4)
THREADS = (64, 128, 256)  # of a block


def _channels(conv: Conv2d) -> list[int]:
    """Channels of a thread block: those that divide a group's, or all of a few."""
    group = conv.out_channels // conv.groups
    return [one for one in CHANNELS if group % one == 0] or [one for one in range(LINES, 257, LINES) if group % one == 0][-2:]


def _tiles(conv: Conv2d, rules: str) -> Iterator[ScheduledMmaTile]:
    row = NATIVE[conv.dtype]
    orders = ("uvc",) if conv.layout == "NHWC" or conv.in_channels // conv.groups >= LINES else ("uvc", "cuv")
    most = -(-depth(conv) // row.slab)
    for m, n, slabs in itertools.product(_channels(conv), OUTPUTS, SLABS):
        rows = [one for one in OWN if m % one == 0] or [LINES]
        for own_m, own_n, stages, order in itertools.product(rows, OWN, STAGES, orders):
            if n % own_n == 0 and 32 * (m // own_m) * (n // own_n) in THREADS and stages * slabs <= max(most, 1):
                yield ScheduledMmaTile(row.kind, m, n, slabs * row.slab, own_m, own_n, order, stages, rules)
    if most < min(STAGES):
        for m, n in itertools.product(_channels(conv), OUTPUTS):
            own = next((one for one in OWN if m % one == 0), LINES)
            yield ScheduledMmaTile(row.kind, m, n, row.slab, own, 32, orders[0], 1, "copies")


@functools.lru_cache(maxsize=8)
def space(conv: Conv2d, gpu: Gpu, rules: str = "pipelines+copies") -> tuple[ScheduledMmaTile, ...]:
    """Every legal tile worth a trial, in a fixed order."""
    if unsupported_reason(conv) is not None:
        return ()
    return tuple(tile for tile in _tiles(conv, rules) if not violations(conv, tile, gpu))
