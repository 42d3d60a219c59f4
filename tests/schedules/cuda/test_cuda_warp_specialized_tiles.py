"""Tiles of warp-specialized kernels: what a halo tile is in memory, what is legal, and what is worth a trial."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from warp_specialized import ROW, S8, made, tile

from im2win.device.gpu import H200
from im2win.emulator import TensorMap
from im2win.packing import codec as packs
from im2win.registry.backends import backend_for
from im2win.schedules.cuda.legality.warp_specialized import SHARED, TMA_BOXES, unsupported_reason, violations
from im2win.schedules.cuda.mainloop.registers import resident
from im2win.schedules.cuda.space.warp_specialized import MOST, SHAPES, output_tiles, space
from im2win.schedules.cuda.tile_scheduler.persistent import staged_grid
from im2win.schedules.cuda.tiles.fields import field_of, flat
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d


def test_boxes() -> None:
    """What the driver is asked for: the innermost axis first, strides in bytes; one row of pixels, or whole images."""
    conv = Conv2d.parse("n5-c64x7x7-k128x3x3-p1-float16-NHWC")
    one = tile(64, 4, 7, 7, cluster=2)
    [box] = [each for each in made(conv, one).generated.launches[0].arguments if isinstance(each, TensorMap)]
    assert box == TensorMap("data", (64, 7, 7, 5), (2, 128, 896, 6272), (32, 8, 8, 2), (1, 1, 1, 1), 64)
    pixels = Conv2d.parse("n5-c64x7x7-k128x1x1-float16-NHWC")
    launch = made(pixels, tile(64, 1, 1, 128, slabs=2, cluster=2)).generated
    [box] = [each for each in launch.launches[0].arguments if isinstance(each, TensorMap)]
    assert box.sizes == (64, 245, 1, 1) and box.box == (64, 64, 1, 1) and launch.launches[0].cluster == 2


def test_a_patch_in_shared_memory() -> None:
    """Rows and images have the zeros between them in common."""
    conv = Conv2d.parse("n8-c64x7x7-k64x3x3-p1-float16-NHWC")
    field = StagedHaloTile(conv, tile(64, 4, 7, 7))
    assert (field.pitch, field.lines, field.columns, field.copied, field.reach) == (8, 8, 248, 256, 265)
    assert [field.shift(1, 2), field.shift(0, 1)] == [10, 1] and field.output_tiles == 2 and field.stage_pixels == 273
    part = StagedHaloTile(conv, tile(64, 1, 4, 7))
    assert (part.pitch, part.lines, part.columns, part.copied, part.reach) == (8, 6, 32, 48, 49)
    strided = StagedHaloTile(conv.with_(height=14, width=14, stride=2), tile(64, 2, 7, 7))
    assert (strided.planes, strided.pitch, strided.lines, strided.plane, strided.columns) == ((2, 2), 8, 8, 128, 120)
    assert StagedHaloTile(conv, tile(64, 1, 7, 7, cluster=2)).part == (1, 4, 8)
    assert StagedHaloTile(conv.with_(width=9), tile(64, 1, 7, 5, cluster=2)).part == (1, 8, 7)
    assert flat(conv) == conv and flat(conv.with_(kernel=1, padding=0)).input_shape == (1, 1, 392, 64)


def test_a_patch_of_one_tap_in_shared_memory() -> None:
    """A pixel for every output: none between them, and none of another parity."""
    one = tile(64, 4, 7, 7, tma_boxes="taps")
    for key in ("n8-c64x7x7-k64x3x3-p1-float16-NHWC", "n8-c64x9x9-k64x3x3-float16-NHWC", "n8-c64x14x14-k64x3x3-p1-float16-NHWC-s2"):
        conv = Conv2d.parse(key)
        field = field_of(conv, one)
        assert (field.pitch, field.lines, field.columns, field.planes) == (7, 7, 200, (1, 1)) and field.copied == field.reach == 196
        assert field.conv.output_size == conv.output_size and one.steps(conv) == 9 * 2 and field.output_tiles == 2


def test_columns_that_each_block_writes() -> None:
    conv = Conv2d.parse("n2-c256x9x9-k128x3x3-float16-NHWC")
    field = field_of(conv, tile(128, 1, 7, 7, cluster=4, shared="accumulators"))
    assert field.columns == 64 and field.kept == list(range(8)) and field.written == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert field.received == (3, 2 * 128 * 8) and field_of(conv, tile(128, 1, 7, 7)).received == (0, 0)
    uneven = field_of(conv, replace(field.tile, rows=3))
    assert uneven.columns == 32 and field_of(conv, replace(uneven.tile, cluster=8, rows=7)).written == [[j] for j in range(8)]


def test_the_grid() -> None:
    """Blocks that run at once, in whole clusters; those of four leave multiprocessors beyond sixteens idle."""
    conv = Conv2d.parse("n128-c512x28x28-k512x1x1-float16-NHWC")
    one = tile(128, 1, 1, 256, slabs=2, stages=4, filter_stages=4, groups=2)
    assert [staged_grid(conv, replace(one, cluster=cluster), H200) for cluster in (1, 2, 4)] == [132, 132, 128]
    small = tile(64, 1, 1, 64, slabs=1, groups=1)
    assert resident(field_of(conv, small), H200) == 4 and staged_grid(conv, small, H200) == 528
    assert staged_grid(conv.with_(batch=1, height=8, width=8), small, H200) == 8


GOOD = tile(64, 1, 3, 5)
KEY = "n2-c64x12x16-k128x3x3-p1-float16-NHWC"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"product": S8}, "`product` (=wg_s8) must be wg_f16 for float16"),
        ({"block_m": 96}, "`block_m` (=96) must be a multiple of 64 for each of 1 warpgroups"),
        ({"groups": 2}, "`block_m` (=64) must be a multiple of 64 for each of 2 warpgroups"),
        ({"block_m": 192}, "`block_m` (=192) must hold less than 64 channels beyond 128"),
        ({"images": 3}, "`images` (=3) must be 1 to the 2 there are"),
        ({"images": 2}, "`images` (=2) must be 1 where a tile has less than all 12 x 16 outputs of one"),
        ({"rows": 13}, "`rows` (=13) must be 1 to the output's 12"),
        ({"cols": 0}, "`cols` (=0) must be 1 to the output's 16"),
        ({"slabs": 3}, "`slabs` (=3) must be one of 1, 2"),
        ({"stages": 1}, "`stages` (=1) must be at least 2"),
        ({"filter_stages": 1}, "`filter_stages` (=1) must be at least 2"),
        ({"pingpong": 0}, "`pingpong` (=0) must be at least 1"),
        ({"taps": 2}, "`taps` (=2) must divide the kernel's 9"),
        ({"cluster": 3}, "`cluster` (=3) must be one of 1, 2, 4"),
        ({"cluster": 4}, "`cluster` (=4) must divide the 2 thread blocks along channels"),
        ({"cols": 16, "rows": 4, "cluster": 4, "shared": "filters"}, "`cluster` (=4) must divide the 6 tiles of outputs"),
        ({"shared": "outputs"}, "`shared` (=outputs) must be one of windows, filters, accumulators"),
        ({"shared": "accumulators", "cluster": 16}, "`cluster` (=16) must be one of 1, 2, 4, 8"),
        ({"shared": "accumulators", "cluster": 4}, "`cluster` (=4) must divide the 2 steps of a tile"),
        ({"shared": "accumulators", "cluster": 2, "pingpong": 2}, "`pingpong` (=2) must be 1 where blocks share accumulators"),
        ({"shared": "accumulators", "cluster": 2, "rows": 1, "cols": 6}, "`cluster` (=2) must be at most the 1 eights of outputs' columns"),
        ({"tma_boxes": "rows"}, "`tma_boxes` (=rows) must be one of halo, taps, rearranged, lines"),
        ({"tma_boxes": "taps", "taps": 3}, "`taps` (=3) must be 1 where TMA boxes bring what one tap reads"),
        ({"rows": 12, "cols": 16, "images": 2}, "the product's 424 columns must be at most 256"),
        ({"block_m": 192, "groups": 3, "cols": 16, "rows": 12}, "the 130 registers of a product must be at most the 128 that"),
        ({"pingpong": 5}, "the block's 768 threads must be at most 640"),
        ({"rows": 12, "cols": 16, "pingpong": 4}, "the 152 registers of a thread must be at most the 112 that it gets"),
        ({"taps": 9, "filter_stages": 7}, "bytes of shared memory must be at most 232448"),
    ],
)
def test_rules(change: dict[str, object], message: str) -> None:
    found = violations(Conv2d.parse(KEY), replace(GOOD, **change), H200)  # type: ignore[arg-type]
    assert any(message in one for one in found), found


def test_parts_of_a_cluster_begin_where_banks_do() -> None:
    flat_one = Conv2d.parse("n2-c64x12x16-k128x1x1-float16-NHWC")
    assert violations(flat_one, tile(64, 1, 1, 48, cluster=2), H200) == []  # 24 pixels each
    [message] = violations(flat_one, tile(64, 1, 1, 40, cluster=2), H200)
    assert message == "`cluster` (=2) must cut halo tiles in parts of whole images, rows or 8 pixels"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("n1-c64x9x9-k64x3x3-NHWC", "warp-specialized kernels multiply float16 or bfloat16 or int8 or float8_e4m3fn, not float32"),
        ("n1-c60x9x9-k64x3x3-float16", "channels of 9x9 pixels are brought 8 together, as TMA boxes need, not 60"),
        ("n1-c64x8x8-k64x3x3-int8", "rearrange elements of two bytes, channels first, not int8"),
        ("n1-c64x9x9-k64x3x3-g64-float16-NHWC", "depthwise layers have a schedule of their own"),
        ("n1-c12x9x9-k64x3x3-float16-NHWC", "must be a multiple of 16 bytes, as TMA boxes need, not 24"),
        ("n1-c64x24x24-k64x9x9-s9-float16-NHWC", "TMA boxes bring every 8th pixel at the least, not every 9th"),
    ],
)
def test_what_it_cannot_compute(key: str, reason: str) -> None:
    conv = Conv2d.parse(key)
    assert reason in str(unsupported_reason(conv)) and reason in str(ROW.supports(conv, "cuda"))
    assert space(conv, H200) == []


@pytest.mark.parametrize("key", ["n1-c64x240x240-k64x225x3-float16-NHWC", "n1-c2048x40x40-k64x3x3-d16-float16-NHWC"])
def test_windows_that_no_patch_holds(key: str) -> None:
    """A tap's pixels fit however far apart taps are."""
    found = space(Conv2d.parse(key), H200)
    assert found and {one.tma_boxes for one in found} >= {"taps"}


def test_the_space() -> None:
    """Legal tiles only, of every shape; whole images where they fit; tiles, packs and accuracy come back from plain values."""
    conv = Conv2d.parse("n32-c512x7x7-k512x3x3-p1-float16-NHWC")
    found = space(conv, H200)
    assert 100 < len(found) <= len(SHARED) * len(TMA_BOXES) * MOST * len(SHAPES) and all(violations(conv, one, H200) == [] for one in found)
    assert output_tiles(conv, 256)[0] == (4, 7, 7) and len({one.block_m for one in found}) > 2
    clusters = {one.cluster for batch in (2, 32) for one in space(conv.with_(batch=batch), H200)}  # few images share sums among more blocks
    assert clusters == {1, 2, 4, 8} and {one.pingpong for one in found} == {1, 2}
    assert {one.shared for one in found} == set(SHARED) and {one.tma_boxes for one in found} == {"halo", "taps"}
    backend = backend_for(H200, "exact")
    assert all(backend.tile(ROW, one.as_dict()) == one for one in found) and backend.accuracy(found[0]) == "exact"
    pack = backend.pack(conv, ROW, found[0])
    assert packs.from_dict(packs.as_dict(pack)) == pack and np.prod(pack.shape(conv)) == 512 * 512 * 9
    cost, best = backend.ranked(conv, ROW)[0]
    assert 10e-6 < cost < 60e-6 and backend.proven(conv, best)
    with pytest.raises(ValueError, match="must be of type int"):
        WarpSpecializedTile.from_dict(found[0].as_dict() | {"pingpong": True})
