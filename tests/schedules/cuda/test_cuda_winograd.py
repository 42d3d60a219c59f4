"""Winograd's form on CUDA: tiles and bands, exact where its numbers are exact, and within the tolerance where they are not."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import tvm
from emulated import ROWS, Emulated, Kernel, differences, expected, generated, tiles, typed
from oracle import exact_tensors, normal_tensors
from recorded import TODAY, beside_default, fill, ok

from im2win.device.gpu import H200
from im2win.numerics.reference import error, reference
from im2win.numerics.tolerance import tolerance
from im2win.numerics.winograd_measured import measure
from im2win.numerics.winograd_tiling import FORMS, forms, tiles_of
from im2win.packing.mma_fragments import CudaPack
from im2win.packing.winograd import transformed
from im2win.records.log import Log
from im2win.records.lookup import search
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import candidates
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.schedules.cuda.families.winograd import WinogradBands
from im2win.schedules.cuda.kernels.multistage import pack_of, product_of
from im2win.schedules.cuda.space.multistage import BANDS
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite

pytestmark = pytest.mark.usefixtures("unrestored")

PLAN = WinogradBands()


def kernel(product: str, outputs: int, band: int = 0) -> Kernel:
    windows = 64 if product.startswith("wg_") else 32
    return "winograd/tiled", MultistageTile(product, 16, 64, 16, windows, 1, 3, "uvc", outputs=outputs, band=band)


# --- kernels

EXACT = (
    ("n2-c20x9x10-k24x3x3-p1", "two images, odd heights: the last tiles reach beyond the output"),
    ("n2-c20x9x10-k24x3x3-p1-NHWC", "the same, channels last"),
    ("n1-c70x4x4-k40x3x3", "one tile of each parity, three warps of channels, no padding"),
    ("n3-c5x23x37-k3x3x3-p0.2.1.0", "four sides, more tiles a row than a block takes, few channels"),
    ("n5-c8x3x3-k8x3x3-p1-NHWC-bias-add-relu", "the whole epilogue, more images than tiles"),
    ("n2-c24x9x10-k24x3x3-p1-g2-bias-add-relu6", "groups and the whole epilogue"),
)  # fmt: skip


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("taps", FORMS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_every_form_is_as_accurate_as_float32(taps: int, layout: str) -> None:
    conv = Conv2d(2, 40, 11, 13, 24, taps, padding=taps // 2, layout=layout, bias=True, activation="silu")
    kernels = [kernel(product, outputs) for outputs in FORMS[taps] for product in (("fma", "wg_tf32x3") if outputs <= 4 else ("fma",))]
    tensors = typed(conv, normal_tensors(conv, 0))
    right = reference(conv, tensors["data"], tensors["filter"], tensors["bias"])
    for (_, tile), y in zip(kernels, Emulated(conv, kernels)(tensors), strict=True):
        assert error(y, right) <= tolerance(conv), tile


EXACT_HALVES = (
    ("n2-c70x6x40-k40x3x3-p1-float16", "rows of eight halves, three blocks a row, two channels a thread, the last warp's partly none"),
    ("n2-c33x9x10-k34x3x3-p1.0.2.1-float16-bias-add-relu", "an odd number of channels, units of two halves, sums wait as floats"),
    ("n3-c6x7x9-k5x3x3-float16-bias-relu6", "odd rows, halves one by one, fewer channels than a warp has threads, no padding"),
    ("n2-c24x11x20-k24x3x3-p2-g2-float16-add", "groups, units of four halves, two columns of padding"),
    ("n2-c20x9x10-k24x3x3-p1-float16-NHWC-bias-add-relu", "channels last, two a thread, the whole epilogue"),
    ("n5-c7x3x4-k9x3x3-p1-float16-NHWC-bias", "channels last, one a thread, more images than tiles"),
)  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key", [key for key, _ in EXACT_HALVES])
def test_two_outputs_of_three_taps_are_exact_in_halves(key: str) -> None:
    """With filters of ones, transformed filters are quarters, and no product has more than the eleven bits of a half."""
    conv = Conv2d.parse(key)
    kernels = [kernel("f16", 2) if conv.groups == 1 else kernel("wg_f16", 2, 1)]
    tensors = typed(conv, {name: np.sign(array) if name == "filter" else array for name, array in exact_tensors(conv).items()})
    right, emulated = expected(conv, tensors), Emulated(conv, kernels)
    assert np.abs(right[np.isfinite(right)]).max() < 2**11
    for seed in range(2):
        wrong = differences(conv, kernels, emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("taps", FORMS)
def test_halves_are_rounded_in_between(taps: int, layout: str) -> None:
    """Transformed tiles and products are stored as halves: a few times the error of the direct form, as `winograd_error` measures it."""
    conv = Conv2d(2, 64, 9, 16, 24, taps, padding=taps // 2, dtype="float16", layout=layout, bias=True, activation="silu")
    kernels = [kernel(product, outputs) for product, outputs in zip(("wg_f16", "f16"), reversed(forms(conv)), strict=False)]
    tensors = typed(conv, normal_tensors(conv, 0))
    right = reference(conv, tensors["data"], tensors["filter"], tensors["bias"])
    errors = [error(y, right) for y in Emulated(conv, kernels)(tensors)]
    for (_, tile), found in zip(kernels, errors, strict=True):
        measured = measure(tile.outputs, taps, 64, "float16").error
        assert 0.4 * measured < found < min(2.5 * measured, tolerance(conv, "winograd")), (tile, measured)


def test_a_wrong_kernel_is_beyond_the_tolerance_of_halves() -> None:
    """One position of 16 or 36 left out of the last transform, of every other channel."""
    conv = Conv2d.parse("n1-c64x8x8-k24x3x3-p1-float16-NHWC")
    kernels = [kernel("f16", m) for m in forms(conv)]

    def edit(source: str) -> str:
        changed, count = re.subn(r"\(float\)loaded_ptr\[([^]]*)\]", r"(float)loaded_ptr[\1] * ((\1) != 14)", source)
        assert count == 1
        return changed

    tensors = typed(conv, normal_tensors(conv, 0))
    right = expected(conv, tensors)
    for y in Emulated(conv, kernels, edit)(tensors):
        assert error(y, right) > 4 * tolerance(conv, "winograd")


# --- tiles and bands

LAYERS = [layer.conv for name in ("papers12", "resnet50", "winograd64") for layer in suite(name, 32) if layer.conv.stride == (1, 1)]
ABLE = [conv for conv in LAYERS if ROWS["winograd/tiled"].supports(conv, "cuda") is None]


@pytest.mark.parametrize("conv", ABLE, ids=str)
def test_bands_cover_the_tiles_and_keep_to_their_size(conv: Conv2d) -> None:
    for outputs in FORMS[conv.kernel[0]]:
        row_bytes = tiles_of(conv, outputs, 0).workspace_bytes
        for band in (0, *BANDS):
            cut = tiles_of(conv, outputs, band)
            images, rows = cut.bands
            assert cut.images == 1 or cut.rows == cut.counts[0], "whole images, or rows of one"
            assert images * cut.images >= conv.batch > (images - 1) * cut.images
            assert rows * cut.rows >= cut.counts[0] > (rows - 1) * cut.rows
            assert cut.workspace_bytes <= max(band << 20, row_bytes)
            assert cut.problem.groups == cut.positions * conv.groups and cut.problem.out_channels == cut.positions * conv.out_channels
            assert cut.problem.flops < conv.flops * (cut.counts[0] * cut.counts[1] * outputs**2) / math.prod(conv.output_size) + 1


def test_products_lie_behind_the_tiles_aligned_for_the_widest_access() -> None:
    """A tile of 36 halves is no multiple of 16 bytes, nor is an odd number of them."""
    cut = tiles_of(Conv2d(1, 3, 6, 6, 8, 3, dtype="float16"), 4, 0)
    assert (cut.count, cut.transformed) == (1, 36 * 3) and cut.before_products == 128 and cut.workspace_bytes == 2 * (128 + 36 * 8)


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
    assert ROWS["winograd/tiled"].supports(Conv2d.parse(key), "cuda") == reason


CONV = Conv2d.parse("n8-c64x28x28-k128x3x3-p1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": 3}, "`outputs` (=3) must be one of 2, 4, 6 for float32 and a kernel of 3 taps"),
        ({"band": -1}, "`band` (=-1) must be at least 0"),
        ({"warp_n": 24}, "`warp_n` (=24) must divide `block_n` (=64)"),
        ({"order": "Cuvc"}, "`order` Cuvc is for halo tiles"),
    ],
)
def test_rules(changes: dict[str, object], message: str) -> None:
    tile = replace(kernel("fma", 4, 32)[1], **changes)  # type: ignore[arg-type]
    assert PLAN.violations(CONV, tile, H200) == [message]


def test_other_algorithms_have_no_such_tiles() -> None:
    plan = ROWS["implicit_gemm/tiled"].on_gpu
    [message] = plan.violations(CONV, kernel("fma", 4)[1], H200)
    assert message == "`outputs` (=4) and `band` (=0) must be 0: they are for Winograd's form"


@pytest.mark.parametrize("product", ["fma", "tf32x3", "wg_tf32x3", "f16", "wg_f16"])
def test_space(product: str) -> None:
    conv = CONV.with_(dtype=PRODUCTS[product].dtype)
    found = tiles(conv, "winograd/tiled", product)
    assert len(set(found)) == len(found) and {tile.outputs for tile in found} == ({2, 4, 6} if product == "fma" else {2, 4})
    assert any(tile.in_rows for tile in found) == product.startswith("wg_")
    for tile in found[:: max(len(found) // 50, 1)]:
        assert PLAN.violations(conv, tile, H200) == [] and 0 < PLAN.estimate(conv, tile, H200).seconds < 1e-2


def test_fewer_products_are_estimated_to_be_faster() -> None:
    """Where channels are many: 36 products for 16 outputs instead of 144."""
    conv = Conv2d.parse("n128-c128x28x28-k128x3x3")
    plan = ROWS["implicit_gemm/tiled"].on_gpu
    winograd = min(PLAN.estimate(conv, tile, H200).seconds for tile in tiles(conv, "winograd/tiled", "fma"))
    assert winograd < min(plan.estimate(conv, tile, H200).seconds for tile in tiles(conv, "implicit_gemm/tiled", "fma"))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_halves_are_estimated_to_be_faster(layout: str) -> None:
    """Half the bytes of every tensor."""
    conv = Conv2d(32, 256, 28, 28, 256, 3, padding=1, layout=layout)
    half, whole = (
        min(PLAN.estimate(one, tile, H200).seconds for tile in tiles(one, "winograd/tiled", product))
        for one, product in ((conv.with_(dtype="float16"), "wg_f16"), (conv, "wg_tf32x3"))
    )
    assert 0.2 < half / whole < 0.7


def test_without_tuning_no_form_is_taken_whose_errors_are_near_the_tolerance(log: Log) -> None:
    """Neither by default nor from the record of another layer: relu6 cuts off outputs, and errors count for more."""
    plain, clipped = (Conv2d.parse(f"n8-c64x28x28-k128x3x3-p1{end}") for end in ("", "-relu6"))
    backend = backend_for(H200)
    taken = {conv: [m for m in FORMS[3] if backend.proven(conv, kernel("fma", m)[1])] for conv in (plain, clipped)}
    assert taken == {plain: [2, 4], clipped: [2]}
    assert default_tile(plain, "winograd/tiled", H200)[1].outputs == 4 and default_tile(clipped, "winograd/tiled", H200)[1].outputs == 2
    facts = {"algorithm": "winograd/tiled", "device": H200.name, "target": "cuda", "threads": 1, "tvm": tvm.__version__}
    facts["generator"] = TODAY
    made = [ok(1e-3 - m * 1e-6, plain, tile=kernel("fma", m, 32)[1].as_dict(), **facts) for m in FORMS[3]]
    fill(log, *made[1:], *beside_default(made[0], H200, ["winograd/tiled"]))
    found = {conv: search(conv, H200, ["winograd/tiled"], log.folder) for conv in (plain, plain.with_(bias=True), clipped)}
    assert [(one.tier, one.record.tile["outputs"]) for one in found.values() if one.record] == [
        ("exact", 6), ("nearest layer", 4), ("nearest layer", 2),
    ]  # fmt: skip


HALF = CONV.with_(dtype="float16")


@pytest.mark.slow
def test_halves_are_for_accuracy_winograd_only() -> None:
    """With any other no square tile is a candidate, nor legal. (Tiles of rows are: see `test_cuda_winograd_rows`.)"""
    reason = "float16 does not hold transformed tiles as accurately as its tolerance asks; accuracy 'winograd' allows it"
    bounded = HALF.with_(activation="relu6")
    tile = kernel("wg_f16", 4)[1]
    for accuracy in ("exact", "float32", "tf32"):
        assert "winograd/tiled" not in [row.key for row in candidates("auto", bounded, "cuda", accuracy)]
        assert all(one.in_rows for _, one in backend_for(H200, accuracy).ranked(HALF, ROWS["winograd/tiled"]))
        assert backend_for(H200, accuracy).violations(HALF, ROWS["winograd/tiled"], tile) == [
            f"`outputs` (=4) of float16 needs `accuracy` winograd, not {accuracy}"
        ]
    assert default_tile(HALF, "auto", H200)[0] != "winograd/tiled"
    for accuracy in ("float32", "tf32"):
        with pytest.raises(ValueError, match=re.escape(reason)):
            candidates("winograd", bounded, "cuda", accuracy)
    lax = backend_for(H200, "winograd")
    assert [row.key for row in candidates("winograd", HALF, "cuda", "winograd")] == ["winograd/tiled", "winograd/tensor_cores"]
    assert lax.violations(HALF, ROWS["winograd/tiled"], tile) == [] and lax.proven(HALF, tile) and lax.accuracy(tile) == "winograd"
    assert lax.accuracy(replace(tile, outputs=0)) == "exact" and lax.accuracy(kernel("fma", 4)[1]) == "exact"
    assert ROWS["winograd/tiled"].supports(HALF, "cpu", "winograd") == "its CPU schedule computes float32, not float16"


def test_a_default_look_up_never_takes_halves_in_winograds_form(log: Log) -> None:
    """Neither of this layer nor of its neighbour, however fast: only who asks for accuracy "winograd" gets it."""
    direct = MultistageTile("wg_f16", 128, 128, 128, 64, 1, 3, "uvc")
    facts = {"device": H200.name, "target": "cuda", "threads": 1, "tvm": tvm.__version__}
    for algorithm, tile, seconds in (("winograd/tiled", kernel("wg_f16", 4, 32)[1], 1e-4), ("implicit_gemm/tiled", direct, 1e-3)):
        facts |= {"algorithm": algorithm, "generator": TODAY}
        fill(log, *beside_default(ok(seconds, HALF, tile=tile.as_dict(), **facts), H200, accuracy="winograd", slower=100))
    for accuracy in ("exact", "float32", "tf32"):
        fill(log, *beside_default(ok(1e-3, HALF, tile=direct.as_dict(), **facts), H200, accuracy=accuracy, slower=100))
    names = list(ROWS)
    for conv in (HALF, HALF.with_(bias=True)):
        found = {accuracy: search(conv, H200, names, log.folder, accuracy) for accuracy in get_args(Accuracy)}
        taken = {accuracy: one.record.method for accuracy, one in found.items() if one.record}
        assert taken == dict.fromkeys(("exact", "float32", "tf32"), "implicit_gemm/tiled") | {"winograd": "winograd/tiled"}
    assert "needs `accuracy` winograd, not float32" in search(HALF, H200, names, log.folder).skipped[0][1]


def test_forms_of_halves() -> None:
    """Two and four outputs of three taps, two of five; none where relu6 cuts off outputs of long sums."""
    found = {taps: forms(Conv2d(1, 64, 9, 9, 64, taps, dtype="float16")) for taps in FORMS}
    assert found == {3: (2, 4), 5: (2,)}
    long = Conv2d(1, 8192, 9, 9, 64, 3, dtype="float16", activation="relu6")
    reason = "relu6 cuts off outputs of such long sums, but not the errors of transformed tiles in float16"
    assert forms(long) == () and ROWS["winograd/tiled"].supports(long, "cuda", "winograd") == reason
    [message] = PLAN.violations(HALF, kernel("f16", 6)[1], H200)
    assert message == "`outputs` (=6) must be one of 2, 4 for float16 and a kernel of 3 taps"


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
