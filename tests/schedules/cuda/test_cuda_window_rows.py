"""Layers of few input channels whose first kernel copies them so that rows of windows are pixels: exact on the emulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from warp_specialized import SMALL, check_exact, check_random, tile

from im2win.device.gpu import H200
from im2win.packing.window_rows import copy_columns, pixel_elements, window_row_problem
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.legality.warp_specialized import violations
from im2win.schedules.cuda.space.warp_specialized import space
from im2win.schedules.cuda.tiles.fields import field_of
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.schedules.cuda.tiles.window_rows import WindowRows
from im2win.spec.conv2d import Conv2d

ROW = schedule_of("direct/warp_specialized").on_gpu


def rows(*sizes: int, **more: object) -> WarpSpecializedTile:
    return tile(*sizes, tma_boxes="window_rows", **more)  # type: ignore[arg-type]


# Elements of a pixel of the copy, the problem, the tile.
EXACT = {
    "a stem": (4, "n2-c3x23x24-k64x7x7-s2-p3-float16-bias-relu", rows(64, 1, 4, 12, taps=7)),
    "a stem, channels last": (4, "n2-c3x23x24-k64x7x7-s2-p3-float16-NHWC-bias-add", rows(64, 1, 3, 12, taps=7, pingpong=2)),
    "long rows": (4, "n1-c3x31x31-k96x11x11-s4-bfloat16", rows(64, 1, 2, 6, slabs=2, product="wg_bf16")),
    "long rows in two steps": (4, "n1-c3x31x31-k96x11x11-s4-float16-add", rows(128, 1, 3, 6, groups=2)),
    "no stride": (8, "n3-c3x9x10-k64x3x3-float16", rows(64, 1, 7, 8, taps=3)),
    "one channel, another pad on each side": (8, "n3-c1x9x10-k64x5x3-p0.2.1.0-s1.3-float16-bias", rows(64, 2, 6, 4, taps=5)),
    "patches": (4, "n2-c4x9x10-k64x4x4-s4-float16-NHWC-bias", rows(64, 1, 2, 2, taps=4)),
    "patches of odd pixels": (3, "n2-c3x16x24-k64x8x8-s8-float16-bias", rows(64, 2, 2, 3, slabs=1, taps=8)),
    "rows apart": (4, "n2-c3x14x12-k64x3x4-s2-p2-d2.1-float16", rows(64, 1, 4, 7, taps=3)),
    "all channels of a unit": (8, "n2-c8x8x9-k64x3x3-p1-float16-bias-silu", rows(64, 2, 8, 9, taps=1)),
    "two share filters": (4, "n4-c3x12x12-k64x7x7-s2-p3-float16-bias", rows(64, 1, 3, 6, taps=7, cluster=2, shared="filters")),
    "two share windows": (4, "n2-c3x16x16-k128x7x7-s2-p3-float16", rows(64, 1, 8, 8, taps=7, cluster=2)),
}  # fmt: skip


@pytest.mark.parametrize("what", EXACT)
def test_exact(what: str) -> None:
    pixel, key, one = EXACT[what]
    conv = Conv2d.parse(key)
    assert isinstance(field_of(conv, one), WindowRows) and pixel_elements(conv) == pixel
    check_exact(conv, one, range(1))


def cases(draw: random.Random) -> Iterator[tuple[Conv2d, WarpSpecializedTile]]:
    """Problems and tiles, some of which are illegal."""
    while True:
        kernel = draw.randint(1, 7), draw.randint(2, 7)
        shape = f"n{draw.randint(1, 3)}-c{draw.randint(1, 8)}x{draw.randint(7, 20)}x{draw.randint(7, 21)}"
        ending = f"-s{draw.randint(1, 3)}.{draw.randint(1, 4)}" + draw.choice(["", "-p1", "-p2"])
        ending += draw.choice(["-float16", "-float16-NHWC"]) + draw.choice(["-bias", "-bias-add-relu"])
        conv = Conv2d.parse(f"{shape}-k{draw.choice([40, 64, 128])}x{kernel[0]}x{kernel[1]}{ending}")
        height, width = conv.output_size
        one = rows(
            64, 1, draw.randint(1, height), draw.randint(1, width), slabs=draw.choice([1, 2]), stages=draw.randint(2, 4),
            pingpong=draw.randint(1, 2), taps=draw.choice([1, kernel[0]]), cluster=draw.choice([1, 2]),
            shared=draw.choice(["windows", "filters", "accumulators"]),
        )  # fmt: skip
        yield conv, one


def test_random_problems() -> None:
    """Whatever the sizes, a legal tile is exact."""
    check_random(cases(random.Random(5)), 4)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("n2-c9x16x16-k64x3x3-float16", {}, "`tma_boxes` (=window_rows) must be another one for 9 channels in 1 groups"),
        ("n2-c8x16x16-k64x3x3-g2-float16", {}, "`tma_boxes` (=window_rows) must be another one for 8 channels in 2 groups"),
        ("n2-c8x16x16-k64x3x1-float16", {}, "`tma_boxes` (=window_rows) must be another one for rows of windows that are no run"),
        ("n2-c8x16x16-k64x3x3-d2-float16", {}, "`tma_boxes` (=window_rows) must be another one for rows of windows that are no run"),
        ("n2-c8x30x30-k64x3x3-s9-float16", {}, "`tma_boxes` (=window_rows) must be another one for a stride of 9"),
        ("n2-c16x16x16-k64x3x3-int8-NHWC", {"product": "wg_s8"}, "`tma_boxes` (=window_rows) must be another one for int8: rows"),
        ("n2-c3x16x16-k64x3x3-float16-NHWC", {"tma_boxes": "halo"}, "must be window_rows: a pixel's channels must be a multiple"),
        ("n2-c3x15x15-k64x3x3-float16", {"tma_boxes": "rearranged"}, "must be window_rows: channels of 15x15 pixels are brought 8"),
        ("n2-c3x16x16-k64x3x3-float16", {"taps": 9}, "`taps` (=9) must divide the kernel's 3"),
    ],
)  # fmt: skip
def test_rules(key: str, change: dict[str, object], message: str) -> None:
    found = violations(Conv2d.parse(key), replace(rows(64, 1, 1, 4), **change), SMALL)  # type: ignore[arg-type]
    assert any(message in one for one in found), found


def test_the_workspace_holds_the_copy() -> None:
    """Every row has zeros on both sides, of four elements a pixel, in a multiple of 16 bytes; its last pixels are those of the last row."""
    conv = Conv2d.parse("n5-c3x224x224-k64x7x7-s2-p3-float16")
    problem = window_row_problem(conv)
    assert (problem.in_channels, problem.width, problem.kernel, problem.stride) == (32, 112, (7, 1), (2, 1))
    assert copy_columns(conv) == 111 * 2 + 8 and problem.output_size == conv.output_size
    assert ROW.workspace_bytes(conv, rows(64, 1, 2, 112, taps=7)) == 5 * 224 * 230 * 4 * 2


@pytest.mark.parametrize("key", ["n32-c3x224x224-k64x7x7-s2-p3-float16", "n32-c3x224x224-k64x7x7-s2-p3-bfloat16-NHWC"])
def test_stems_take_window_rows_by_default(key: str) -> None:
    conv = Conv2d.parse(key)
    name, chosen = default_tile(conv, "auto", H200, "float32")
    assert name == "direct/warp_specialized" and chosen.window_rows and chosen in space(conv, H200)
