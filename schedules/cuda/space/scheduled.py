"""The search space of TVM schedules of dense layers on GPUs: legal tiles worth a trial."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.arithmetic import CORE_PRODUCTS
from im2win.schedules.cuda.legality.scheduled import LANES, depth, unsupported_reason, violations
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d

CHANNELS, OUTPUTS = (32, 48, 64, 96, 128, 256), (32, 64, 96, 128, 256)  # of a thread block
OWN = (4, 6, 8, 12, 16)  # channels, or outputs, of a thread
DEPTHS = (8, 16, 32)  # elements of the sum in a step
MOST_SUMS, LEAST_SUMS = 128, 16  # of a thread
LONG = 1024  # products of a sum whose stores no longer count
THREADS = (64, 128, 256)  # of a block


def _channels(conv: Conv2d) -> list[int]:
    """Channels of a thread block: those that divide a group's, or all of a few."""
    group = conv.out_channels // conv.groups
    return [one for one in CHANNELS if group % one == 0] or [one for one in range(8, 257, 4) if group % one == 0][-2:]


def _strips(conv: Conv2d, cols: int) -> list[int]:
    """Neighbouring outputs of a thread: four, or two; one where vectors of outputs cannot be stored, unless the sums are long."""
    wide = 4 if cols % 4 == 0 else 2
    apart = conv.layout == "NCHW" and math.prod(conv.output_size) % wide > 0 and depth(conv) < LONG
    return [wide, 1] if apart else [wide]


def _tiles(conv: Conv2d, rules: str, order_of_windows: str) -> Iterator[ScheduledTile]:
    orders = ["uvc"] if conv.layout == "NHWC" or conv.in_channels // conv.groups >= 16 else ["uvc", "cuv"]
    orders += [order_of_windows] if order_of_windows else []
    most = -(-depth(conv) // min(DEPTHS))
    for m, n, k, rows, cols in itertools.product(_channels(conv), OUTPUTS, DEPTHS, OWN, OWN):
        threads = (m // rows) * (n // cols) if m % rows == 0 and n % cols == 0 else 0
        if threads not in THREADS or not LEAST_SUMS <= rows * cols <= MOST_SUMS:
            continue
        for order, stages, lanes, strip in itertools.product(orders, (2, 3, 4), (0, LANES), _strips(conv, cols)):
            if stages <= most:
                yield ScheduledTile(CORE_PRODUCTS[conv.dtype], m, n, k, rows, cols, order, stages, lanes, strip, rules)


@functools.lru_cache(maxsize=8)
def space(conv: Conv2d, gpu: Gpu, rules: str = "pipelines+copies", order_of_windows: str = "") -> tuple[ScheduledTile, ...]:
    """Every legal tile worth a trial, in a fixed order.

    Args:
        order_of_windows: of a sum in which the elements of a stored window are neighbours; "" where there is none.
    """
    if unsupported_reason(conv) is not None:
        return ()
    return tuple(tile for tile in _tiles(conv, rules, order_of_windows) if not violations(conv, tile, gpu))
