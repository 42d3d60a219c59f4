"""Winograd's form in int8 on tensor cores: exact to its own arithmetic, near the convolution, and for those who ask for it only."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised
from emulated import Emulated, Kernel, differences, expected, generated, typed
from oracle import exact_tensors

from im2win.builder.build import cuda_manifest
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import ToolchainError
from im2win.device.gpu import H200
from im2win.numerics.reference import error
from im2win.numerics.tolerance import tolerance
from im2win.numerics.winograd_error import HALF_MARGIN, quantised_tolerance
from im2win.numerics.winograd_error import expected as expected_error
from im2win.numerics.winograd_int8 import SCALES, STEP
from im2win.numerics.winograd_matrices import transform
from im2win.numerics.winograd_measured import measure_quantised
from im2win.packing.winograd_int8 import QuantisedPack
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import candidates, schedule_of
from im2win.runtime.manifest import Manifest, manifest_path
from im2win.schedules.studies.winograd_tc.legality import violations
from im2win.schedules.studies.winograd_tc.tile import FRAGMENTS, Sizes, TensorCoreTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite
from im2win.tuner.build_worker import BuildJob, build

ROW = schedule_of("winograd/tensor_cores")
WAYS = (("sync_free", "none", 0), ("sync_free", "shmem", 0), ("sync_free", "llc", 0), ("sync_free", "llc", 1), ("bgemm", "none", 0),
        ("bgemm", "llc", 1))  # fmt: skip
CONV = Conv2d.parse("n1-c64x56x56-k64x3x3-p1-int8-NHWC")
FUSED = TensorCoreTile(2, 16, 32, 16, "16x16x16", "sync_free", "shmem", product="s8")


def kernels(fragment: str, block_k: int = 16) -> list[Kernel]:
    """One of every mapping and fusion, and with twice the warps where tiles stay in shared memory."""
    block_m, block_n = max(FRAGMENTS[fragment][0], 16), FRAGMENTS[fragment][1]
    tiles = [TensorCoreTile(2, block_m, block_n, block_k, fragment, *way, "s8") for way in WAYS]
    tiles += [replace(tile, groups=2) for tile in tiles if tile.fusion == "shmem"]
    return [("winograd/tensor_cores", tile) for tile in tiles]


def normal_tensors(conv: Conv2d, seed: int) -> dict[str, Any]:
    """What kernels are checked with on a device."""
    rng = np.random.default_rng(seed)
    shapes = {"data": conv.input_shape, "filter": conv.filter_shape, "bias": (conv.out_channels,), "residual": conv.output_shape}
    values = {name: np.clip(np.rint(32 * rng.standard_normal(shapes[name])), -127, 127) for name in conv.arguments[:-1]}
    return typed(conv, values)


# --- outputs

EXACT = (
    ("n2-c20x9x10-k10x3x3-p1-int8", "16x16x16", 16, "two images, two steps of channels, four blocks of tiles"),
    ("n2-c17x4x11-k27x3x3-p0.2.1.0-int8-NHWC-bias-add-relu", "8x32x16", 32, "four sides, steps of two fragments, the whole epilogue"),
    ("n1-c5x14x17-k10x3x3-int8-NHWC", "32x8x16", 16, "two blocks of filters, fewer channels than a fragment, no padding"),
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("key", "fragment", "block_k"), [row[:3] for row in EXACT])
def test_kernels_are_their_arithmetic_to_the_last_bit(key: str, fragment: str, block_k: int) -> None:
    """Over the whole range of int8, and where inputs are as large as they can be: nothing overflows. Blocks run in turns."""
    conv = Conv2d.parse(key)
    chosen = kernels(fragment, block_k)
    emulated = Emulated(conv, chosen)
    for largest in (False, True):
        tensors = quantised.random_tensors(conv, 0, largest)
        right = quantised.expected(conv, tensors)
        wrong = differences(conv, chosen, emulated(tensors, seed=1, resident=5), right)
        assert not wrong, f"{conv}, largest {largest}:\n" + "\n".join(wrong)


def test_some_problems_lose_nothing() -> None:
    """Inputs in units of 4, and filters of one tap, whose transforms have one magnitude: the convolution itself."""
    conv = Conv2d.parse("n1-c20x9x10-k16x3x3-p1-int8-NHWC")
    tensors = typed(conv, exact_tensors(conv))
    tensors["data"] *= 4
    taps = np.zeros_like(tensors["filter"])
    taps[:, :, 1, 1] = np.sign(tensors["filter"][:, :, 1, 1])
    tensors["filter"] = taps
    right, chosen = expected(conv, tensors), kernels("16x16x16")[1:2]
    assert (quantised.expected(conv, tensors) == right).all()
    assert not differences(conv, chosen, Emulated(conv, chosen)(tensors), right)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_errors_are_within_the_tolerance(layout: str) -> None:
    conv = Conv2d(2, 24, 11, 13, 16, 3, padding=1, layout=layout, dtype="int8", bias=True, residual=True, activation="relu")
    tensors = normal_tensors(conv, 0)
    right = expected(conv, tensors)
    for y in Emulated(conv, kernels("16x16x16")[1:2])(tensors):
        assert 0.01 < error(y, right) <= tolerance(conv, "winograd")


def test_a_kernel_that_is_wrong_is_found() -> None:
    """The oracle of the arithmetic and the tolerance both object to a kernel that takes filters of the wrong channel."""
    conv = Conv2d.parse("n1-c32x8x8-k16x3x3-p1-int8-NHWC")
    tensors, chosen = normal_tensors(conv, 0), kernels("16x16x16")[1:2]
    [y] = Emulated(conv, chosen)({**tensors, "filter": np.roll(tensors["filter"], 1, 1)})
    assert differences(conv, chosen, [y], quantised.expected(conv, tensors))
    assert error(y, expected(conv, tensors)) > tolerance(conv, "winograd")


# --- the arithmetic


def test_nothing_overflows() -> None:
    """What inputs may grow by is the step, sums of 127 * 128 stay below 2**31 for any number of channels that the sums of int8 allow."""
    growth = np.abs(np.array(transform(2, 3).bt, np.float64)).sum(axis=1)
    assert (np.outer(growth, growth) == STEP).all()


@pytest.mark.parametrize("scales", SCALES[:2])
def test_scales_are_the_largest_magnitude(scales: str) -> None:
    conv = Conv2d.parse("n1-c10x9x9-k18x3x3-int8")
    w = np.random.default_rng(0).integers(-128, 128, conv.filter_shape).astype(np.int8)
    w[3] = 0
    pack = QuantisedPack(2, 16, 16, scales)
    packed = pack.filter(conv, w)
    assert packed.shape == pack.shape(conv) == (2, 16 * 16 * 16 + 4 * 16) and packed.dtype == np.int8
    values = packed[:, : pack.values(conv)].reshape(2, 16, 16, 16).transpose(0, 2, 3, 1).reshape(32, 16, 16)[:18, :10]
    factors = packed[:, pack.values(conv) :].copy().view(np.float32).ravel()
    form = (quantised.G @ w.astype(np.float64) @ quantised.G.T).reshape(18, 10, 16)
    assert np.abs(values * factors[:18, None, None] / STEP - form).max() <= np.abs(form).max() / 127 / 2 * 1.0001
    assert not values[3].any() and np.abs(values).max() == 127 and not factors[18:].any()
    assert (len(np.unique(factors[:18])) == 1) == (scales == "tensor")


@pytest.mark.parametrize("scales", SCALES[:2])
def test_what_is_measured_is_what_kernels_do(scales: str) -> None:
    conv = Conv2d.parse("n1-c64x18x18-k16x3x3-int8-NHWC")
    tensors = normal_tensors(conv, 1)
    found = error(quantised.expected(conv, tensors, scales), expected(conv, tensors))
    assert 0.6 < found / measure_quantised(2, 3, 64, scales=scales).error < 1.6


def test_a_scale_for_every_position_gains_nothing() -> None:
    """What inputs lose is more than what filters do."""
    errors = {scales: np.mean([measure_quantised(2, 3, 64, scales=scales, seed=seed).error for seed in range(4)]) for scales in SCALES}
    assert 0.9 < errors["position"] / errors["channel"] < 1.1


def test_the_tolerance_is_twice_what_is_expected() -> None:
    shares = [measure_quantised(2, 3, channels, seed=seed).share for channels, seed in itertools.product((2, 16, 64, 512), range(2))]
    assert 0.3 < min(shares) < max(shares) < 0.8
    assert tolerance(CONV, "winograd") == quantised_tolerance(CONV) == HALF_MARGIN * expected_error(CONV, 2)
    assert tolerance(CONV) == tolerance(CONV, "tf32") == 0, "all other arithmetic of int8 is exact"
    assert measure_quantised(4, 3, 64).error > 0.15, "larger tiles are no use"
    assert measure_quantised(2, 3, 64, spread=8).error > 2.5 * measure_quantised(2, 3, 64).error, "the step of inputs is what it is"
    with pytest.raises(ValueError, match=r"`scales` \(='tap'\) must be one of tensor, channel, position"):
        measure_quantised(2, 3, 4, scales="tap")


def test_packs_refuse_what_they_are_not_for() -> None:
    with pytest.raises(ValueError, match=r"`w` has dtype float32; quantised filters are made of int8"):
        QuantisedPack(2, 16, 16).filter(CONV, np.zeros(CONV.filter_shape, np.float32))
    with pytest.raises(ValueError, match=r"`scales` \(='position'\) must be one of tensor, channel"):
        QuantisedPack(2, 16, 16, "position")
    with pytest.raises(ValueError, match=r"`block` \(=0\) must be at least 1"):
        QuantisedPack(2, 0, 16)
    with pytest.raises(ValueError, match=r"`block` \(=1\) times `channels` \(=2\) must be a multiple of 4"):
        QuantisedPack(2, 1, 2)


# --- who gets it


@pytest.mark.slow
def test_only_who_asks_for_it_gets_it() -> None:
    assert ROW in candidates("auto", CONV, "cuda", "winograd") and ROW not in candidates("auto", CONV, "cuda", "tf32")
    [message] = backend_for(H200, "float32").violations(CONV, ROW, FUSED)
    assert message == "int8 does not hold transformed tiles exactly; accuracy 'winograd' allows it"
    asked = backend_for(H200, "winograd")
    assert asked.violations(CONV, ROW, FUSED) == [] and asked.accuracy(FUSED) == "winograd"
    assert default_tile(CONV, "auto", H200, "winograd")[0] != "winograd/tensor_cores", "nobody gets it who has not tuned"
    assert default_tile(CONV, "winograd/tensor_cores", H200, "winograd")[1].product == "s8"


@pytest.mark.parametrize(
    ("key", "accuracy", "reason"),
    [
        ("n1-c64x9x9-k64x5x5-p2-int8", "winograd", "Winograd's form on tensor cores is for kernels of 3x3, not 5x5"),
        ("n1-c64x9x9-k64x3x3-s2-int8", "winograd", "Winograd's form is for stride 1 and dilation 1"),
        ("n1-c64x9x9-k64x3x3-g2-int8", "winograd", "Winograd's form on tensor cores is for one group, not 2"),
        ("n1-c64x9x9-k64x3x3-int8", "exact", "it rounds more than a sum of products, which accuracy 'exact' leaves out"),
        (
            "n1-c64x9x9-k64x3x3-int8-relu6", "winograd",
            "relu6 cuts off outputs of such sums, but not the errors of transformed tiles in int8",
        ),
        ("n1-c64x9x9-k64x3x3-int8-silu", "winograd", "int8 sums are integers, which have no silu"),
    ],
)  # fmt: skip
def test_what_it_cannot_compute(key: str, accuracy: Any, reason: str) -> None:
    assert ROW.supports(Conv2d.parse(key), "cuda", accuracy) == reason


RULES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"outputs": 4}, "`outputs` (=4) must be one of 2"),
    ({"product": "f16"}, "`product` (=f16) must be one of s8"),
    ({"block_k": 24}, "`block_k` (=24) must be a multiple of the fragment's 16"),
    ({"block_m": 192, "block_k": 64}, "the 192 sums of a thread must be at most 168"),
)


@pytest.mark.parametrize(("changes", "message"), RULES)
def test_rules(changes: dict[str, Any], message: str) -> None:
    assert violations(CONV, FUSED, H200) == []
    assert message in violations(CONV, replace(FUSED, **changes), H200)


@pytest.mark.parametrize("layer", suite("winograd64", 1)[:2] + suite("resnet50", 16)[2:4], ids=str)
def test_spaces_are_legal_and_have_every_fusion(layer: Any) -> None:
    conv, backend = layer.conv.with_(dtype="int8", layout="NHWC"), backend_for(H200, "winograd")
    if ROW.supports(conv, "cuda", "winograd") is not None:
        return
    ranked = backend.ranked(conv, ROW)
    tiles = [tile for _, tile in ranked]
    assert len(set(tiles)) == len(tiles) > 50 and {tile.fusion for tile in tiles} == {"none", "shmem", "llc"}
    assert {(tile.outputs, tile.product) for tile in tiles} == {(2, "s8")} and all(0 < cost < 0.1 for cost, _ in ranked)


# --- what is built


def test_what_is_made_between_kernels_fits_its_tensor() -> None:
    for _, tile in kernels("16x16x16"):
        assert isinstance(tile, TensorCoreTile)
        found = generated(CONV, "winograd/tensor_cores", tile)
        assert Sizes(CONV, tile).workspace_bytes == ROW.on_gpu.workspace_bytes(CONV, tile)
        assert all("data" in one.arguments for one in found.launches) and not found.workspace


def test_libraries_hold_the_kernels(tmp_path: Path) -> None:
    tile = replace(FUSED, fusion="llc", block_n=64, block_k=64)
    """Machine code for sm_90a, and what `runtime.cuda.Kernels` looks for."""
    try:
        cuda_codegen.compiler()
    except ToolchainError as problem:
        pytest.skip(str(problem))
    built = build(BuildJob(CONV, "winograd/tensor_cores", tile, H200, tmp_path / "kernel.so"))
    assert built.kernel is not None and built.kernel.extra_bytes == Sizes(CONV, tile).workspace_bytes, built.message
    library = (tmp_path / "kernel.so").read_bytes()
    assert library.startswith(b"\x7fELF") and (b"transform_parts" in library) == (tile.fusion == "llc")


def test_manifests_say_how_filters_are_packed(tmp_path: Path) -> None:
    made = Sizes(CONV, FUSED).workspace_bytes
    manifest = cuda_manifest(CONV, "winograd/tensor_cores", FUSED.as_dict(), FUSED.pack(CONV), H200, threads=FUSED.threads, made=made)
    library = tmp_path / "conv.so"
    library.write_bytes(b"library")
    manifest_path(library).write_text(manifest.to_json(library))
    read, *_ = Manifest.read(manifest_path(library))
    assert read == manifest and read.pack == QuantisedPack(2, 32, 16) and TensorCoreTile.from_dict(read.tile) == FUSED
