"""Winograd's form on CUDA: tiles and bands, exact where its numbers are exact, and within the tolerance where they are not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from emulated import ROWS, Emulated, Kernel, differences, expected, generated, tiles, typed
from oracle import exact_tensors, normal_tensors

from im2win.cuda_packing import CudaPack
from im2win.gpu import H200
from im2win.problem import Conv2d
from im2win.reference import error, reference, tolerance
from im2win.schedules.cuda.kernel import pack_of, product_of
from im2win.schedules.cuda.legality import problems
from im2win.schedules.cuda.model import estimate
from im2win.schedules.cuda.plan import WinogradPlan
from im2win.schedules.cuda.space import BANDS
from im2win.schedules.cuda.tile import CudaTile
from im2win.suites import suite
from im2win.winograd_packing import transformed
from im2win.winograd_tiles import FORMS, tiles_of

PLAN = WinogradPlan()


def kernel(product: str, outputs: int, band: int = 0) -> Kernel:
    windows = 64 if product.startswith("wg_") else 32
    return "winograd", CudaTile(product, 16, 64, 16, windows, 1, 3, "uvc", outputs=outputs, band=band)


# --- kernels

EXACT = (
    ("n2-c20x9x10-k24x3x3-p1", "two images, odd heights: the last tiles reach beyond the output"),
    ("n2-c20x9x10-k24x3x3-p1-NHWC", "the same, channels last"),
    ("n1-c70x4x4-k40x3x3", "one tile of each parity, three warps of channels, no padding"),
    ("n3-c5x23x37-k3x3x3-p0.2.1.0", "four sides, more tiles a row than a block takes, few channels"),
    ("n5-c8x3x3-k8x3x3-p1-NHWC-bias-add-relu", "the whole epilogue, more images than tiles"),
    ("n2-c24x9x10-k24x3x3-p1-g2-bias-add-relu6", "groups and the whole epilogue"),
)  # fmt: skip


@pytest.mark.parametrize("key", [key for key, _ in EXACT])
def test_two_outputs_of_three_taps_are_exact(key: str) -> None:
    """Its matrices hold 0, 1 and halves: small integers stay exact, in TF32, too. Bands are one row of tiles, and all at once."""
    conv = Conv2d.parse(key)
    kernels = [kernel("fma", 2), kernel("tf32", 2, 1), kernel("wg_tf32x3", 2, 1)]
    tensors = typed(conv, exact_tensors(conv))
    right, emulated = expected(conv, tensors), Emulated(conv, kernels)
    for seed in range(2):
        wrong = differences(conv, kernels, emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("taps", FORMS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_every_form_is_as_accurate_as_float32(taps: int, layout: str) -> None:
    conv = Conv2d(2, 40, 11, 13, 24, taps, padding=taps // 2, layout=layout, bias=True, activation="silu")
    kernels = [kernel(product, outputs) for outputs in FORMS[taps] for product in (("fma", "wg_tf32x3") if outputs <= 4 else ("fma",))]
    tensors = typed(conv, normal_tensors(conv, 0))
    right = reference(conv, tensors["data"], tensors["filter"], tensors["bias"])
    for (_, tile), y in zip(kernels, Emulated(conv, kernels)(tensors), strict=True):
        assert error(y, right) <= tolerance(conv), tile


def test_halves_are_rounded_in_between() -> None:
    """Transformed tiles and products are stored as halves: a few times the error of the direct form, more with larger tiles."""
    conv = Conv2d.parse("n2-c64x9x10-k24x3x3-p1-float16-NHWC-bias")
    kernels = [kernel("f16", 2), kernel("wg_f16", 4)]
    tensors = typed(conv, normal_tensors(conv, 0))
    right = reference(conv, tensors["data"], tensors["filter"], tensors["bias"])
    small, large = (error(y, right) for y in Emulated(conv, kernels)(tensors))
    assert small < 2 * tolerance(conv) and small < large < 8 * tolerance(conv)


# --- tiles and bands

LAYERS = [layer.conv for name in ("papers12", "resnet50", "winograd64") for layer in suite(name, 32) if layer.conv.stride == (1, 1)]
ABLE = [conv for conv in LAYERS if ROWS["winograd"].supports(conv, "cuda") is None]


@pytest.mark.parametrize("conv", ABLE, ids=str)
def test_bands_cover_the_tiles_and_keep_to_their_size(conv: Conv2d) -> None:
    for outputs in FORMS[conv.kernel[0]]:
        row_bytes = tiles_of(conv, outputs, 0).made_bytes
        for band in (0, *BANDS):
            cut = tiles_of(conv, outputs, band)
            images, rows = cut.bands
            assert cut.images == 1 or cut.rows == cut.counts[0], "whole images, or rows of one"
            assert images * cut.images >= conv.batch > (images - 1) * cut.images
            assert rows * cut.rows >= cut.counts[0] > (rows - 1) * cut.rows
            assert cut.made_bytes <= max(band << 20, row_bytes)
            assert cut.problem.groups == cut.positions * conv.groups and cut.problem.out_channels == cut.positions * conv.out_channels
            assert cut.problem.flops < conv.flops * (cut.counts[0] * cut.counts[1] * outputs**2) / math.prod(conv.output_size) + 1


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("n1-c8x9x9-k8x3x3-s2", "Winograd's form is for stride 1 and dilation 1"),
        ("n1-c8x9x9-k8x3x3-d2", "Winograd's form is for stride 1 and dilation 1"),
        ("n1-c8x9x9-k8x3x5", "Winograd's form is for square kernels of 3 or 5 taps, not 3x5"),
        ("n1-c8x9x9-k8x7x7", "Winograd's form is for square kernels of 3 or 5 taps, not 7x7"),
        ("n1-c8x9x9-k8x3x3-int8", "int8 does not hold transformed tiles as accurately as its tolerance asks"),
    ],
)
def test_what_it_cannot_compute(key: str, reason: str) -> None:
    assert ROWS["winograd"].supports(Conv2d.parse(key), "cuda") == reason


CONV = Conv2d.parse("n8-c64x28x28-k128x3x3-p1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": 3}, "`outputs` (=3) must be one of 2, 4, 6 for a kernel of 3 taps"),
        ({"band": -1}, "`band` (=-1) must be at least 0"),
        ({"warp_n": 24}, "`warp_n` (=24) must divide `block_n` (=64)"),
        ({"order": "Cuvc"}, "`order` Cuvc is for patches"),
    ],
)
def test_rules(changes: dict[str, object], message: str) -> None:
    tile = replace(kernel("fma", 4, 32)[1], **changes)  # type: ignore[arg-type]
    assert problems(CONV, tile, H200, PLAN) == [message]


def test_other_algorithms_have_no_such_tiles() -> None:
    plan = ROWS["implicit_gemm"].cuda
    assert plan is not None
    [message] = problems(CONV, kernel("fma", 4)[1], H200, plan)
    assert message == "`outputs` (=4) and `band` (=0) must be 0: they are for Winograd's form"


@pytest.mark.parametrize("product", ["fma", "tf32x3", "wg_tf32x3"])
def test_space(product: str) -> None:
    found = tiles(CONV, "winograd", product)
    assert len(set(found)) == len(found) and {tile.outputs for tile in found} == ({2, 4, 6} if product == "fma" else {2, 4})
    for tile in found[:: max(len(found) // 50, 1)]:
        assert problems(CONV, tile, H200, PLAN) == [] and 0 < estimate(CONV, tile, H200, PLAN).seconds < 1e-2


def test_fewer_products_are_estimated_to_be_faster() -> None:
    """Where channels are many: 36 products for 16 outputs instead of 144."""
    conv = Conv2d.parse("n128-c128x28x28-k128x3x3")
    plan = ROWS["implicit_gemm"].cuda
    assert plan is not None
    winograd = min(estimate(conv, tile, H200, PLAN).seconds for tile in tiles(conv, "winograd", "fma"))
    assert winograd < min(estimate(conv, tile, H200, plan).seconds for tile in tiles(conv, "implicit_gemm", "fma"))


# --- filters and launches


def test_filters_are_those_of_a_grouped_convolution_of_tiles() -> None:
    conv, tile = Conv2d.parse("n1-c10x9x9-k12x3x3-g2"), kernel("fma", 4)[1]
    problem, inner = product_of(conv, tile)
    w = np.random.default_rng(0).standard_normal(conv.filter_shape).astype(np.float32)
    pack = pack_of(conv, tile)
    assert isinstance(pack, CudaPack) and pack.outputs == 4 and pack.shape(conv) == pack_of(problem, inner).shape(problem)
    by_position = transformed(conv, w, 4).transpose(2, 3, 0, 1).reshape(problem.filter_shape).astype(np.float32)
    assert np.array_equal(pack.filter(conv, w), pack_of(problem, inner).filter(problem, by_position))


def test_launches_take_turns() -> None:
    """Three a band: input, products, outputs; bands overwrite each other's tiles."""
    conv = Conv2d.parse("n2-c20x9x10-k24x3x3-p1")
    launches = generated(conv, *kernel("fma", 4)).launches
    bands = tiles_of(conv, 4, 0).bands
    names = [launch.kernel for launch in launches if launch.kernel.startswith("conv2d")]
    assert bands == (2, 3) and names == ["conv2d_kernel", "conv2d_kernel_1", "conv2d_kernel_2"] * 6
    begins = [launch.arguments[-2:] for launch in launches if launch.kernel == "conv2d_kernel_2"]
    assert sorted({tuple(sorted(map(int, pair))) for pair in begins}) == [(0, 0), (0, 1), (0, 4), (0, 8), (1, 4), (1, 8)]
