"""1x1 layers with channels first, whose products take pixels of each channel as they lie in memory: exact on the emulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from warp_specialized import SMALL, check_calls_are_needed, check_exact, check_random, made, tile

from im2win.schedules.cuda.legality.warp_specialized import violations
from im2win.schedules.cuda.tiles.fields import field_of, flat
from im2win.schedules.cuda.tiles.pixel_lines import PixelLines
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d


def lines(block_m: int, cols: int, **more: object) -> WarpSpecializedTile:
    return tile(block_m, 1, 1, cols, tma_boxes="lines", **more)  # type: ignore[arg-type]


# The phases of channels, the problem, the tile.
EXACT = {
    "whole lines": (1, "n2-c64x8x16-k64x1x1-float16", lines(64, 64)),
    "a part of a line": (1, "n2-c72x12x14-k70x1x1-float16-bias-add-relu", lines(64, 88, slabs=2)),
    "many channels in a step": (1, "n2-c136x4x12-k64x1x1-float16-bias-silu", lines(64, 48, slabs=4)),
    "in turn": (1, "n3-c40x16x16-k128x1x1-float16", lines(128, 128, pingpong=2, groups=1, stages=3)),
    "two phases": (2, "n2-c64x14x14-k64x1x1-float16-bias", lines(64, 104)),
    "two phases of whole images": (2, "n2-c72x6x14-k70x1x1-bfloat16-add", lines(64, 84, slabs=2, product="wg_bf16")),
    "four phases": (4, "n3-c64x5x6-k128x1x1-float16-bias", lines(128, 30, slabs=2, groups=2)),
    "eight phases": (8, "n3-c136x7x7-k64x1x1-float16-bias-relu", lines(64, 32, slabs=4)),
    "eight phases, two warpgroups": (8, "n2-c128x5x5-k128x1x1-float16", lines(128, 25, slabs=4, groups=2)),
    "two share windows": (1, "n2-c256x12x14-k128x1x1-bfloat16-add", lines(64, 168, slabs=4, cluster=2, product="wg_bf16")),
    "two share windows of two phases": (2, "n2-c128x14x14-k128x1x1-float16", lines(64, 104, slabs=2, cluster=2)),
    "two share filters": (1, "n4-c64x8x8-k64x1x1-float16-bias", lines(64, 64, slabs=2, cluster=2, shared="filters")),
    "two share sums": (2, "n2-c256x14x14-k64x1x1-float16-bias-relu", lines(64, 104, slabs=2, cluster=2, shared="accumulators")),
    "groups of eight filters": (1, "n2-c64x8x12-k64x1x1-g8-float16-bias", lines(64, 96, slabs=2)),
    "blocks of groups": (2, "n2-c128x6x6-k128x1x1-g4-float16", lines(64, 36, slabs=2)),
}  # fmt: skip


@pytest.mark.parametrize("what", EXACT)
def test_exact(what: str) -> None:
    phases, key, one = EXACT[what]
    conv = Conv2d.parse(key)
    field = field_of(conv, one)
    assert isinstance(field, PixelLines) and field.phases == phases
    check_exact(conv, one)


def cases(draw: random.Random) -> Iterator[tuple[Conv2d, WarpSpecializedTile]]:
    """Problems and tiles, some of which are illegal."""
    while True:
        groups = draw.choice([1, 1, 1, 4])
        shape = f"n{draw.randint(1, 4)}-c{8 * groups * draw.randint(1, 20)}x{draw.randint(3, 16)}x{draw.randint(3, 17)}"
        ending = draw.choice(["", "-bias", "-bias-add-relu"]) + ("-g4" if groups > 1 else "")
        conv = Conv2d.parse(f"{shape}-k{16 * groups * draw.randint(1, 4)}x1x1-float16{ending}")
        width = flat(conv).width
        one = lines(
            64 * draw.randint(1, 2), draw.choice([width, 8 * draw.randint(1, 24)]), slabs=draw.choice([1, 2, 4]),
            stages=draw.randint(2, 4), groups=draw.randint(1, 2), pingpong=draw.randint(1, 2), cluster=draw.choice([1, 1, 2]),
            shared=draw.choice(["windows", "filters", "accumulators"]),
        )  # fmt: skip
        yield conv, one


def test_random_problems() -> None:
    """Whatever the sizes, a legal tile is exact."""
    check_random(cases(random.Random(11)), 10)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("n2-c64x8x16-k64x3x3-float16", {}, "`tma_boxes` (=lines) must be rearranged for windows of more than their own pixel"),
        ("n2-c64x8x16-k64x1x1-s2-float16", {}, "`tma_boxes` (=lines) must be rearranged for windows of more than their own pixel"),
        ("n2-c64x8x16-k64x1x1-float16-NHWC", {}, "`tma_boxes` (=lines) must be rearranged or lines with layout NCHW, and only there"),
        ("n2-c64x8x16-k64x1x1-float16", {"cols": 20}, "`cols` (=20) must be 128, or a multiple of 8: boxes begin at multiples of 16 bytes"),
        ("n2-c64x8x16-k64x1x1-float16", {"slabs": 3}, "`slabs` (=3) must be one of 1, 2, 4"),
        ("n2-c64x8x8-k64x1x1-float16", {"images": 2}, "`images` (=2) must be 1 where products take lines of pixels"),
        ("n2-c64x7x7-k64x1x1-float16", {"cols": 32}, "`slabs` (=1) must be larger: a product takes 16 channels of each of 8 phases"),
        ("n2-c64x6x6-k256x1x1-float16", {"cluster": 4, "cols": 36}, "`cluster` (=4) must cut the 16 channels of a phase in parts of 8"),
        ("n2-c64x18x14-k64x1x1-float16", {"cols": 200, "slabs": 2}, "the 248 registers of a thread must be at most the 240 that it gets"),
    ],
)
def test_rules(key: str, change: dict[str, object], message: str) -> None:
    found = violations(Conv2d.parse(key), replace(lines(64, 64), **change), SMALL)  # type: ignore[arg-type]
    assert any(message in one for one in found), found


# What is left out, and how often the source has it.
SITES = {
    "wait_empty_barrier": 2, "wait_full_barrier": 2, "arrive_empty_barrier": 4, "expect_bytes": 1, "copy_box": 2, "copy_bulk": 1,
    "add_shifted": 1, "warp_barrier": 3,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SITES)
def test_nothing_can_be_left_out(name: str) -> None:
    """Without one of these calls the kernel is wrong for some order of threads, or refused."""
    conv = Conv2d.parse("n5-c128x6x14-k64x1x1-float16")
    check_calls_are_needed(conv, made(conv, lines(64, 56)), name, SITES[name])
