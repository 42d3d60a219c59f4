"""TVM schedules of dense layers on GPUs: exact on the emulator for every algorithm, from the CPU's definitions; what is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from emulated import Emulated, differences, expected, typed
from oracle import exact_tensors

from im2win.codegen.cuda import generate_source
from im2win.compute import nest
from im2win.device.gpu import H200
from im2win.registry.cpu_schedules import Windows
from im2win.registry.cuda_lowering import lower
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.schedules.cuda.legality.scheduled import violations
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

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


@pytest.mark.parametrize("name", NAMES)
def test_cpu_and_gpu_kernels_are_made_from_one_definition(name: str) -> None:
    """Every algorithm's schedule takes the definition that its CPU schedules take, and keeps its blocks."""
    row = SCHEDULES[name]
    on_cpus = next(one for one in SCHEDULES.values() if one.algorithm is row.algorithm and isinstance(one.scheduler, Windows))
    cuda = row.on_gpu
    assert isinstance(cuda, Scheduled) and cuda.define is row.define is on_cpus.define
    conv = Conv2d.parse("n2-c8x9x11-k32x3x3-p1-bias")
    function = cuda.kernels(conv, TILE, H200)[SYMBOL]
    text = function.script()
    assert f'T.sblock("{nest.CONV}_update")' in text and f'T.sblock("{nest.OUT}")' in text
    assert (f'T.sblock("{cuda.stage.name}")' in text) == cuda.stage.stored


def test_sums_stay_in_registers() -> None:
    """A thread has its own accumulators only, with several blocks of channels, groups and strips."""
    for key in ("n2-c16x12x12-k128x3x3", "n1-c32x14x14-k128x3x3-g2-NHWC", "n1-c3x27x27-k96x5x5-s2"):
        conv = Conv2d.parse(key)
        draw = random.Random(key)
        for tile in draw.sample(schedule_of("direct/scheduled").on_gpu.space(conv, H200, "exact"), 3):
            source = generate_source(lower(conv, schedule_of("direct/scheduled"), tile, H200), H200).source
            found = re.search(r"float conv\w*_local_ptr\[(\d+)\]", source)
            assert found and int(found[1]) == tile.accumulators, tile


def test_what_is_refused() -> None:
    schedule = schedule_of("direct/scheduled").on_gpu

    def broken(key: str, **changes: object) -> str:
        return "; ".join(schedule.violations(Conv2d.parse(key), replace(TILE, **changes), H200))  # type: ignore[arg-type]

    good = "n2-c8x9x11-k64x3x3-p1"
    assert broken(good) == ""
    assert "`block_m` (=48) must divide the 64 channels of a group" in broken(good, block_m=48)
    assert "`thread_n` (=5) must divide `block_n` (=32)" in broken(good, thread_n=5)
    assert "`rules` (=magic) must be among '', 'pipelines'" in broken(good, rules="magic")
    assert "`rules` (=pipelines) needs at least 2 `stages`" in broken(good, stages=1)
    assert "`stages` (=5) must be at most 4" in broken(good, stages=5)
    assert "`strip` (=3) must be among (1, 2, 4)" in broken(good, strip=3)
    assert "`lanes` (=16) must be 0, or 32" in broken(good, lanes=16)
    assert "bytes) must fit 49152" in broken(good, block_m=64, block_n=256, thread_m=8, thread_n=8, block_k=32, stages=4)
    assert "must be 0 where the elements of a window are neighbours" in broken(f"{good}-NHWC", lanes=32)
    assert "`product` (=fma) of the tile is not for float16" in broken(f"{good}-float16")
    assert "at least eight" in broken("n2-c64x9x11-k64x3x3-p1-g64")
