"""Warp-specialized kernels with channels first: exact on the emulator, whatever TMA boxes can bring of an input."""

from __future__ import annotations

import random

import pytest
from warp_specialized import SMALL, check_calls_are_needed, check_exact, made, tile

from im2win.schedules.cuda.legality.warp_specialized import violations
from im2win.schedules.cuda.tiles.fields import field_of, flat
from im2win.schedules.cuda.tiles.rearranged import RearrangedHaloTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d


def rearranged(*sizes: int, **more: object) -> WarpSpecializedTile:
    return tile(*sizes, tma_boxes="rearranged", **more)


# What raw boxes bring, the phases of channels, the problem, the tile.
EXACT = {
    "parts of rows": ("rows", 1, "n2-c40x9x16-k70x3x3-p1-float16-bias", rearranged(64, 1, 4, 8, taps=3, slabs=2)),
    "more than a line": ("rows", 1, "n1-c32x4x144-k64x3x3-p1-float16-bias", rearranged(64, 1, 2, 72, taps=3)),
    "rows that are aligned": ("runs", 1, "n2-c64x9x16-k64x3x3-p1-float16-add-relu", rearranged(64, 1, 4, 16, taps=9)),
    "an odd number of outputs": ("runs", 1, "n2-c32x9x24-k64x4x4-p1-bfloat16", rearranged(64, 1, 3, 23, product="wg_bf16")),
    "runs of rows": ("runs", 1, "n2-c40x12x14-k64x3x3-p1-float16-bias-silu", rearranged(64, 1, 5, 14, taps=3)),
    "in turn": ("runs", 1, "n2-c72x12x14-k64x5x3-p2.1.2.1-float16", rearranged(64, 1, 3, 14, taps=3, pingpong=2, stages=4)),
    "runs that begin and end in padding": ("runs", 1, "n2-c32x8x9-k64x3x3-p1-float16-add", rearranged(64, 1, 3, 9, taps=9, slabs=2)),
    "eight channels together": ("images", 8, "n3-c64x7x7-k128x3x3-p1-float16-bias-relu", rearranged(64, 2, 7, 7, slabs=2, taps=3)),
    "two channels together": (
        "images", 2, "n3-c40x6x6-k64x3x3-p1-bfloat16", rearranged(64, 1, 6, 6, taps=9, product="wg_bf16"),
    ),
    "four channels together": ("images", 4, "n5-c72x5x6-k128x3x3-float16-bias", rearranged(128, 3, 3, 4, groups=2)),
    "every other row and pixel": ("rows", 1, "n2-c32x16x32-k64x3x3-p1-s2-float16", rearranged(64, 1, 3, 8, taps=3)),
    "every other row, without the rest": ("rows", 1, "n2-c40x16x16-k64x1x1-s2-float16-bias", rearranged(64, 1, 3, 4, slabs=2)),
    "every other row, whole": ("rows", 1, "n3-c40x12x56-k70x1x1-s2-float16-bias-add-relu", rearranged(64, 1, 2, 28, slabs=2, stages=4)),
    "every other row, short": ("rows", 1, "n3-c72x28x28-k64x1x1-s2-float16-bias", rearranged(64, 1, 7, 14)),
    "every other row of several images": (
        "rows", 1, "n5-c40x16x16-k128x1x1-s2-bfloat16", rearranged(128, 3, 8, 8, groups=2, product="wg_bf16"),
    ),
    "every other row, all pixels": ("rows", 1, "n2-c32x7x80-k64x1x1-s2.1-float16-bias", rearranged(64, 1, 2, 80, slabs=2)),
    "every third row": ("rows", 1, "n2-c64x11x16-k64x1x1-s3-float16-add", rearranged(64, 1, 3, 6)),
    "every other row of a run": ("runs", 1, "n2-c32x12x14-k64x3x3-p1-s2-float16-bias", rearranged(64, 1, 2, 7, taps=3)),
    "every other pixel of images": ("images", 8, "n3-c64x7x7-k64x1x1-s2-float16", rearranged(64, 2, 4, 4, slabs=2)),
    "steps of two": ("runs", 1, "n1-c32x10x16-k64x3x3-p2-d2-float16", rearranged(64, 1, 5, 16, taps=3)),
    "parts of a row": ("runs", 1, "n3-c72x12x14-k70x1x1-float16-bias-add-relu", rearranged(64, 1, 1, 64, slabs=2)),
    "a row of two channels": ("images", 2, "n3-c72x6x14-k70x1x1-float16-bias", rearranged(64, 1, 1, 84, slabs=2)),
    "rows of images": ("images", 8, "n5-c72x7x7-k128x1x1-float16-bias", rearranged(128, 2, 1, 49, groups=2, slabs=2)),
    "two share filters": ("runs", 1, "n4-c40x12x14-k70x3x3-p1-float16-bias", rearranged(64, 1, 4, 14, taps=3, cluster=2, shared="filters")),
    "two share sums": (
        "images", 8, "n3-c128x7x7-k128x3x3-p1-float16-bias-relu",
        rearranged(64, 2, 7, 7, slabs=2, taps=3, cluster=2, shared="accumulators"),
    ),
    "groups of eight filters": ("runs", 1, "n2-c64x12x14-k64x3x3-p1-g8-float16-bias", rearranged(64, 1, 4, 14, taps=9)),
    "blocks of groups": ("images", 8, "n3-c128x7x7-k128x3x3-p1-g8-float16", rearranged(64, 2, 7, 7, taps=3, slabs=2)),
    "three channels": ("rows", 1, "n2-c3x15x16-k64x7x7-p3-s2-float16-bias", rearranged(64, 1, 4, 4, taps=7)),
}  # fmt: skip


@pytest.mark.parametrize("what", EXACT)
def test_exact(what: str) -> None:
    form, phases, key, one = EXACT[what]
    conv = Conv2d.parse(key)
    field = field_of(conv, one)
    assert isinstance(field, RearrangedHaloTile) and (field.form, field.phases) == (form, phases)
    check_exact(conv, one)


def test_random_problems() -> None:
    """Whatever the sizes, a legal tile is exact."""
    draw, found = random.Random(7), 0
    while found < 10:
        kernel, stride, groups = draw.choice([1, 2, 3]), draw.choice([1, 1, 2]), draw.choice([1, 1, 1, 4])
        padding = draw.randint(0, kernel - 1)
        shape = f"n{draw.randint(1, 4)}-c{8 * groups * draw.randint(1, 5)}x{draw.randint(3, 16)}x{draw.randint(3, 17)}"
        ending = draw.choice(["", "-bias", "-bias-add-relu"]) + ("-s2" if stride > 1 else "") + ("-g4" if groups > 1 else "")
        conv = Conv2d.parse(f"{shape}-k{16 * groups * draw.randint(1, 4)}x{kernel}x{kernel}-p{padding}-float16{ending}")
        out = flat(conv).output_size
        one = rearranged(
            64 * draw.randint(1, 2), draw.randint(1, 3), *(draw.choice([size, size, draw.randint(1, size)]) for size in out),
            slabs=draw.randint(1, 2), stages=draw.randint(2, 4), taps=draw.choice([1, kernel, kernel * kernel]), groups=draw.randint(1, 2),
            pingpong=draw.randint(1, 2), cluster=draw.choice([1, 1, 2]), shared=draw.choice(["filters", "accumulators"]),
        )  # fmt: skip
        if violations(conv, one, SMALL):
            continue
        found += 1
        check_exact(conv, one, range(found, found + 1))


# What is left out, and how often the source has it: waits, what they wait for, and what makes stores visible.
SITES = {
    "wait_empty_barrier": 4, "wait_full_barrier": 4, "arrive_empty_barrier": 8, "expect_bytes": 1, "copy_box": 1, "clear_chunk": 6,
    "fence_stores": 2, "warp_barrier": 4, "init_empty_barrier": 4, "rearrange_images": 1,
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SITES)
def test_nothing_can_be_left_out(name: str) -> None:
    """Without one of these calls the kernel is wrong for some order of threads, or refused."""
    conv = Conv2d.parse("n5-c128x7x7-k64x3x3-p1-float16")
    check_calls_are_needed(conv, made(conv, rearranged(64, 1, 7, 7, slabs=2, taps=3)), name, SITES[name])


@pytest.mark.parametrize(("stages", "together"), [(2, 2), (3, 2), (4, 1), (5, 2), (6, 1)])
def test_warps_take_steps_in_turn_where_each_has_two_stages_of_its_own(stages: int, together: int) -> None:
    """A thread that skips phases of a barrier takes one for another, so that each warp in turn comes back to its own stages alone."""
    assert rearranged(64, 1, 7, 7, slabs=2, stages=stages).rearrangers == together
