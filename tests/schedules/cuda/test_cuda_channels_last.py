"""Layers with channels first whose first kernel copies the input to channels last: exact on the emulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from warp_specialized import SMALL, check_calls_are_needed, check_exact, check_random, made, tile

from im2win.device.gpu import H200
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.legality.warp_specialized import unsupported_reason, violations
from im2win.schedules.cuda.space.warp_specialized import space
from im2win.schedules.cuda.tiles.copied_pixels import CopiedPixels, pixel_run
from im2win.schedules.cuda.tiles.fields import field_of
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d

BF16 = "wg_bf16"


def copied(*sizes: int, **more: object) -> WarpSpecializedTile:
    return tile(*sizes, **{"tma_boxes": "channels_last"} | more)  # type: ignore[arg-type]


def single(*sizes: int, **more: object) -> WarpSpecializedTile:
    return copied(*sizes, tma_boxes="channels_last_taps", **more)


# The pixels that a thread of the first kernel copies, the problem, the tile.
EXACT = {
    "a row of pixels": (8, "n2-c72x8x12-k70x1x1-float16-bias-add-relu", copied(64, 1, 1, 48, slabs=2)),
    "several images": (1, "n5-c64x7x7-k128x1x1-float16-bias-add", copied(128, 4, 1, 49, groups=2, slabs=2)),
    "every second pixel": (4, "n2-c40x12x24-k64x1x1-s2-float16-bias", copied(64, 1, 1, 72)),
    "every second pixel of a small map": (1, "n5-c64x14x14-k128x1x1-s2-float16-add-relu", copied(128, 3, 1, 49, groups=2)),
    "pairs of every second pixel": (2, "n2-c72x28x28-k70x1x1-s2-bfloat16-bias", copied(64, 1, 1, 104, product=BF16)),
    "every third pixel": (1, "n3-c64x10x13-k64x1x1-s3-float16-add", copied(64, 1, 1, 20, slabs=2)),
    "every sixteenth pixel": (1, "n1-c32x33x34-k64x1x1-s16-float16", copied(64, 1, 1, 9)),
    "taps": (8, "n2-c40x10x12-k64x3x3-p1-float16-bias-silu", copied(64, 1, 4, 12, taps=3)),
    "parity planes": (4, "n1-c24x26x34-k64x7x7-s2-float16-bias", copied(64, 1, 2, 14, taps=7, pingpong=2, filter_stages=3)),
    "parity planes with zeros": (1, "n3-c64x7x7-k64x3x3-p1-s2-bfloat16-bias-add", copied(64, 2, 4, 4, taps=3, slabs=2, product=BF16)),
    "zeros between images": (1, "n3-c64x7x7-k64x3x3-p1-float16", copied(64, 3, 7, 7, taps=9)),
    "another pad on each side": (1, "n2-c16x11x11-k64x5x3-p0.2.1.0-s2.3-d2-float16-bias", copied(64, 1, 2, 3)),
    "what a tap reads": (1, "n3-c64x9x7-k70x3x3-p1-float16-bias-add", single(64, 1, 5, 7)),
    "what a tap reads, several images": (1, "n9-c72x7x7-k64x3x3-float16-bias", single(64, 8, 5, 5, slabs=2, stages=3)),
    "in turn": (1, "n7-c40x10x10-k128x1x1-s2-float16", copied(128, 2, 1, 25, pingpong=2, groups=1, stages=3)),
    "two share windows": (4, "n4-c128x14x14-k128x1x1-float16-bias", copied(64, 1, 1, 64, slabs=2, cluster=2)),
    "two share filters": (1, "n4-c64x14x14-k64x1x1-s2-float16-bias", copied(64, 1, 1, 49, slabs=2, cluster=2, shared="filters")),
    "two share sums": (1, "n3-c256x7x7-k64x1x1-float16-bias-relu", copied(64, 2, 1, 49, slabs=2, cluster=2, shared="accumulators")),
    "two share sums of taps": (1, "n3-c64x7x7-k64x3x3-s2-float16", single(64, 3, 3, 3, cluster=2, shared="accumulators")),
    "groups of eight filters": (8, "n2-c64x8x24-k64x3x3-p1-g8-float16-bias", copied(64, 1, 2, 24, slabs=2)),
    "blocks of groups": (4, "n3-c128x6x6-k128x1x1-g4-float16", copied(64, 3, 1, 36, slabs=2)),
}  # fmt: skip


@pytest.mark.parametrize("what", EXACT)
def test_exact(what: str) -> None:
    run, key, one = EXACT[what]
    conv = Conv2d.parse(key)
    assert isinstance(field_of(conv, one), CopiedPixels) and pixel_run(conv) == run
    check_exact(conv, one, range(1))


def cases(draw: random.Random) -> Iterator[tuple[Conv2d, WarpSpecializedTile]]:
    """Problems and tiles, some of which are illegal."""
    while True:
        groups, kernel, pad = draw.choice([1, 1, 1, 4]), draw.choice([1, 1, 2, 3]), draw.randint(0, 1)
        shape = f"n{draw.randint(1, 3)}-c{8 * groups * draw.randint(1, 6)}x{draw.randint(4, 10)}x{draw.randint(4, 11)}"
        ending = f"-p{pad}" * (kernel > 1 and pad) + draw.choice(["", "-s2", "-s1.3"])
        ending += ("-g4" if groups > 1 else "") + draw.choice(["-float16", "-float16-bias", "-float16-bias-add-relu"])
        conv = Conv2d.parse(f"{shape}-k{16 * groups * draw.randint(1, 4)}x{kernel}x{kernel}{ending}")
        if unsupported_reason(conv) is not None:
            continue
        height, width = (1, conv.output_size[0] * conv.output_size[1]) if kernel == 1 else conv.output_size
        whole = draw.randint(0, 1)
        one = copied(
            64 * draw.randint(1, 2), draw.randint(1, 4) if whole else 1, height if whole else draw.randint(1, height),
            width if whole else draw.randint(1, width), slabs=draw.choice([1, 2]), stages=draw.randint(2, 4), groups=draw.randint(1, 2),
            pingpong=draw.randint(1, 2), cluster=draw.choice([1, 1, 2]), shared=draw.choice(["windows", "filters", "accumulators"]),
            tma_boxes=draw.choice(["channels_last", "channels_last", "channels_last_taps"]), taps=draw.choice([1, 1, kernel]),
        )  # fmt: skip
        yield conv, one


def test_random_problems() -> None:
    """Whatever the sizes, a legal tile is exact."""
    check_random(cases(random.Random(11)), 3)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("n2-c60x8x16-k64x3x3-s2-float16", {}, "`tma_boxes` (=channels_last) must be another one for pixels of 60 channels: a"),
        ("n1-c64x90x96-k64x9x9-s9-float16", {}, "`tma_boxes` (=channels_last) must be another one for a stride of 9: TMA boxes bring"),
        ("n2-c64x8x16-k64x3x3-float16-NHWC", {}, "`tma_boxes` (=channels_last) must be rearranged or lines with layout NCHW, and only"),
        ("n2-c64x8x8-k64x1x1-float16", {"tma_boxes": "channels_last_taps"}, "`tma_boxes` (=channels_last_taps) must be channels_last for"),
        ("n2-c64x8x8-k64x3x3-float16", {"tma_boxes": "channels_last_taps", "taps": 3}, "`taps` (=3) must be 1 where TMA boxes bring what"),
        ("n9-c64x14x14-k64x1x1-s2-float16", {"images": 6, "cols": 49}, "the product's 296 columns must be at most 256"),
    ],
)
def test_rules(key: str, change: dict[str, object], message: str) -> None:
    found = violations(Conv2d.parse(key), replace(copied(64, 1, 1, 4), **change), SMALL)  # type: ignore[arg-type]
    assert any(message in one for one in found), found


def test_the_workspace_holds_the_copy() -> None:
    """All pixels of the input, or those that a 1x1 kernel reads."""
    row = schedule_of("direct/warp_specialized").on_gpu
    assert row.workspace_bytes(Conv2d.parse("n5-c64x14x14-k64x1x1-s2-float16"), copied(64, 2, 1, 49)) == 5 * 64 * 49 * 2
    assert row.workspace_bytes(Conv2d.parse("n5-c64x14x14-k64x3x3-s2-float16"), copied(64, 2, 6, 6)) == 5 * 64 * 14 * 14 * 2


def test_large_kernels_with_a_stride_are_copied_by_default() -> None:
    """The copy costs less than rearranging halo tiles of four parity planes."""
    conv = Conv2d.parse("n128-c64x224x224-k64x7x7-s2-float16")
    name, chosen = default_tile(conv, "auto", H200, "float32")
    assert name == "direct/warp_specialized" and chosen.tma_boxes == "channels_last" and chosen in space(conv, H200)


# What is left out, and how often the source has it.
SITES = {
    "wait_empty_barrier": 2, "wait_full_barrier": 2, "arrive_empty_barrier": 4, "expect_bytes": 1, "copy_box": 1, "copy_bulk": 1,
    "warp_barrier": 3,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SITES)
def test_nothing_can_be_left_out(name: str) -> None:
    """Without one of these calls the kernel is wrong for some order of threads, or refused."""
    conv = Conv2d.parse("n9-c64x14x14-k64x1x1-s2-float16")
    check_calls_are_needed(conv, made(conv, copied(64, 2, 1, 49)), name, SITES[name])
