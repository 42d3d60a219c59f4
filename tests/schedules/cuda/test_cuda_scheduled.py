"""TVM schedules of dense layers on GPUs: exact on the emulator for every algorithm, made from the CPU's definitions, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from emulated import Emulated, differences, expected, typed
from oracle import exact_tensors

from im2win.device.gpu import H200
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.schedules.cuda.legality.scheduled import RULES, violations
from im2win.schedules.cuda.scheduled import dense
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d

pytestmark = pytest.mark.usefixtures("unrestored")

NAMES = [name for name, row in SCHEDULES.items() if isinstance(row.cuda, Scheduled)]
TILE = ScheduledTile("fma", 32, 32, 8, 4, 4, "uvc", 2, 0, 4, "pipelines+copies")
LAYERS = {
    "n2-c8x9x11-k32x3x3-p1-bias-relu": "padding, odd sizes",
    "n1-c3x15x14-k32x5x5-s2-bias-add-relu": "few channels, stride, residual",
    "n1-c16x9x10-k64x3x3-p1-g2-NHWC-bias-add-relu6": "groups, channels last",
    "n2-c32x7x7-k32x1x1-NHWC": "1x1",
    "n1-c8x12x11-k64x3x3-p0.1.2.1-d2": "dilation, four sides",
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", LAYERS, ids=LAYERS.values())
def test_exact(name: str, key: str) -> None:
    conv = Conv2d.parse(key)
    draw = random.Random(f"{name} {key}")
    tiles = [
        replace(TILE, stages=stages, lanes=lanes, strip=draw.choice((1, 2, 4)), rules=rules, order=draw.choice(("uvc", "cuv")))
        for stages, lanes, rules in [(2, 0, ""), (draw.choice((2, 3, 4)), 32, "pipelines+copies"), (3, 0, "pipelines+copies")]
    ]
    kernels = [(name, tile) for tile in tiles if not violations(conv, tile, H200)]
    assert kernels
    tensors = typed(conv, exact_tensors(conv))
    wrong = differences(conv, kernels, Emulated(conv, kernels)(tensors), expected(conv, tensors))
    assert not wrong, "\n".join(wrong)
