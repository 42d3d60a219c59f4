"""CUDA tiles: every rule of what is legal, the spaces, shared memory, and how filters are packed for them."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from emulated import ROWS, cuda_algorithms, generated, sampled, tiles
from hypothesis import given, settings

from im2win.codegen.llvm import TileError
from im2win.device.gpu import H200
from im2win.packing.mma_fragments import FORMS, CudaPack, column, row
from im2win.registry import cuda_lowering
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.arithmetic import NATIVE, PRODUCTS
from im2win.schedules.cuda.families.multistage import Multistage, OutputParts
from im2win.schedules.cuda.kernels.multistage import shared_bytes
from im2win.schedules.cuda.loaders.im2col_taps import unit_elements
from im2win.schedules.cuda.space.multistage import FEW_CHANNELS, products
from im2win.schedules.cuda.tiles.multistage import ORDERS, MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import LAYOUTS, Conv2d
from im2win.spec.suites import SUITES

TYPES = ("float32", *NATIVE)  # whose products multistage kernels have
CONV = Conv2d.parse("n8-c64x28x28-k128x3x3-p1")
FEW = Conv2d.parse("n8-c3x32x32-k64x7x7-s2-p3")
GATHER = MultistageTile("fma", 64, 128, 32, 64, 1, 3, "uvc")
GROUPS = MultistageTile("wg_tf32x3", 128, 128, 128, 64, 1, 3, "uvc")
GROUPS_HALO = MultistageTile("wg_tf32", 64, 128, 64, 64, 1, 3, "Cuvc", 1, 8, 14)
LONG = Conv2d.parse("n8-c512x7x7-k512x3x3")
MATRIX = replace(GATHER, product="tf32x3")
HALO = MultistageTile("tf32", 64, 128, 32, 64, 1, 3, "Cuvc", 1, 8, 14)
PLANES = MultistageTile("fma", 64, 512, 32, 128, 7, 2, "cuv", 2, 16, 16)
PLANS = {"gather": (CONV, GATHER, "implicit_gemm/tiled"), "matrix": (CONV, MATRIX, "implicit_gemm/tiled"),
         "halo tile": (CONV, HALO, "direct/tiled"),
         "planes": (FEW, PLANES, "direct/tiled"), "warpgroups": (LONG, GROUPS, "implicit_gemm/tiled"),
         "halo tile of warpgroups": (CONV, GROUPS_HALO, "direct/tiled")}  # fmt: skip


def broken(conv: Conv2d, tile: MultistageTile, algorithm: str) -> list[str]:
    return schedule_of(algorithm).on_gpu.violations(conv, tile, H200)


# --- what is legal

RULES: tuple[tuple[str, dict[str, Any], str], ...] = (
    # a legal tile, what is changed, every message then
    (
        "gather", {"product": "fma_f16"},
        r"`product` \(=fma_f16\) must be one of fma, tf32, tf32x3, f16, bf16, s8, wg_tf32, wg_tf32x3, wg_f16, wg_bf16, wg_s8",
    ),
    ("gather", {"order": "vuc"}, r"`order` \(=vuc\) must be one of cuv, uvc, Cuvc"),
    ("gather", {"stages": 1}, r"`stages` \(=1\) must be at least 2"),
    *(("gather", {name: 0}, rf"`{name}` \(=0\) must be at least 1") for name in ("block_m", "block_n", "warp_m", "warp_n", "slabs")),
    *(("halo tile", {name: -1}, rf"`{name}` \(=-1\) must be at least 0") for name in ("images", "rows", "cols")),
    ("gather", {"product": "f16"}, r"`product` \(=f16\) multiplies float16, not float32"),
    ("gather", {"product": "bf16"}, r"`product` \(=bf16\) multiplies bfloat16, not float32"),
    ("gather", {"product": "s8"}, r"`product` \(=s8\) multiplies int8, not float32"),
    ("gather", {"warp_m": 8}, r"`warp_m` \(=8\) must be a multiple of 16"),
    ("matrix", {"warp_m": 8}, r"`warp_m` \(=8\) must be a multiple of 16"),
    ("planes", {"warp_m": 2, "block_m": 2}, r"`warp_m` \(=2\) must be a multiple of 4"),
    ("matrix", {"warp_n": 4, "block_n": 4}, r"`warp_n` \(=4\) must be a multiple of 8"),
    ("planes", {"warp_n": 16, "block_n": 16}, r"`warp_n` \(=16\) must be a multiple of 32"),
    ("gather", {"block_m": 48}, r"`warp_m` \(=32\) must divide `block_m` \(=48\)"),
    ("gather", {"block_n": 96}, r"`warp_n` \(=64\) must divide `block_n` \(=96\)"),
    ("gather", {"warp_m": 16, "warp_n": 16}, r"the block's 1024 threads must be at most 512"),
    ("gather", {"warp_m": 64, "warp_n": 128}, r"the 256 sums of a thread must be at most 168"),
    ("halo tile", {"images": 0}, r"`images`, `rows` and `cols` must all be 0 or none"),
    ("halo tile", {"cols": 0}, r"`images`, `rows` and `cols` must all be 0 or none"),
    ("gather", {"images": 1, "rows": 8, "cols": 14, "order": "cuv"}, r"windows staged by taps have no halo tile"),
    ("halo tile", {"images": 0, "rows": 0, "cols": 0, "order": "uvc"}, r"windows staged by rows need a halo tile"),
    ("gather", {"order": "Cuvc"}, r"`order` Cuvc is for halo tiles"),
    ("halo tile", {"order": "uvc"}, r"`order` uvc is not for halo tiles"),
    ("gather", {"fetched": 2}, r"`fetched` \(=2\) must be 0 or 1"),
    ("halo tile", {"fetched": 1}, r"`fetched` \(=1\) is for windows that are close in memory while the sum's elements are not"),
    ("gather", {"block_n": 512, "slabs": 2, "stages": 4}, r"the block's \d+ bytes of shared memory must be at most 232448"),
    ("gather", {"block_m": 256}, r"`block_m` \(=256\) must not hold 16 channels or more beyond a group's 128"),
    ("gather", {"block_n": 8, "warp_n": 8}, r"`block_n` \(=8\) must be a multiple of the 16 windows copied at a time"),
    ("halo tile", {"images": 9, "rows": 1, "cols": 14}, r"`images` \(=9\) must be at most the output's 8"),
    ("halo tile", {"rows": 29, "cols": 4}, r"`rows` \(=29\) must be at most the output's 28"),
    ("halo tile", {"rows": 4, "cols": 29}, r"`cols` \(=29\) must be at most the output's 28"),
    ("halo tile", {"rows": 10}, r"the halo tile's 140 windows must be at most `block_n` \(=128\)"),
    ("planes", {"product": "tf32"}, r"halo tiles in `order` cuv are for `product` fma"),
    ("planes", {"slabs": 4}, r"`slabs` \(=4\) must divide the 21 rows that the kernel has in all channels"),
    ("halo tile", {"stages": 11}, r"the 10 steps that copies run ahead must be at most the 9 that share channels"),
    ("halo tile of warpgroups", {"stages": 12}, r"the 10 steps that copies run ahead must be at most the 9 that share channels"),
    ("warpgroups", {"stages": 2}, r"`stages` \(=2\) must be at least 3 for a warpgroup"),
    ("warpgroups", {"warp_m": 4, "block_m": 4}, r"`warp_m` \(=4\) must be a multiple of 8"),
    ("warpgroups", {"product": "wg_s8", "warp_m": 8, "block_m": 8}, r"`warp_m` \(=8\) must be a multiple of 16"),
    ("halo tile of warpgroups", {"warp_m": 264, "block_m": 264}, r"`warp_m` \(=264\) must be at most 256"),
    ("warpgroups", {"warp_n": 32, "block_n": 32}, r"`warp_n` \(=32\) must be a multiple of 64"),
    ("warpgroups", {"warp_m": 128, "warp_n": 128}, r"the 320 registers of a thread for sums and words must be at most 208"),
    ("warpgroups", {"block_n": 384, "slabs": 1}, r"the block's 768 threads of \d+ registers must have at most 65536"),
)  # fmt: skip


@pytest.mark.parametrize("kind", PLANS)
def test_tiles_that_break_no_rule(kind: str) -> None:
    assert broken(*PLANS[kind]) == []


@pytest.mark.parametrize(("kind", "changes", "message"), RULES)
def test_every_rule_by_itself(kind: str, changes: dict[str, Any], message: str) -> None:
    conv, tile, algorithm = PLANS[kind]
    found = broken(conv, replace(tile, **changes), algorithm)
    assert found and all(re.fullmatch(message, text) for text in found), found


def test_warpgroups_need_a_gpu_that_has_them() -> None:
    older = replace(H200, arch="sm_80")
    schedule = schedule_of("implicit_gemm/tiled").on_gpu
    assert schedule.violations(LONG, GROUPS, older) == ["`product` (=wg_tf32x3) needs compute capability 9.0, not sm_80"]
    assert products(LONG, older) == ["fma", "tf32", "tf32x3"]
    assert not any(tile.warpgroup for tile in schedule.space(LONG, older, "winograd"))


def test_a_tile_that_is_not_legal_is_not_lowered() -> None:
    with pytest.raises(TileError, match=r"direct/tiled on n8-c64.*: `images` \(=9\) must be at most the output's 8\."):
        cuda_lowering.lower(CONV, schedule_of("direct/tiled"), replace(HALO, images=9, rows=1), H200)
    with pytest.raises(TileError, match="mcfa/tiled has no CUDA schedule"):
        cuda_lowering.lower(CONV, replace(schedule_of("mcfa/tiled"), cuda=None), GATHER, H200)


@st.composite
def any_tiles(draw: st.DrawFn) -> MultistageTile:
    """Tiles of any numbers, more of them near legal ones."""
    count, size = st.integers(-1, 12), st.sampled_from((0, 4, 8, 16, 24, 32, 48, 64, 128, 512))
    shape = draw(st.sampled_from(((0, 0, 0), (1, 4, 4), (1, 8, 14)))) if draw(st.booleans()) else (draw(count), draw(count), draw(count))
    sizes = [draw(size) for _ in range(4)]
    product, order = draw(st.sampled_from((*PRODUCTS, "f64"))), draw(st.sampled_from((*ORDERS, "vuc")))
    return MultistageTile(product, *sizes, draw(count), draw(count), order, *shape)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(any_tiles(), st.sampled_from(("implicit_gemm/tiled", "direct/tiled", "im2win/stored")), st.sampled_from((CONV, FEW)))
def test_no_other_rule(tile: MultistageTile, algorithm: str, conv: Conv2d) -> None:
    """Whatever the numbers are, the answer is a list of messages, and all of them are in the table."""
    forms = [_of_any_number(message) for _, _, message in RULES]
    for text in broken(conv, tile, algorithm):
        assert any(re.fullmatch(form, text) for form in forms), text


def _of_any_number(message: str) -> str:
    return re.sub(r"(?<![\w+])\d+(?!\w)", r"-?\\d+", re.sub(r"=\w+", r"=-?\\w+", message))


# --- spaces

LAYERS = (
    "n8-c64x28x28-k128x3x3-p1",
    "n128-c3x227x227-k96x11x11-s4",  # a first layer
    "n1-c2048x7x7-k512x1x1",  # a last one, one image
    "n32-c256x56x56-k64x1x1-NHWC",
    "n8-c32x112x112-k32x3x3-p1-g32",  # depthwise
    "n8-c64x28x28-k96x3x3-p1-g4-NHWC",
    "n1-c3x8192x8192-k3x3x3-p1",  # three filters
    "n2-c24x13x13-k40x5x5-s2-p2-d2",
    "n1-c1x5x5-k1x5x5",  # one output
)  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("key", LAYERS)
def test_spaces_are_not_empty_and_legal(key: str, dtype: str) -> None:
    """Only halo tiles of few channels are left to CUDA cores: a slab would be mostly zeros."""
    conv = Conv2d.parse(key).with_(dtype=dtype)
    few = conv.in_channels // conv.groups <= FEW_CHANNELS
    for algorithm in cuda_algorithms(conv):
        schedule = schedule_of(algorithm).on_gpu
        if algorithm == "direct/depthwise":  # it has one product for each type
            space = schedule.space(conv, H200, "float32")
            assert space and len(set(space)) == len(space) and {tile.dtype for tile in space} == {dtype}
            assert not any(schedule.violations(conv, tile, H200) for tile in space)
            continue
        halo = isinstance(schedule, Multistage) and schedule.windows.halo
        for product in products(conv, H200):
            found = tiles(conv, algorithm, product)
            assert len(set(found)) == len(found)
            assert bool(found) == (not (few and halo and product != "fma")), (algorithm, product)
            assert all(tile.product == product and not broken(conv, tile, algorithm) for tile in found)


@pytest.mark.slow
def test_every_layer_of_the_suites_has_a_tile() -> None:
    for suite in SUITES.values():
        for layer in suite.layers():
            assert any(tiles(layer.conv, "implicit_gemm/tiled", product) for product in products(layer.conv, H200)), layer.conv


# --- shared memory


@pytest.mark.sampled(3)
@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("key", ["n1-c20x9x10-k24x3x3-p1", "n1-c3x13x13-k16x5x5-s2-p2"])
def test_shared_memory_is_what_the_launch_takes(key: str, dtype: str, layout: str) -> None:
    conv = Conv2d.parse(key).with_(dtype=dtype, layout=layout)
    for name in cuda_algorithms(conv):
        schedule = ROWS[name].on_gpu
        assert isinstance(schedule, Multistage)
        windows, in_parts = schedule.windows, isinstance(schedule, OutputParts)
        for product in products(conv, H200):
            for _, tile in sampled(conv, name, product):
                launches = {launch.kernel: launch for launch in generated(conv, name, tile).launches}
                launch = launches["conv2d_kernel_1" if in_parts else "conv2d_kernel"]
                assert launch.dynamic_bytes == shared_bytes(conv, tile, windows), tile
                assert launch.block == (tile.threads, 1, 1)
                transforms = "transform_kernel" in launches, "transform_parts_kernel" in launches
                assert transforms == (bool(windows.axes) > in_parts, in_parts)


# --- plain values


def test_round_trip() -> None:
    for _, tile, _ in PLANS.values():
        assert MultistageTile.from_dict(tile.as_dict()) == tile


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": "8"}, r"`rows` \(='8'\) must be of type int"),
        ({"stages": True}, r"`stages` \(=True\) must be of type int"),
        ({"slabs": 1.0}, r"`slabs` \(=1\.0\) must be of type int"),
        ({"order": 3}, r"`order` \(=3\) must be of type str"),
        ({"unroll": 4}, r"fields \[.*'unroll'.*\] must be \["),
    ],
)
def test_values_that_are_no_tile(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultistageTile.from_dict({**GATHER.as_dict(), **values})


def test_a_missing_field() -> None:
    with pytest.raises(ValueError, match=r"tile: fields \['block_m'\] must be \['band', 'block_m', 'block_n', "):
        MultistageTile.from_dict({"block_m": 64})


# --- filters


@st.composite
def packs(draw: st.DrawFn) -> tuple[Conv2d, CudaPack]:
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(TYPES))
    conv = Conv2d(1, groups * draw(st.integers(1, 40)), 5, 5, groups * draw(st.integers(1, 40)), kernel, groups=groups, dtype=dtype)
    form = draw(st.sampled_from(FORMS))
    run = draw(st.sampled_from((1, 2, 4, 8))) if form != "rows" else 1
    block = draw(st.integers(1, 3)) * 8 * max(run, 2)
    return conv, CudaPack(form, block, draw(st.sampled_from(ORDERS)), draw(st.integers(1, 2)), run)


def numbered(conv: Conv2d, start: int = 1) -> np.ndarray[Any, Any]:
    """Filters whose every element has other bits, as far as there are others, and none is zero."""
    bits = {4: np.uint32, 2: np.uint16, 1: np.uint8}[conv.itemsize]
    count, most = math.prod(conv.filter_shape), np.iinfo(bits).max // 4
    return (np.arange(count) % most + start).astype(bits).view(conv.dtype).reshape(conv.filter_shape)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(packs())
def test_packing_is_a_permutation_and_zeros(drawn: tuple[Conv2d, CudaPack]) -> None:
    conv, pack = drawn
    w = numbered(conv)
    packed = pack.filter(conv, w)
    slab = 64 // conv.itemsize
    depth, per_group = math.prod(conv.filter_shape[1:]), conv.out_channels // conv.groups
    blocks, slabs, size = pack.shape(conv)
    assert packed.shape == pack.shape(conv) and packed.dtype == w.dtype and packed.flags.c_contiguous
    assert size == pack.block * slab and slabs % pack.slabs == 0 and slabs * slab == pack.depth(conv) >= depth
    assert blocks % conv.groups == 0 and 0 <= blocks // conv.groups * pack.block - per_group < pack.block
    assert np.array_equal(np.sort(packed[packed != 0], axis=None), np.sort(w, axis=None))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(("products", "columns")), st.integers(1, 40), st.integers(1, 20), st.sampled_from(("uvc", "Cuvc")),
    st.integers(0, 2**32 - 1),
)
def test_parts_make_up_the_filter(form: str, channels: int, filters: int, order: str, seed: int) -> None:
    """One part is TF32, rounded, off by 2^-11. Two are what the unit reads and what that leaves: of which it reads all but 2^-20."""
    conv = Conv2d(1, channels, 3, 3, filters, 3)
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal(conv.filter_shape) * np.exp2(rng.integers(-30, 30, conv.filter_shape))).astype(np.float32)
    plain, high, both = (CudaPack(form, 32, order, 1, parts=parts).filter(conv, w) for parts in (0, 1, 2))
    run = {"products": 32 * 4, "columns": 32 * 16}[form]  # elements behind which their low parts lie
    pairs = both.reshape(-1, 2, run).astype(np.float64)
    plain = plain.reshape(-1, run).astype(np.float64)
    rounded = high.reshape(-1, run).astype(np.float64)
    assert not (high.view(np.uint32) & 0x1FFF).any() and (np.abs(rounded - plain) <= 2.0**-11 * np.abs(plain)).all()
    assert np.array_equal(pairs.sum(axis=1), plain)
    read = (both.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).reshape(-1, 2, run).astype(np.float64)
    assert np.array_equal(read[:, 0], pairs[:, 0])
    assert (np.abs(read.sum(axis=1) - plain) <= 2.0**-20 * np.abs(plain)).all()


@pytest.mark.parametrize("run", [1, 2, 4, 8])
def test_rows_and_columns_are_permutations(run: int) -> None:
    """And the sums of a lane are neighbours: `run` of them, aligned to their number."""
    tiles_of_run = max(run // 2, 1)
    columns = [[column(tile, place, run) for place in range(8)] for tile in range(2 * tiles_of_run)]
    assert sorted(itertools.chain(*columns)) == list(range(16 * tiles_of_run))
    rows = [[row(tile, place, run) for place in range(16)] for tile in range(2 * tiles_of_run)]
    assert sorted(itertools.chain(*rows)) == list(range(32 * tiles_of_run))
    if run > 1:
        for lane in range(4):
            held = [columns[tile][2 * lane + e] for tile in range(tiles_of_run) for e in range(2)]
            assert held == list(range(held[0], held[0] + run)) and held[0] % run == 0
        for lane in range(8):
            held = [rows[tile][lane + 8 * half] for tile in range(tiles_of_run) for half in range(2)]
            assert held == list(range(held[0], held[0] + run)) and held[0] % run == 0


# --- how wide copies are


@pytest.mark.parametrize(
    ("key", "order", "elements"),
    [
        ("n1-c3x32x32-k16x16x16-s16-float16-NHWC", "uvc", 8),  # a row of 48 neighbouring halves
        ("n1-c3x32x32-k16x4x4-s4-float16-NHWC", "uvc", 4),  # of 12
        ("n1-c3x32x32-k16x4x4-s4-NHWC", "uvc", 4),  # of 12 floats
        ("n1-c3x32x32-k16x4x4-s4-int8-NHWC", "uvc", 4),
        ("n1-c3x32x32-k16x16x16-s16-float16-NHWC", "cuv", 0),  # the taps of a channel are 3 halves apart
        ("n1-c3x32x32-k16x4x4-s4-p1-float16-NHWC", "uvc", 0),  # a tap may lie in the padding and its neighbour not
        ("n1-c3x32x32-k16x4x4-s4-d2-float16-NHWC", "uvc", 0),  # taps are not neighbours
        ("n1-c3x32x32-k16x4x4-s3-float16-NHWC", "uvc", 0),  # windows begin 9 halves apart
        ("n1-c6x32x32-k16x4x4-s4-g2-float16-NHWC", "uvc", 0),  # between the taps of a group lie those of the other
        ("n1-c8x32x32-k16x3x3-p1-float16-NHWC", "uvc", 8),  # the channels of a tap
        ("n1-c3x32x32-k16x16x16-s16-float16", "uvc", 0),
    ],
)
def test_copies_are_as_wide_as_neighbours_and_strides_allow(key: str, order: str, elements: int) -> None:
    assert unit_elements(Conv2d.parse(key), order, WindowSource()) == elements


@pytest.mark.parametrize(
    ("key", "offered"),
    [
        ("n1-c64x28x28-k64x1x1", True),
        ("n1-c64x28x28-k64x3x3-s2-p1-float16", True),
        ("n1-c64x28x28-k64x3x3-s3-p1", False),  # a line holds few windows
        ("n1-c64x28x28-k64x1x1-NHWC", False),  # the channels of a window are neighbours
    ],
)
def test_windows_are_fetched_where_they_are_neighbours_and_their_elements_are_not(key: str, offered: bool) -> None:
    conv = Conv2d.parse(key)
    tiles = schedule_of("implicit_gemm/tiled").on_gpu.space(conv, H200, "float32")
    assert {tile.fetched for tile in tiles} == ({0, 1} if offered else {0})
    assert all("fetched" in tile.as_dict() for tile in tiles if tile.fetched)
    assert not any("fetched" in tile.as_dict() for tile in tiles if not tile.fetched)  # as in records from before there was the field
