"""Sums in parts on CUDA: exact on the emulator, what they take, who takes them, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from emulated import Emulated, differences, expected, generated, typed
from oracle import exact_tensors

from im2win.device.gpu import H200
from im2win.packing import codec as packs
from im2win.packing.split_k import parts_problem
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.families.split_k import SplitK
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d

pytestmark = pytest.mark.usefixtures("unrestored")

NAME, PLAN = "implicit_gemm/split_k", SplitK()
LAST = "n1-c512x7x7-k512x3x3-p1"  # of a network for one image: 49 windows, and sums of 4608 products


def tile(product: str, split: int, windows: int = 32, channels: int = 32) -> MultistageTile:
    stages = 3 if product.startswith("wg_") else 2
    return MultistageTile(product, 64, 64, channels, windows, 1, stages, "uvc", split=split)


EXACT = {
    "float32, odd sizes": ("n2-c128x9x11-k72x3x3-p1-bias-relu", tile("tf32x3", 2)),
    "CUDA cores, four parts": ("n2-c128x9x12-k72x3x3-p1-NHWC-bias-add", tile("fma", 4, 64)),
    "warpgroups, runs of eight": ("n2-c128x9x11-k72x3x3-p1-float16-NHWC-bias-add-relu6", tile("wg_f16", 4, 64, 64)),
    "bfloat16, warpgroups": ("n2-c128x9x11-k72x3x3-p1-bfloat16-NHWC-bias-add", tile("wg_bf16", 4, 64, 64)),
    "one tap, odd channels": ("n2-c128x9x11-k73x1x1-float16", tile("f16", 2)),
    "integers and a stride": ("n2-c128x9x11-k72x3x3-int8-NHWC-s2-bias", tile("s8", 2)),
    "integers, warpgroups": ("n1-c256x7x7-k64x3x3-p1-int8", tile("wg_s8", 4, 64, 64)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXACT)
def test_outputs_are_exact(name: str) -> None:
    key, one = EXACT[name]
    conv = Conv2d.parse(key)
    assert PLAN.violations(conv, one, H200) == []
    kernels = [(NAME, one)]
    tensors = typed(conv, exact_tensors(conv))
    right, emulated = expected(conv, tensors), Emulated(conv, kernels)
    for seed in range(2):
        wrong = differences(conv, kernels, emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


def test_parts_run_at_the_same_time() -> None:
    conv = Conv2d.parse(LAST)
    product, total = generated(conv, NAME, tile("tf32x3", 8)).launches
    assert (product.grid, total.grid) == ((8 * 8, 1, 1), (-(-512 * 49 // 256), 1, 1))
    problem = parts_problem(conv, 8)
    assert (problem.groups, problem.out_channels, problem.filter_shape) == (8, 4096, (4096, 64, 3, 3))


def test_bytes_between_the_kernels() -> None:
    """Sums take four bytes, whatever the element type."""
    for dtype in ("float32", "float16", "int8"):
        conv = Conv2d.parse(LAST).with_(dtype=dtype)
        one = tile({"float32": "tf32x3", "float16": "f16", "int8": "s8"}[dtype], 4)
        assert PLAN.workspace_bytes(conv, one) == 4 * 4 * math.prod(conv.output_shape)
        assert schedule_of(NAME).stored_bytes(conv, "cuda") == 2 * 4 * math.prod(conv.output_shape)


def test_filters_of_a_part_are_its_channels() -> None:
    conv = Conv2d.parse("n1-c64x8x8-k40x1x1-NHWC")
    w = np.arange(40 * 64, dtype=np.float32).reshape(conv.filter_shape)
    pack = PLAN.pack(conv, tile("fma", 2, 64))
    packed = pack.filter(conv, w).reshape(pack.shape(conv))
    assert (packed[1].reshape(-1, 64)[:32, :40] == w[:, 32:, 0, 0].T).all()
    assert packs.from_dict(packs.as_dict(pack)) == pack


@pytest.mark.parametrize(
    ("key", "one", "reason"),
    [
        ("n1-c128x8x8-k32x3x3-g2", tile("fma", 2, 64), "sums are cut for one group, not 2"),
        ("n1-c48x8x8-k32x3x3", tile("fma", 2, 64), "a part of the sum has at least 32 channels: 48 do not"),
        ("n1-c128x8x8-k64x3x3", tile("fma", 3, 64), "`split` (=3) must be at least 2 and divide the 128 channels"),
        ("n1-c128x8x8-k64x3x3", tile("fma", 1, 64), "`split` (=1) must be at least 2"),
        ("n1-c128x8x8-k64x3x3", tile("f16", 2), "multiplies float16, not float32"),
    ],
)
def test_rules(key: str, one: MultistageTile, reason: str) -> None:
    assert reason in "; ".join(PLAN.violations(Conv2d.parse(key), one, H200))


@pytest.mark.slow
def test_who_takes_them() -> None:
    """Layers whose outputs are few, tuned or not, and only with the accuracy that is asked for."""
    conv, backend = Conv2d.parse(LAST), backend_for(H200)
    cost, best = backend.ranked(conv, schedule_of(NAME))[0]
    assert cost < 0.5 * backend.ranked(conv, schedule_of("implicit_gemm/tiled"))[0][0] and best.split > 2
    assert default_tile(conv, machine=H200)[0] == NAME != default_tile(conv.with_(batch=64), machine=H200)[0]
    assert {one.product for _, one in backend_for(H200, "exact").ranked(conv, schedule_of(NAME))} == {"fma"}
    [refused] = backend_for(H200, "exact").violations(conv, schedule_of(NAME), best)
    assert refused == f"`product` (={best.product}) needs `accuracy` float32, not exact"
    assert backend.tile(schedule_of(NAME), best.as_dict()) == best and best.split > 1
    large = Conv2d.parse("n128-c256x56x56-k256x3x3-p1")
    assert backend.ranked(large, schedule_of(NAME))[0][0] > backend.ranked(large, schedule_of("implicit_gemm/tiled"))[0][0]
