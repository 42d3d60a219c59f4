"""A pipeline that TVM generates: the sources that tests of the reconstructor rewrite."""

from __future__ import annotations

from im2win.codegen import rewritten
from im2win.codegen.cuda import kernel_module
from im2win.device.gpu import H200
from im2win.reconstruct.parse.unit import Unit
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.scheduled.passes import PIPELINE
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

CONV = Conv2d.parse("n2-c16x14x14-k64x3x3-p1")
KERNEL = "conv2d_kernel"


def unit(stages: int, conv: Conv2d = CONV) -> Unit:
    """What TVM generates."""
    tile = ScheduledTile("fma", 64, 32, 8, 8, 4, "uvc", stages, 0, 4, "")
    kernels = schedule_of("direct/scheduled").on_gpu.kernels(conv, tile, H200)
    (function,) = rewritten.functions(kernel_module({SYMBOL: kernels[SYMBOL]}), H200, PIPELINE)
    return function.unit


def changed(unit: Unit, before: str, after: str, count: int = 1) -> Unit:
    """The unit with other text."""
    assert before in unit.source
    return Unit(unit.source.replace(before, after, count), unit.launches, unit.workspace)
