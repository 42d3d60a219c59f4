"""Depthwise layers on GPUs: exact on the emulator in every form, their space, and what is refused."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from emulated import Emulated, differences, expected, typed
from oracle import exact_tensors

from im2win.compute import depthwise
from im2win.device.gpu import H200
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.legality.depthwise import STAGED
from im2win.schedules.cuda.scheduled.depthwise import kernel
from im2win.schedules.cuda.tiles.depthwise import DepthwiseTile
from im2win.spec.conv2d import Conv2d

pytestmark = pytest.mark.usefixtures("unrestored")

NAME = "direct/depthwise"
LAYERS = {
    "n2-c24x9x11-k24x3x3-p1-g24-NHWC-bias-relu": "odd sizes",
    "n1-c16x13x12-k16x3x3-s2-p1-g16-float16-NHWC-bias-add-relu6": "stride, residual",
    "n3-c16x7x7-k16x7x7-p3-g16-float16-NHWC": "7x7",
    "n2-c16x9x10-k16x3x3-p1-g16-bfloat16-NHWC-bias-add-silu": "bfloat16",
    "n2-c16x14x14-k16x3x3-s2-p1-g16-bfloat16-bias-relu": "bfloat16, channels first, stride",
    "n1-c12x10x14-k12x5x5-s2-p2-g12-float16-NHWC-bias": "vectors of four halves",
    "n2-c9x11x9-k9x3x3-g9-d2-NHWC-bias": "odd channels, dilation",
    "n1-c8x12x12-k8x3x5-p0.1.2.3-g8-float16-NHWC": "four sides",
    "n2-c12x9x11-k12x3x3-p1-g12-bias-relu": "channels first",
    "n2-c16x14x14-k16x3x3-s2-p1-g16-float16-bias-add-hardswish": "channels first, stride, residual",
    "n1-c8x7x7-k16x5x5-p2-g8-float16": "channels first, two filters of a channel",
}


def _sampled(conv: Conv2d, count: int) -> list[DepthwiseTile]:
    tiles = schedule_of(NAME).on_gpu.space(conv, H200, "float32")
    return random.Random(str(conv)).sample(tiles, min(count, len(tiles)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("key", LAYERS, ids=LAYERS.values())
def test_exact(key: str) -> None:
    conv = Conv2d.parse(key)
    kernels = [(NAME, tile) for tile in _sampled(conv, 4)]
    assert {tile.staged for tile in _sampled(conv, 40)} == set(STAGED)
    tensors = typed(conv, exact_tensors(conv))
    wrong = differences(conv, kernels, Emulated(conv, kernels)(tensors), expected(conv, tensors))
    assert not wrong, "\n".join(wrong)


def test_the_definition_is_the_cpus() -> None:
    """The kernel is a schedule of what `compute.depthwise` defines: the same blocks, up to those that are inlined."""
    conv = Conv2d.parse("n1-c16x13x12-k16x3x3-p1-g16-float16-NHWC-bias")
    text = kernel(conv, DepthwiseTile("fma_f16", 8, 2, 2, 2, 42, "window")).script()
    assert f'T.sblock("{depthwise.PAD}")' in text and 'T.sblock("conv_update")' in text


def test_what_is_refused() -> None:
    tile = DepthwiseTile("fma_f16", 8, 2, 2, 2, 42, "window")
    schedule = schedule_of(NAME).on_gpu

    def broken(key: str, **changes: object) -> str:
        return "; ".join(schedule.violations(Conv2d.parse(key), replace(tile, **changes), H200))  # type: ignore[arg-type]

    good = "n1-c16x13x12-k16x3x3-p1-g16-float16-NHWC"
    assert broken(good) == ""
    assert "`vector` (=16) must be at most 16 bytes" in broken(good, vector=16, channels=1)
    assert "must divide the 16 channels" in broken(good, channels=3)
    assert "`staged` (=block) must be window or row" in broken(good, staged="block")
    assert "`rows` (=14) must be at most the output's rows (=13)" in broken(good, rows=14)
    assert "`product` (=fma) must be fma_f16 for float16" in broken(good, product="fma")
    assert "must be at most 1024 threads" in broken(good, tasks=1024)
    assert "`vector` (=8) must be 1 in NCHW" in broken("n1-c16x13x12-k16x3x3-p1-g16-float16")
    assert "`channels` (=2) must be 1 in NCHW" in broken("n1-c16x13x12-k16x3x3-p1-g16-float16", vector=1)
    assert "depthwise layers" in broken("n1-c16x13x12-k16x3x3-p1-g2-float16-NHWC")
    assert "several filters" in broken("n1-c16x13x12-k32x3x3-p1-g16-float16-NHWC")


def test_the_space_has_the_whole_vector() -> None:
    conv = Conv2d.parse("n32-c144x56x56-k144x3x3-p1-g144-float16-NHWC-bias")
    tiles = schedule_of(NAME).on_gpu.space(conv, H200, "float32")
    assert {tile.vector for tile in tiles} == {8, 2}
    assert all(144 % tile.block_m == 0 for tile in tiles)


@pytest.mark.parametrize("key", ["n2-c24x9x11-k24x3x3-p1-g24-NHWC", "n1-c16x14x14-k16x3x3-s2-p1-g16-float16"])
def test_the_tuner_tells_tiles_apart(key: str) -> None:
    conv, row, backend = Conv2d.parse(key), schedule_of(NAME), backend_for(H200)
    features = [backend.features(conv, row, tile, 1e-5) for tile in _sampled(conv, 8)]
    assert all(map(math.isfinite, itertools.chain(*features))) and len({tuple(one) for one in features}) == len(features)
