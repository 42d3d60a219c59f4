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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", ["n2-c5x11x13-k64x3x3-p1-bias", "n1-c3x23x27-k32x7x7-s4-p3", "n1-c6x9x12-k32x2x3-s1x2-p1x2-d1x2"])
def test_stored_windows_are_copied_in_their_order(key: str) -> None:
    """The order of an im2win window: neighbouring threads copy neighbouring terms, for every step's length and without a rest."""
    conv, name = Conv2d.parse(key), "im2win/scheduled"
    tiles = [replace(TILE, block_k=depth, stages=stages, order="cvu") for depth, stages in ((8, 2), (16, 3), (32, 1))]
    kernels = [(name, replace(tile, rules="") if tile.stages == 1 else tile) for tile in tiles]
    assert not [broken for _, tile in kernels for broken in violations(conv, tile, H200)]
    tensors = typed(conv, exact_tensors(conv))
    wrong = differences(conv, kernels, Emulated(conv, kernels)(tensors), expected(conv, tensors))
    assert not wrong, "\n".join(wrong)


def test_the_model_reads_a_large_im2win_tensor_in_the_order_of_its_windows() -> None:
    """With channels innermost conv4 of the papers reads each sector of 5.6 GB again for every tap."""
    conv, row = Conv2d.parse("n128-c64x224x224-k64x7x7-s2"), schedule_of("im2win/scheduled").on_gpu
    best = min((tile for tile in row.space(conv, H200, "exact")), key=lambda tile: row.estimate(conv, tile, H200).seconds)
    assert best.order == "cvu"
    first, other = (row.estimate(conv, replace(best, order=order), H200) for order in ("cvu", "uvc"))
    assert other.memory > 5 * first.memory and other.cache > 5 * first.cache
    assert "cvu" not in {tile.order for tile in schedule_of("direct/scheduled").on_gpu.space(conv, H200, "exact")}


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


def test_a_transform_alone_takes_the_workspace() -> None:
    """The runtime hands a flat workspace of whole lines to it, as to the convolution."""
    conv = Conv2d.parse("n1-c3x9x9-k32x3x3")
    for name in NAMES:
        cuda = SCHEDULES[name].on_gpu
        text = lower(conv, SCHEDULES[name], TILE, H200).script()
        size = cuda.workspace_bytes(conv, TILE) // conv.itemsize
        taken = re.findall(r"def transform_parts\(.*, \w+: T\.Buffer\(\((\d+),\)", text)
        assert taken == ([str(size)] if size else [])
        assert not size or f"data: T.Buffer(({size},)" in text


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
    rules = "'' or names among pipelines, copies, wide, bounds, unroll, in this order"
    assert all(f"`rules` (={one}) must be {rules}" in broken(good, rules=one) for one in ("magic", "copies+pipelines", "copies+copies"))
    assert not broken(good, rules="pipelines+copies+wide+bounds+unroll")
    assert "`rules` (=pipelines) needs at least 2 `stages`" in broken(good, stages=1)
    assert "`rules` (=unroll) needs at least 2 `stages`" in broken(good, stages=1, rules="copies+unroll")
    assert "`stages` (=5) must be at most 4" in broken(good, stages=5)
    assert "`strip` (=3) must be among (1, 2, 4)" in broken(good, strip=3)
    assert "`lanes` (=16) must be 0, or 32" in broken(good, lanes=16)
    assert "bytes) must fit 49152" in broken(good, block_m=64, block_n=256, thread_m=8, thread_n=8, block_k=32, stages=4)
    assert "must be 0 where the elements of a window are neighbours" in broken(f"{good}-NHWC", lanes=32)
    for lanes in (0, 32):
        assert "a thread block (=8) must have at least a warp of 32 threads" in broken(good, thread_m=32, thread_n=4, lanes=lanes)
        assert "a thread block (=0) must have at least a warp" in broken(good, thread_m=128, lanes=lanes)
    assert "`product` (=fma) of the tile is not for float16" in broken(f"{good}-float16")
    assert "at least eight" in broken("n2-c64x9x11-k64x3x3-p1-g64")
