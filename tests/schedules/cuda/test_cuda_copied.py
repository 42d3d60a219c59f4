"""1x1 layers with channels first whose first kernel copies the pixels that windows read: exact on the emulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from warp_specialized import SMALL, check_calls_are_needed, check_exact, check_random, made, tile

from im2win.device.gpu import H200
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.legality.warp_specialized import violations
from im2win.schedules.cuda.space.warp_specialized import space
from im2win.schedules.cuda.tiles.copied_lines import CopiedLines, copied_run
from im2win.schedules.cuda.tiles.fields import copy_bytes, field_of
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d


def copied(block_m: int, images: int, cols: int, **more: object) -> WarpSpecializedTile:
    return tile(block_m, images, 1, cols, tma_boxes="copied", **more)  # type: ignore[arg-type]


# The pixels that a thread of the first kernel copies from one read, the problem, the tile.
EXACT = {
    "runs of four": (4, "n2-c40x12x24-k64x1x1-s2-float16-bias", copied(64, 1, 72)),
    "runs of two": (2, "n2-c72x28x28-k70x1x1-s2-float16-bias-add-relu", copied(64, 1, 104, slabs=2)),
    "every fourth pixel": (2, "n2-c64x8x32-k64x1x1-s2.4-float16", copied(64, 1, 32)),
    "every other row, all pixels": (8, "n1-c32x7x16-k64x1x1-s2.1-float16", copied(64, 1, 64)),
    "every other pixel of all rows": (4, "n2-c64x5x16-k64x1x1-s1.2-bfloat16", copied(64, 1, 40, product="wg_bf16")),
    "every third pixel": (0, "n3-c64x10x13-k64x1x1-s3-float16-add", copied(64, 1, 20, slabs=2)),
    "several images": (0, "n5-c64x14x14-k128x1x1-s2-float16-bias", copied(128, 4, 49, groups=2, slabs=4)),
    "several images, other pixels": (0, "n5-c72x13x13-k128x1x1-s2-float16-bias-relu", copied(128, 2, 49, groups=2, slabs=4)),
    "one image in parts": (0, "n3-c64x15x15-k64x1x1-s2-float16-bias-silu", copied(64, 1, 32)),
    "an even number of pixels": (0, "n3-c64x7x6-k64x1x1-s2-float16", copied(64, 3, 12)),
    "in turn": (0, "n7-c40x10x10-k128x1x1-s2-float16", copied(128, 2, 25, pingpong=2, groups=1, stages=3)),
    "two share windows": (0, "n4-c128x14x14-k128x1x1-s2-float16-bias", copied(64, 2, 49, slabs=2, cluster=2)),
    "two share filters": (0, "n4-c64x14x14-k64x1x1-s2-float16-bias", copied(64, 1, 49, slabs=2, cluster=2, shared="filters")),
    "two share sums": (0, "n3-c256x14x14-k64x1x1-s2-float16-bias-relu", copied(64, 2, 49, slabs=4, cluster=2, shared="accumulators")),
    "groups of eight filters": (4, "n2-c64x8x24-k64x1x1-s2-g8-float16-bias", copied(64, 1, 48, slabs=2)),
    "blocks of groups": (0, "n3-c128x6x6-k128x1x1-s2-g4-float16", copied(64, 3, 9, slabs=2)),
}  # fmt: skip


@pytest.mark.parametrize("what", EXACT)
def test_exact(what: str) -> None:
    run, key, one = EXACT[what]
    conv = Conv2d.parse(key)
    assert isinstance(field_of(conv, one), CopiedLines) and copied_run(conv) == run
    check_exact(conv, one)


def cases(draw: random.Random) -> Iterator[tuple[Conv2d, WarpSpecializedTile]]:
    """Problems and tiles, some of which are illegal."""
    while True:
        groups, stride = draw.choice([1, 1, 1, 4]), (draw.randint(1, 3), draw.randint(1, 3))
        shape = f"n{draw.randint(1, 5)}-c{8 * groups * draw.randint(1, 20)}x{draw.randint(3, 16)}x{draw.randint(3, 17)}"
        ending = "-s{}.{}".format(*stride) + draw.choice(["", "-bias", "-bias-add-relu"]) + ("-g4" if groups > 1 else "")
        conv = Conv2d.parse(f"{shape}-k{16 * groups * draw.randint(1, 4)}x1x1-float16{ending}")
        pixels = conv.output_size[0] * conv.output_size[1]
        one = copied(
            64 * draw.randint(1, 2), draw.randint(1, 4), draw.choice([pixels, pixels, 8 * draw.randint(1, 24)]),
            slabs=draw.choice([1, 2, 4]), stages=draw.randint(2, 4), groups=draw.randint(1, 2), pingpong=draw.randint(1, 2),
            cluster=draw.choice([1, 1, 2]), shared=draw.choice(["windows", "filters", "accumulators"]),
        )  # fmt: skip
        yield conv, one


def test_random_problems() -> None:
    """Whatever the sizes, a legal tile is exact."""
    check_random(cases(random.Random(17)), 8)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("n2-c64x8x16-k64x3x3-s2-float16", {}, "`tma_boxes` (=copied) must be rearranged for other layers than those of a 1x1 kernel"),
        ("n2-c64x8x16-k64x1x1-p1-s2-float16", {}, "`tma_boxes` (=copied) must be rearranged for other layers than those of a 1x1"),
        ("n2-c64x7x7-k64x1x1-float16", {}, "`tma_boxes` (=copied) must be rearranged for other layers than those of a 1x1 kernel with a"),
        ("n2-c64x8x16-k64x1x1-s2-float16-NHWC", {}, "`tma_boxes` (=copied) must be rearranged or lines with layout NCHW, and only there"),
        ("n2-c64x8x16-k64x1x1-s2-float16", {"cols": 20}, "`cols` (=20) must be 32, or a multiple of 8: boxes begin at"),
        ("n2-c64x8x16-k64x1x1-s2-float16", {"images": 2, "cols": 16}, "`images` (=2) must be 1 where a tile has less than all 1 x 32"),
        ("n9-c64x14x14-k64x1x1-s2-float16", {"images": 5, "cols": 49}, "the product's 280 columns must be at most 256"),
        ("n9-c64x14x14-k256x1x1-s2-float16", {"cluster": 4, "cols": 49}, "`cluster` (=4) must cut the 32 channels of a step in parts of"),
    ],
)
def test_rules(key: str, change: dict[str, object], message: str) -> None:
    found = violations(Conv2d.parse(key), replace(copied(64, 1, 32), **change), SMALL)  # type: ignore[arg-type]
    assert any(message in one for one in found), found


def test_the_workspace_holds_the_copy() -> None:
    """Every image takes a multiple of 16 bytes of a channel, and a group of images as many as a tile."""
    conv, row = Conv2d.parse("n5-c64x14x14-k64x1x1-s2-float16"), schedule_of("direct/warp_specialized")
    assert row.on_gpu.workspace_bytes(conv, copied(64, 2, 49)) == 3 * 64 * 2 * 56 * 2
    assert copy_bytes(conv, tile(64, 1, 7, 7, slabs=2, tma_boxes="rearranged")) == 0


def test_layers_with_a_stride_are_copied_by_default() -> None:
    """Where the copy has a quarter of the pixels of small maps, the model prefers one, in either layout, to rearranging all."""
    conv = Conv2d.parse("n32-c1024x14x14-k2048x1x1-s2-float16")
    name, chosen = default_tile(conv, "auto", H200, "float32")
    assert name == "direct/warp_specialized" and chosen.tma_boxes in ("copied", "channels_last") and chosen in space(conv, H200)


# What is left out, and how often the source has it.
SITES = {
    "wait_empty_barrier": 2, "wait_full_barrier": 2, "arrive_empty_barrier": 4, "expect_bytes": 1, "copy_box": 2, "copy_bulk": 1,
    "warp_barrier": 3,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SITES)
def test_nothing_can_be_left_out(name: str) -> None:
    """Without one of these calls the kernel is wrong for some order of threads, or refused."""
    conv = Conv2d.parse("n9-c64x14x14-k64x1x1-s2-float16")
    check_calls_are_needed(conv, made(conv, copied(64, 2, 49)), name, SITES[name])
