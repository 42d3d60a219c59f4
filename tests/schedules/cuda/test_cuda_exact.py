"""CUDA kernels on the emulator, exactly: with small integers every order of summation gives the same numbers in every arithmetic.

Integers of -4 to 4 are exact in TF32 and float16, and so are their sums in float32; a float16 output is rounded once, from the exact sum.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from cuda_regimes import REGIMES
from emulated import Emulated, Kernel, combined, cuda_algorithms, differences, everywhere, expected, generated, in_turn, sampled, typed
from oracle import exact_tensors

from im2win.device.gpu import H200
from im2win.numerics.reference import error
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.arithmetic import NATIVE, PRODUCTS
from im2win.schedules.cuda.epilogue.store import run_length
from im2win.schedules.cuda.kernels.multistage import operand_of
from im2win.schedules.cuda.loaders.halo_tile import chunks
from im2win.schedules.cuda.space.multistage import products
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.activations import ACTIVATIONS
from im2win.spec.conv2d import LAYOUTS, Conv2d

pytestmark = pytest.mark.usefixtures("unrestored")

TYPES = ("float32", *NATIVE)  # whose products multistage kernels have
SEEDS = (0, 1)


def check(conv: Conv2d, kernels: list[Kernel]) -> None:
    """Runs kernels in the order of two seeds and compares with the reference."""
    assert kernels, f"{conv}: no kernel"
    tensors = typed(conv, exact_tensors(conv))
    right = expected(conv, tensors)
    emulated = Emulated(conv, kernels)
    for seed in SEEDS:
        wrong = differences(conv, kernels, emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


# --- every algorithm, every arithmetic, both layouts

EVERYDAY = "n2-c20x9x10-k24x3x3-p1"  # two images, channels of more than one slab, padding, neither windows nor channels divide


@pytest.mark.sampled(2)
@pytest.mark.pairwise
@pytest.mark.parametrize("half", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_algorithm_and_product(dtype: str, layout: str, half: int) -> None:
    """A type has both halves of its kernels, in an ordinary run one of them in each layout."""
    conv = Conv2d.parse(EVERYDAY).with_(dtype=dtype, layout=layout)
    kernels = everywhere(conv)
    assert {(name, tile.product) for name, tile in kernels} == {(name, p) for name in cuda_algorithms(conv) for p in products(conv, H200)}
    assert len(cuda_algorithms(conv)) == 7
    check(conv, kernels[half::2])


# --- regimes, with tiles drawn from the space


@pytest.mark.sampled(3)
@pytest.mark.valuewise
@pytest.mark.parametrize("half", range(2))
@pytest.mark.parametrize("key", [key for key, _ in REGIMES])
def test_regimes(key: str, half: int) -> None:
    """A regime has one half of the algorithms in an ordinary run."""
    conv = Conv2d.parse(key)
    check(conv, in_turn(conv)[half::2])


def test_transforms_of_two_halves_at_a_time() -> None:
    conv = Conv2d.parse("n1-c6x9x11-k12x3x3-p1-float16-NHWC")
    check(conv, in_turn(conv))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_supported_is_lowered(dtype: str, activation: str) -> None:
    conv = Conv2d.parse(EVERYDAY).with_(dtype=dtype, activation=activation)
    if dtype == "int8" and not ACTIVATIONS[activation].integers:
        assert schedule_of("direct").supports(conv, "cuda") == f"int8 sums are integers, which have no {conv.activation}"
        return
    turn = (TYPES.index(dtype) + list(ACTIVATIONS).index(activation)) % 2
    for algorithm, made in in_turn(conv)[turn::2]:  # of every type and of every activation all algorithms are lowered
        assert generated(conv, algorithm, made).launches


# --- tiles by hand


def tile(product: str, block: tuple[int, int], warp: tuple[int, int], slabs: int, stages: int, order: str, *halo: int) -> MultistageTile:
    return MultistageTile(product, *block, *warp, slabs, stages, order, *halo)


DEPTHS = {
    # two warps across and two down; 60 channels are two to four slabs
    "gather": ("implicit_gemm/tiled", "n1-c60x6x7-k32x3x3-p1", lambda slabs, stages: [
        tile("fma", (32, 64), (16, 32), slabs, stages, "uvc"), tile("tf32", (32, 64), (16, 32), slabs, stages, "uvc"),
        tile("wg_tf32", (32, 128), (16, 64), slabs, stages + 1, "uvc"),
    ]),
    "fetched": ("implicit_gemm/tiled", "n1-c60x6x7-k32x3x3-p1-float16", lambda slabs, stages: [
        tile("f16", (32, 64), (16, 32), slabs, stages, "uvc"), tile("wg_f16", (32, 128), (32, 64), slabs, stages + 1, "uvc"),
    ]),
    # lanes that have one window each, two and four; 60 channels are no whole chunk of 16 bytes for bytes
    "fetched windows": ("implicit_gemm/tiled", "n1-c60x6x7-k32x3x3-p1", lambda slabs, stages: [
        replace(made, fetched=1) for made in (
            tile("fma", (32, 64), (16, 32), slabs, stages, "uvc"), tile("tf32x3", (32, 128), (32, 32), slabs, stages, "uvc"),
            tile("wg_tf32", (32, 128), (32, 128), slabs, stages + 1, "uvc"),
        )
    ]),
    "fetched windows of halves": ("implicit_gemm/tiled", "n2-c60x9x11-k32x3x3-s2-p1-float16", lambda slabs, stages: [
        replace(made, fetched=1) for made in (
            tile("f16", (32, 64), (16, 32), slabs, stages, "uvc"), tile("wg_f16", (32, 128), (32, 64), slabs, stages + 1, "uvc"),
        )
    ]),
    "fetched windows of bytes": ("implicit_gemm/tiled", "n1-c60x6x7-k32x3x3-p1-int8", lambda slabs, stages: [
        replace(made, fetched=1) for made in (
            tile("s8", (32, 64), (32, 32), slabs, stages, "uvc"), tile("wg_s8", (32, 64), (32, 64), slabs, stages + 1, "uvc"),
        )
    ]),
    "halo tile": ("direct/tiled", "n1-c60x6x7-k32x3x3-p1", lambda slabs, stages: [
        tile("fma", (32, 32), (16, 16), slabs, stages, "Cuvc", 1, 4, 7), tile("tf32x3", (32, 32), (16, 16), slabs, stages, "Cuvc", 1, 4, 7),
        tile("wg_tf32x3", (32, 64), (16, 64), slabs, stages + 1, "Cuvc", 1, 4, 7),
    ]),
    "halo tile fetched": ("im2win/fused", "n1-c70x6x7-k32x3x3-p1-float16", lambda slabs, stages: [
        tile("f16", (32, 32), (16, 16), slabs, stages, "Cuvc", 1, 4, 7),
        tile("wg_f16", (32, 64), (32, 64), slabs, stages + 1, "Cuvc", 1, 4, 7),
    ]),
    "planes": ("direct/tiled", "n1-c4x12x9-k8x3x3-p1", lambda slabs, stages: [
        tile("fma", (8, 96), (8, 32), slabs, stages, "cuv", 1, 10, 9),
    ]),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.pairwise
@pytest.mark.parametrize("stages", (2, 3, 4))
@pytest.mark.parametrize("slabs", (1, 2))
@pytest.mark.parametrize("kind", DEPTHS)
def test_slabs_and_stages(kind: str, slabs: int, stages: int) -> None:
    """Copies run one, two and three steps ahead, of one slab and two, and of more than there are.

    Each kind of arithmetic occurs with every number of steps ahead and of slabs; where there are several, they have the pairs in turn.
    """
    algorithm, key, make = DEPTHS[kind]
    conv = Conv2d.parse(key)
    kinds = make(slabs, stages)
    check(conv, [(algorithm, made) for i, made in enumerate(kinds) if len(kinds) == 1 or (slabs + stages + i) % 2])


def test_more_stages_than_steps() -> None:
    """A sum of one step, or of two, with copies three steps ahead."""
    conv = Conv2d.parse("n1-c20x5x6-k16x1x1")
    gathers = [tile(product, (16, 32), (16, 32), slabs, 4, "uvc") for product in ("fma", "tf32") for slabs in (1, 2)]
    gathers += [tile("wg_tf32", (16, 64), (16, 64), slabs, stages, "uvc") for slabs, stages in ((1, 3), (1, 5), (2, 5))]
    check(conv, [("implicit_gemm/tiled", made) for made in gathers])
    conv = Conv2d.parse("n1-c2x8x9-k8x3x3")
    check(conv, [("direct/tiled", tile("fma", (8, 64), (8, 64), rows, 4, "cuv", 1, 6, 7)) for rows in (3, 6)])


HALO_TILES = (
    ("n5-c12x4x5-k16x3x3-p1", (3, 4, 5), 64, "images that the halo tile's number does not divide"),
    ("n2-c12x9x11-k16x3x3-p1", (1, 4, 5), 32, "halo tiles beyond the last row and column, with fewer windows than the block"),
    ("n2-c12x9x11-k16x3x3-s2-p1", (2, 2, 4), 16, "halo tiles of both images with stride 2: exactly the block's windows"),
    ("n2-c12x9x11-k16x3x3-s2x3-p1-d1x2", (2, 3, 1), 16, "halo tiles of a single column"),
    ("n1-c40x7x6-k16x3x2-p1", (1, 1, 7), 16, "halo tiles of a single row, three of channels and more in turn"),
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("key", "halo_tile", "windows"), [case[:3] for case in HALO_TILES])
def test_halo_tiles(key: str, halo_tile: tuple[int, int, int], windows: int) -> None:
    conv = Conv2d.parse(key)
    kinds = {product: (64, 3) if PRODUCTS[product].unit == "warpgroup" else (windows, 2) for product in products(conv, H200)}
    made = [tile(product, (16, wide), (16, wide), 1, stages, "Cuvc", *halo_tile) for product, (wide, stages) in kinds.items()]
    check(conv, [(algorithm, one) for algorithm in ("direct/tiled", "im2win/fused") for one in made])


def test_halo_tiles_take_turns() -> None:
    """Three chunks of channels and more: a halo tile overwrites the one before the last."""
    conv = Conv2d.parse("n1-c60x6x7-k32x3x3-p1")
    assert chunks(conv, DEPTHS["halo tile"][2](1, 2)[0]) == 4


# --- stores

RUNS = (
    # key, algorithm, warp, halo tile, neighbours that one store takes
    ("n1-c8x8x8-k16x3x3-p1", "implicit_gemm/tiled", "tf32", (16, 32), (), 4),
    ("n1-c8x6x11-k16x3x3-p1", "implicit_gemm/tiled", "tf32", (16, 32), (), 2),
    ("n1-c8x5x11-k16x3x3-p1", "implicit_gemm/tiled", "tf32", (16, 32), (), 1),
    ("n1-c8x8x8-k16x3x3-p1-float16", "implicit_gemm/tiled", "f16", (16, 32), (), 8),
    ("n1-c8x6x6-k16x3x3-p1-float16", "implicit_gemm/tiled", "f16", (16, 32), (), 4),
    ("n1-c8x8x8-k16x3x3-p1-float16", "implicit_gemm/tiled", "f16", (16, 8), (), 2),
    ("n1-c8x8x8-k16x3x3-p1-float16", "direct/tiled", "f16", (16, 32), (1, 4, 8), 8),
    ("n1-c8x8x8-k16x3x3-p1-int8", "implicit_gemm/tiled", "s8", (16, 32), (), 4),
    ("n1-c12x5x8-k16x3x3-p1", "direct/tiled", "tf32x3", (16, 32), (1, 4, 6), 2),
    ("n1-c12x8x5-k16x3x3-p1", "im2win/fused", "tf32", (16, 32), (1, 4, 5), 1),
    ("n1-c8x5x7-k64x3x3-p1-NHWC", "implicit_gemm/tiled", "tf32x3", (32, 16), (), 4),
    ("n1-c8x5x7-k64x3x3-p1-NHWC", "implicit_gemm/tiled", "tf32", (16, 32), (), 2),
    ("n1-c8x5x7-k65x3x3-p1-NHWC", "implicit_gemm/tiled", "tf32", (16, 32), (), 1),
    ("n1-c8x5x7-k64x3x3-p1-float16-NHWC-bias-add", "implicit_gemm/tiled", "f16", (64, 16), (), 8),
    ("n1-c8x5x7-k72x3x3-p1-g2-float16-NHWC-bias-add", "implicit_gemm/tiled", "f16", (32, 16), (), 4),
    ("n1-c8x5x7-k64x3x3-p1-int8-NHWC-bias", "implicit_gemm/tiled", "s8", (32, 16), (), 4),
    ("n1-c8x8x8-k16x3x3-p1", "implicit_gemm/tiled", "wg_tf32", (16, 128), (), 4),
    ("n1-c8x6x11-k16x3x3-p1", "implicit_gemm/tiled", "wg_tf32x3", (16, 64), (), 2),
    ("n1-c8x5x11-k16x3x3-p1", "implicit_gemm/tiled", "wg_tf32", (16, 64), (), 1),
    ("n1-c8x8x8-k16x3x3-p1-float16", "implicit_gemm/tiled", "wg_f16", (16, 256), (), 8),
    ("n1-c8x8x8-k16x3x3-p1-int8", "implicit_gemm/tiled", "wg_s8", (16, 128), (), 4),
    ("n1-c8x5x7-k64x3x3-p1-NHWC", "implicit_gemm/tiled", "wg_tf32x3", (32, 64), (), 4),
    ("n1-c8x5x7-k65x3x3-p1-NHWC", "implicit_gemm/tiled", "wg_tf32", (24, 64), (), 1),
    ("n1-c8x5x7-k64x3x3-p1-float16-NHWC-bias-add", "implicit_gemm/tiled", "wg_f16", (64, 64), (), 8),
    ("n1-c8x5x7-k72x3x3-p1-g2-float16-NHWC-bias-add", "implicit_gemm/tiled", "wg_f16", (8, 64), (), 2),
    ("n1-c8x5x7-k64x3x3-p1-int8-NHWC-bias", "implicit_gemm/tiled", "wg_s8", (32, 64), (), 4),
    ("n1-c12x5x7-k64x3x3-p1-NHWC-bias", "direct/tiled", "fma", (16, 16), (1, 2, 7), 4),
    ("n1-c12x5x7-k66x3x3-p1-NHWC-bias", "direct/tiled", "fma", (16, 16), (1, 2, 7), 1),
    ("n1-c3x5x7-k64x3x3-p1-NHWC-bias", "direct/tiled", "fma", (16, 32), (1, 4, 7), 4),
)  # fmt: skip


def _stores(key: str) -> list[tuple[Kernel, int]]:
    """The table's kernels of a problem, and the neighbours that their stores take."""
    conv = Conv2d.parse(key)
    found = []
    for _, algorithm, product, (warp_m, warp_n), halo_tile, run in (row for row in RUNS if row[0] == key):
        order = "uvc" if not halo_tile else "cuv" if conv.in_channels // conv.groups <= 3 else "Cuvc"
        stages = 3 if PRODUCTS[product].unit == "warpgroup" else 2
        made = tile(product, (warp_m, 2 * warp_n), (warp_m, warp_n), 3 if order == "cuv" else 1, stages, order, *halo_tile)
        found.append(((algorithm, made), run))
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("key", list(dict.fromkeys(row[0] for row in RUNS)))
def test_stores_of_every_length(key: str) -> None:
    conv, rows = Conv2d.parse(key), _stores(key)
    for (algorithm, made), run in rows:
        assert run_length(conv, made, operand_of(made).run(conv, made)) == run, f"{algorithm} {made}"
    check(conv, [kernel for kernel, _ in rows])


def test_wide_stores_are_wide() -> None:
    """A run of four floats is one assignment of 16 bytes."""
    for kernel, run in _stores("n1-c8x8x8-k16x3x3-p1"):
        source, _ = combined(Conv2d.parse("n1-c8x8x8-k16x3x3-p1"), [kernel])
        assert run == 4 and "*(float4*)(output_ptr" in source


# --- an activation that is not exact


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", ["n1-c12x7x9-k18x3x3-p1-bias-add-silu", "n1-c16x7x8-k16x3x3-p1-float16-NHWC-bias-silu"])
def test_silu(key: str) -> None:
    """Its exponential is rounded: a few units in the last place of the output's type, or of float32 beside zero."""
    conv = Conv2d.parse(key)
    tensors = typed(conv, {name: array / 8 if name == "data" else array for name, array in exact_tensors(conv).items()})
    right = expected(conv.with_(dtype="float32"), tensors) if conv.dtype == "float32" else expected(conv, tensors)
    kinds = itertools.product(("direct/tiled", "implicit_gemm/tiled"), products(conv, H200))
    kernels = [kernel for name, product in kinds for kernel in sampled(conv, name, product)]
    emulated = Emulated(conv, kernels)
    for seed in SEEDS:
        for kernel, y in zip(kernels, emulated(tensors, seed), strict=True):
            assert error(y.astype(np.float64), right.astype(np.float64)) <= 4 * np.finfo(y.dtype).eps, kernel


def test_regimes_are_what_they_say() -> None:
    """Problems are small, and no two are the same."""
    convs = {key: Conv2d.parse(key) for key, _ in REGIMES}
    assert all(str(conv) == key for key, conv in convs.items()) and len(convs) == len(REGIMES)
    assert all(math.prod(conv.output_shape) <= 1 << 13 for conv in convs.values())
