"""Winograd's form along rows on CUDA: exact where its numbers are exact, within the tolerance where they are not, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulated import Emulated, Kernel, differences, expected, generated, tiles, typed
from oracle import exact_tensors, normal_tensors

from im2win.device.gpu import H200
from im2win.numerics.reference import error, reference
from im2win.numerics.tolerance import tolerance
from im2win.numerics.winograd_tiling import row_problem
from im2win.packing.mma_fragments import CudaPack
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.families.winograd import WinogradBands
from im2win.schedules.cuda.kernels.multistage import pack_of, step_filters
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d

pytestmark = pytest.mark.usefixtures("unrestored")

PLAN = WinogradBands()


def kernel(product: str, channels: int, windows: int, *halo_tile: int, slabs: int = 1, stages: int = 3, across: int = 1) -> Kernel:
    tile = MultistageTile(product, channels * across, windows, channels, windows, slabs, stages, "Cuvc", *halo_tile, outputs=2)
    return "winograd/tiled", tile


EXACT = (
    ("n2-c40x9x10-k40x3x3-p1", kernel("wg_tf32x3", 24, 64, 1, 8, 5), "channels and rows left over"),
    ("n2-c40x9x11-k40x3x3-p1-NHWC", kernel("wg_tf32x3", 32, 64, 1, 8, 6), "an odd width: a tile's last output is beyond it"),
    ("n1-c20x6x17-k40x3x3-p0.2.1.0", kernel("wg_tf32x3", 16, 128, 1, 5, 8), "one half of the registers, four sides of padding"),
    ("n3-c36x4x16-k16x3x3-p1-bias-add-relu", kernel("wg_tf32", 16, 64, 2, 4, 8, slabs=2, stages=4), "two images, whole runs of a row"),
    ("n3-c36x5x7-k80x3x3-p1-g2-NHWC-bias-relu6", kernel("wg_tf32x3", 24, 64, 3, 4, 4), "groups"),
    ("n1-c64x9x16-k64x3x3-p1-float16", kernel("wg_f16", 64, 64, 1, 8, 8), "halves, fetched, stored by runs"),
    ("n2-c64x9x13-k72x3x3-p1-float16-bias-add", kernel("wg_f16", 32, 64, 1, 8, 7, across=2), "two warpgroups, single stores"),
    ("n2-c96x9x13-k64x3x3-p1-float16-NHWC-bias-add-relu", kernel("wg_f16", 64, 64, 1, 8, 7, slabs=2), "halves, copied, two slabs"),
    ("n2-c96x9x13-k64x3x3-p1-bfloat16-NHWC-bias-add-relu", kernel("wg_bf16", 64, 64, 1, 8, 7, slabs=2), "bfloat16, copied"),
    ("n1-c64x9x16-k64x3x3-p1-bfloat16", kernel("wg_bf16", 64, 64, 1, 8, 8), "bfloat16, fetched"),
    ("n1-c40x12x8-k16x5x3-p1-float16-NHWC", kernel("wg_f16", 16, 128, 1, 8, 4), "five rows of three taps"),
    ("n2-c40x9x13-k24x1x3-p0x1-float16-NHWC", kernel("wg_f16", 24, 64, 1, 8, 7), "one row of three taps"),
)  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("key", "one"), [row[:2] for row in EXACT], ids=[row[2] for row in EXACT])
def test_two_outputs_of_three_taps_are_exact(key: str, one: Kernel) -> None:
    """The matrices of F(2, 3) hold 0, 1 and halves: small integers stay exact."""
    conv = Conv2d.parse(key)
    assert PLAN.violations(conv, one[1], H200) == []
    tensors = typed(conv, exact_tensors(conv))
    right, emulated = expected(conv, tensors), Emulated(conv, [one])
    for seed in range(2):
        wrong = differences(conv, [one], emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("key", ["n1-c64x9x16-k32x3x3-p1-float16-NHWC-silu", "n1-c512x4x8-k32x3x3-p1-float16", "n1-c200x9x16-k32x3x3-p1"])
def test_errors_keep_to_the_tolerance(key: str) -> None:
    conv = Conv2d.parse(key)
    one = kernel("wg_f16" if conv.dtype == "float16" else "wg_tf32x3", 32, 64, 1, 4, 4)
    tensors = typed(conv, normal_tensors(conv, 0))
    [y] = Emulated(conv, [one])(tensors)
    assert error(y, reference(conv, tensors["data"], tensors["filter"])) <= 0.9 * tolerance(conv)


def test_tiles_of_a_row_are_windows() -> None:
    conv = Conv2d(1, 8, 9, 12, 8, 3, padding=(1, 2, 0, 0))
    tiles_of_rows = row_problem(conv, 2)
    assert conv.output_size == (8, 12) and tiles_of_rows.output_size == (8, 6)
    assert (tiles_of_rows.kernel, tiles_of_rows.stride, tiles_of_rows.padding) == ((3, 4), (1, 2), (1, 2, 0, 0))
    odd = row_problem(Conv2d(1, 8, 9, 13, 8, 3), 2)
    assert odd.output_size == (7, 6) and odd.padding == (0, 0, 0, 1)


def test_filters_of_a_step_are_together() -> None:
    """A step takes every column of its taps' rows: what `step_filters` counts is a whole number of times in the packed tensor."""
    conv, (_, tile) = Conv2d(1, 40, 9, 12, 40, 3), kernel("wg_tf32x3", 24, 64, 1, 8, 6)
    pack = pack_of(conv, tile)
    assert isinstance(pack, CudaPack) and pack.outputs == 2
    steps = np.prod(pack.shape(conv)) / pack.blocks(conv) / step_filters(conv, tile)
    assert steps == 3 * 3  # chunks of 16 channels, rows of the kernel
    w = np.zeros(conv.filter_shape, np.float32)
    w[0, 0, 0] = 1, 2, 4
    packed = pack.filter(conv, w)
    assert sorted(packed[packed != 0]) == [-1, 1.5, 3.5, 4]  # G w, as TF32 reads it; what that leaves is nothing


CONV = Conv2d.parse("n8-c64x28x28-k128x3x3-p1")
GOOD = kernel("wg_tf32x3", 32, 64, 1, 8, 8)[1]


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        (str(CONV), {"outputs": 3}, f"`outputs` (=3) must be one of 2 for rows of {CONV}"),
        (str(CONV), {"band": 32}, "`band` (=32) must be 0 for tiles of rows"),
        (str(CONV), {"order": "cuv"}, "`order` (=cuv) must be Cuvc for tiles of rows"),
        (str(CONV), {"product": "tf32x3"}, "`product` (=tf32x3) must be a warpgroup's for tiles of rows"),
        (str(CONV), {"warp_m": 64, "block_m": 64, "slabs": 2}, "`slabs` (=2) must be 1 where registers hold one slab only"),
        (str(CONV), {"rows": 4, "cols": 15}, "`cols` (=15) must be at most the output's 14"),
        ("n8-c64x28x28-k128x5x5-p2", {}, "`outputs` (=2) must be one of none for rows of n8-c64x28x28-k128x5x5-p2"),
        ("n8-c64x28x28-k128x3x3-p1-float16-relu6", {"product": "wg_f16"}, "must be one of none for rows of"),
        ("n1-c2048x8x8-k32x3x3-p1", {"cols": 4}, "sums of tiles of rows must not be so long that they are kept in parts"),
    ],
)
def test_rules(key: str, changes: dict[str, object], message: str) -> None:
    [found] = PLAN.violations(Conv2d.parse(key), replace(GOOD, **changes), H200)  # type: ignore[arg-type]
    assert message in found


def test_who_takes_them() -> None:
    """The tuner, whatever the accuracy; who has not tuned, in float16; no problem whose errors a bound on the output shows."""
    half = CONV.with_(dtype="float16")
    for conv, product in ((CONV, "wg_tf32x3"), (half, "wg_f16")):
        found = [tile for tile in tiles(conv, "winograd/tiled", product) if tile.in_rows]
        assert found and all(PLAN.violations(conv, tile, H200) == [] for tile in found[::20])
        assert {backend_for(H200).proven(conv, tile) for tile in found[::20]} == {conv.dtype == "float16"}
    assert not default_tile(CONV, "winograd/tiled", H200)[1].in_rows
    assert not any(tile.in_rows for tile in tiles(half.with_(activation="relu6"), "winograd/tiled", "wg_f16"))


@pytest.mark.parametrize("key", ["n32-c384x8x8-k384x1x3-p0x1-float16-NHWC", "n8-c64x28x28-k64x5x3-p2x1-float16-NHWC"])
def test_kernels_that_are_not_square_store_nothing(key: str) -> None:
    """Default and size, although there are forms of square tiles with as many taps down, or none at all."""
    conv = Conv2d.parse(key)
    assert schedule_of("winograd/tiled").stored_bytes(conv, "cuda") == 0
    assert backend_for(H200).ranked(conv, schedule_of("winograd/tiled"))
    assert default_tile(conv, machine=H200)


def test_nothing_is_stored() -> None:
    assert PLAN.workspace_bytes(CONV, GOOD) == 0
    launches = generated(CONV, "winograd/tiled", GOOD).launches
    assert len(launches) == 1
