"""TVM schedules on tensor cores: exact on the emulator for every algorithm and type, from one definition; barriers; what is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from emulated import Emulated, differences, expected, typed
from oracle import exact_tensors

from im2win.codegen.cuda import generate_source, kernel_module
from im2win.codegen.rewritten import functions
from im2win.device.gpu import H200
from im2win.reconstruct.parse.unit import Edit
from im2win.reconstruct.rules.races import race
from im2win.registry.backends import backend_for
from im2win.registry.cpu_schedules import Windows
from im2win.registry.cuda_lowering import lower
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.schedules.cuda.arithmetic import NATIVE
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.schedules.cuda.scheduled.passes import WARP_PIPELINE
from im2win.schedules.cuda.tiles.scheduled_mma import ScheduledMmaTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

pytestmark = pytest.mark.usefixtures("unrestored")

NAMES = [name for name, row in SCHEDULES.items() if isinstance(row.cuda, Scheduled)]
LAYERS = {
    "n1-c32x9x11-k32x3x3-p1-NHWC-bias-relu-float16": "padding, vectors of channels",
    "n1-c3x15x14-k32x5x5-s2-bias-add-relu-float16": "few channels, stride, residual",
    "n1-c32x9x10-k64x3x3-p1-g2-NHWC-bias-add-relu6-bfloat16": "groups",
    "n1-c24x7x8-k48x3x3-d2-p2-bias-bfloat16": "dilation, channels first",
    "n1-c64x7x8-k32x3x3-p1-bias-add-relu-NHWC-int8-out.int8": "requantised",
    "n1-c16x9x8-k32x3x3-s2-p1-bias-int8-out.int8": "requantised, channels first",
    "n2-c96x6x7-k32x1x1-NHWC-int8": "1x1, sums as they are",
    "n1-c5x9x9-k16x3x3-p1-NHWC-bias-int8-out.float16": "channels that no vector divides",
}


def tile_of(conv: Conv2d, **changes: object) -> ScheduledMmaTile:
    row, group = NATIVE[conv.dtype], conv.out_channels // conv.groups
    tile = ScheduledMmaTile(row.kind, 32 if group % 32 == 0 else 16, 64, row.slab, 16, 32, "uvc", 2, "pipelines+copies")
    return replace(tile, **changes)  # type: ignore[arg-type]


@pytest.mark.sampled(8)
@pytest.mark.pairwise
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", LAYERS, ids=LAYERS.values())
def test_exact(name: str, key: str, turn: int) -> None:
    """Without rules, with copies, and with pipelines of them, in turn."""
    conv, draw = Conv2d.parse(key), random.Random(f"{name} {key}")
    schedule = schedule_of(name).on_gpu
    forms = [(2, ""), (draw.choice((1, 3)), "copies"), (draw.choice((2, 3, 4)), "pipelines+copies")]
    tiles = [tile_of(conv, stages=stages, rules=rules, order=draw.choice(("uvc", "cuv"))) for stages, rules in forms]
    legal = [tile for tile in dict.fromkeys(tiles) if not schedule.violations(conv, tile, H200)]
    kernels = [(name, legal[turn % len(legal)])]
    tensors = typed(conv, exact_tensors(conv))
    wrong = differences(conv, kernels, Emulated(conv, kernels)(tensors), expected(conv, tensors))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_cpu_and_gpu_kernels_are_made_from_one_definition(name: str) -> None:
    """Every algorithm's schedule takes the definition that its CPU schedules take, in every type, and replaces its sums by instructions."""
    row = SCHEDULES[name]
    on_cpus = next(one for one in SCHEDULES.values() if one.algorithm is row.algorithm and isinstance(one.scheduler, Windows))
    cuda = row.on_gpu
    assert isinstance(cuda, Scheduled) and cuda.define is row.define is on_cpus.define
    for dtype, kind in (("float16", "f16"), ("int8", "s8")):
        conv = Conv2d.parse(f"n2-c32x9x11-k32x3x3-p1-bias-{dtype}")
        text = cuda.kernels(conv, tile_of(conv), H200)[SYMBOL].script()
        assert f"im2win::product_lines_{kind}" in text and text.count("im2win::load_matrices") == 2
        assert (f'T.sblock("{cuda.stage.name}")' in text) == cuda.stage.stored


def test_operands_and_sums_stay_in_registers() -> None:
    """A lane has its own sums and words only; copies are asynchronous and a step has one barrier where elements are neighbours."""
    for key in ("n2-c64x12x12-k128x3x3-NHWC-float16", "n1-c64x14x14-k128x3x3-g2-NHWC-int8"):
        conv, draw = Conv2d.parse(key), random.Random(key)
        for tile in draw.sample(schedule_of("direct/scheduled").on_gpu.space(conv, H200, "float32"), 1):
            source = generate_source(lower(conv, schedule_of("direct/scheduled"), tile, H200), H200).source
            kernel = source[source.index('extern "C"') :]
            sizes = [int(size) for size in re.findall(r"(?:half|signed char|float|int) \w+_warp_ptr\w*\[(\d+)\]", kernel)]
            word = 4 // conv.itemsize
            assert sizes[0] == tile.accumulators and set(sizes[1:]) == {tile.warp_m // 4 * word, tile.warp_n // 4 * word}, tile
            assert "copy_async<16>" in kernel and kernel.count("__syncthreads") == 2, tile


def test_a_missing_barrier_is_found() -> None:
    """TVM counts what `ldmatrix` reads, and so does the proof: without any one of the barriers threads race."""
    conv = Conv2d.parse("n1-c64x9x8-k32x3x3-p1-NHWC-float16")
    made = schedule_of("direct/scheduled").on_gpu.kernels(conv, tile_of(conv, rules=""), H200)
    unit = functions(kernel_module(made), H200, WARP_PIPELINE)[0].unit
    (name,) = unit.kernels
    assert race(unit, name) is None and len(unit.kernel(name).barriers) >= 2
    for barrier in unit.kernel(name).barriers:
        assert race(unit.edited([Edit(barrier.span, "", "", "")])[0], name)


@pytest.mark.parametrize("key", ["n8-c64x28x28-k64x3x3-p1-NHWC-float16", "n8-c64x28x28-k128x3x3-p1-int8"])
def test_only_names_and_tuning_choose_them(key: str) -> None:
    """Kernels that are written loop by loop are estimated as faster, and are the default."""
    conv, backend = Conv2d.parse(key), backend_for(H200)
    name, tile = default_tile(conv, "auto", H200)
    assert not isinstance(schedule_of(name).cuda, Scheduled)
    named, own = default_tile(conv, "direct/scheduled", H200)
    assert named == "direct/scheduled" and isinstance(own, ScheduledMmaTile) and not backend.proven(conv, own)
    assert backend.cost(conv, schedule_of(named), own) > backend.cost(conv, schedule_of(name), tile)


def test_what_is_refused() -> None:
    schedule = schedule_of("direct/scheduled").on_gpu

    def broken(key: str, **changes: object) -> str:
        conv = Conv2d.parse(key)
        return "; ".join(schedule.violations(conv, tile_of(conv.with_(dtype="float16"), **changes), H200))

    good = "n2-c64x9x11-k64x3x3-p1-float16"
    assert broken(good) == ""
    assert "`block_m` (=48) must divide the 64 channels of a group" in broken(good, block_m=48)
    assert "`warp_n` (=24) must be a multiple of 16" in broken(good, warp_n=24)
    assert "`warp_n` (=48) must divide `block_n` (=64)" in broken(good, warp_n=48)
    assert "`block_k` (=48) must be a multiple of 32, 64 bytes of the sum" in broken(good, block_k=48)
    assert "`order` (=cvu) must be among 'uvc', 'cuv'" in broken(good, order="cvu")
    assert "`rules` (=pipelines) needs at least 2 `stages`" in broken(good, stages=1, rules="pipelines")
    assert "must fit a thread's registers" in broken(good, block_m=64, warp_m=64, block_n=128, warp_n=128)
    assert "must fit 232448" in broken(good, block_n=512, block_k=128, warp_n=64, warp_m=32, stages=4)
    assert "`product` (=f16) must be bf16 for bfloat16" in broken(good.replace("float16", "bfloat16"))
    assert "`product` (=f16) of the tile is not for float32" in broken("n2-c64x9x11-k64x3x3-p1")
    assert "must divide the 24 of a group" in broken("n2-c64x9x11-k24x3x3-p1-float16")
    assert schedule.unsupported_reason(Conv2d.parse("n2-c64x9x11-k64x3x3-g64-p1-int8"), "float32")
