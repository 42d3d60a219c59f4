"""Kernels to which filters and windows come in steps: exact on the emulator, wrong without any of their waits, and what they refuse."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated import Emulated, Made, differences, expected, goes_wrong, typed
from oracle import exact_tensors

from im2win import cuda_codegen, packs
from im2win.algorithms import ALGORITHMS
from im2win.backends import backend_for
from im2win.emulator import TensorMap
from im2win.gpu import H200
from im2win.problem import Conv2d
from im2win.schedules.streamed.instructions import with_residents
from im2win.schedules.streamed.kernel import grid, registers, resident
from im2win.schedules.streamed.legality import problems, unable
from im2win.schedules.streamed.space import MOST, patches, space
from im2win.schedules.streamed.tile import StreamedField, StreamedTile, flat

ROW = ALGORITHMS["direct_streamed"]
SMALL = replace(H200, multiprocessors=2, threads=384)  # so few that blocks of small problems stay


def tile(
    block_m: int, images: int, rows: int, cols: int, *, slabs: int = 1, stages: int = 2, taps: int = 1, filter_stages: int = 2,
    groups: int = 1, turns: int = 1, cluster: int = 1, product: str = "wg_f16",
) -> StreamedTile:  # fmt: skip
    more = {"images": images, "taps": taps, "filter_stages": filter_stages, "turns": turns}
    return StreamedTile(product, block_m, rows, cols, slabs, stages, groups, cluster, **more)


def made(conv: Conv2d, one: StreamedTile) -> Made:
    assert problems(conv, one, SMALL) == []
    source = cuda_codegen.generate_source(cuda_codegen.lower(conv, ROW, one, SMALL), SMALL)
    return Made(str(one), source, one.pack(conv))


def check(conv: Conv2d, one: StreamedTile, seeds: int = 2) -> None:
    tensors, kernel = typed(conv, exact_tensors(conv)), made(conv, one)
    right, emulated = expected(conv, tensors), Emulated(conv, [kernel])
    for seed in range(seeds):
        wrong = differences(conv, [kernel], emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


S8 = "wg_s8"
EXACT = {
    "pixels of all images in one row": ("n3-c64x13x14-k64x1x1-float16-NHWC", tile(64, 1, 1, 64)),
    "one after the other": ("n3-c40x13x14-k128x1x1-float16-NHWC-bias-add-relu", tile(128, 1, 1, 48, slabs=2, groups=2, filter_stages=3)),
    "in turn, half a cluster's pixels each": ("n3-c72x13x14-k128x1x1-float16-NHWC-silu", tile(64, 1, 1, 64, turns=2, cluster=2)),
    "four share pixels": ("n3-c72x5x14-k200x1x1-float16-NHWC-relu6", tile(64, 1, 1, 64, slabs=2, cluster=4, stages=3)),
    "parts of an image": ("n2-c64x9x11-k64x3x3-p1-float16-NHWC-bias", tile(64, 1, 4, 5, taps=3)),
    "rows as wide as the image": ("n2-c32x9x7-k64x3x3-p1-float16-NHWC", tile(64, 1, 4, 7, taps=9)),
    "whole images, zeros between them": ("n5-c40x7x7-k70x3x3-p1-float16-NHWC-bias", tile(64, 2, 7, 7, taps=9, slabs=2)),
    "zeros that differ": ("n3-c16x6x5-k64x3x4-p1.2.0.1-float16-NHWC", tile(64, 2, 5, 5, taps=4)),
    "more zeros than the kernel is wide": ("n3-c16x5x5-k64x1x1-p2-float16-NHWC", tile(64, 2, 9, 9)),
    "two share images": ("n5-c32x7x7-k128x3x3-p1-float16-NHWC-bias", tile(64, 2, 7, 7, cluster=2)),
    "four share rows, in turn": ("n5-c32x7x7-k256x3x3-p1-float16-NHWC", tile(64, 1, 7, 7, stages=3, taps=3, turns=2, cluster=4)),
    "rows that the cluster does not divide": ("n2-c32x9x12-k128x3x3-p1-float16-NHWC-add", tile(64, 1, 3, 6, cluster=2, taps=3)),
    "a stride, whole images": ("n3-c32x14x14-k128x3x3-p1-float16-NHWC-s2", tile(128, 2, 7, 7, groups=2, stages=3)),
    "a stride, shared": ("n2-c32x13x14-k128x3x3-p1-float16-NHWC-s2", tile(64, 1, 4, 4, cluster=2, taps=3)),
    "a stride of one tap": ("n3-c64x13x14-k64x1x1-float16-NHWC-s2", tile(64, 1, 3, 7, filter_stages=3)),
    "taps apart": ("n2-c40x12x12-k64x3x3-p2-float16-NHWC-d2-bias-relu", tile(64, 1, 12, 12, taps=3)),
    "strides and taps that differ": ("n1-c16x29x31-k64x5x3-p0.2.1.0-float16-NHWC-s2x3-d2", tile(64, 1, 3, 4, taps=5)),
    "an odd number of channels": ("n1-c8x6x8-k33x3x3-float16-NHWC", tile(64, 1, 2, 6)),
    "channels that the block does not divide": ("n2-c24x6x8-k160x3x3-p1-float16-NHWC-bias", tile(128, 1, 3, 8, groups=2, turns=1)),
    "two warpgroups, twice": ("n2-c24x8x8-k128x3x3-p1-float16-NHWC", tile(128, 1, 4, 8, groups=2, turns=2, taps=3)),
    "products of a warpgroup one below the other": ("n2-c24x8x8-k128x3x3-p1-float16-NHWC", tile(128, 1, 4, 8, turns=2, taps=9)),
    "integers": ("n2-c64x9x12-k64x3x3-p1-int8-NHWC-bias", tile(64, 1, 5, 6, taps=3, product=S8)),
    "integers, 128 channels a step": ("n3-c144x7x7-k128x1x1-int8-NHWC", tile(64, 1, 1, 48, slabs=2, cluster=2, turns=2, product=S8)),
    "int8 to int8": ("n3-c64x7x7-k64x3x3-p1-int8-NHWC-out.int8-bias-relu", tile(64, 3, 7, 7, taps=9, product=S8)),
    "int8 to int8, added": ("n3-c64x7x7-k72x1x1-int8-NHWC-out.int8-bias-add", tile(64, 1, 1, 64, product=S8)),
    "int8 to float16": ("n2-c64x7x7-k128x3x3-p1-int8-NHWC-out.float16-bias", tile(128, 1, 7, 7, taps=3, groups=2, product=S8)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_outputs_are_exact(name: str) -> None:
    key, one = EXACT[name]
    check(Conv2d.parse(key), one)


@pytest.mark.parametrize("seed", range(20))
def test_any_tile_of_any_problem(seed: int) -> None:
    """Drawn problems and tiles, legal ones; most divide nothing."""
    draw = random.Random(f"streamed {seed}")
    while True:
        dtype = draw.choice(["float16", "float16", "int8"])
        unit, kernel, stride = {"float16": 8, "int8": 16}[dtype], draw.choice([1, 2, 3, 3]), draw.choice([1, 1, 2])
        padding, height, width = draw.randint(0, kernel - 1), draw.randint(3, 12), draw.randint(3, 12)
        shape = f"n{draw.randint(1, 4)}-c{unit * draw.randint(1, 12)}x{height}x{width}-k{draw.randint(20, 270)}x{kernel}x{kernel}"
        conv = Conv2d.parse(f"{shape}-p{padding}-{dtype}-NHWC" + (f"-s{stride}" if stride > 1 else "") + draw.choice(["", "-bias"]))
        out = flat(conv).output_size
        one = tile(
            64 * draw.randint(1, 3), draw.randint(1, 3), *(draw.choice([size, draw.randint(1, size)]) for size in out),
            slabs=draw.randint(1, 2), stages=draw.randint(2, 4), taps=draw.choice([1, kernel, kernel * kernel]),
            filter_stages=draw.randint(2, 4), groups=draw.randint(1, 2), turns=draw.randint(1, 2), cluster=draw.choice([1, 2, 4]),
            product={"float16": "wg_f16", "int8": S8}[dtype],
        )  # fmt: skip
        if not problems(conv, one, SMALL):
            return check(conv, one, 1)


# --- what is left out

CALL = re.compile(r"im2win::(\w+)(?:<[\d, ]+>)?\((?=[^;]*;)|__(syncthreads)\(")
WAITS = (
    "wait_slot", "wait_bulk", "wait_products", "end_products", "release_slot", "expect_bytes", "cluster_barrier", "copy_shared", "copy_bulk",
    "copy_box", "clear_chunk", "start_slot", "start_phases", "syncthreads",
)  # fmt: skip
SABOTAGED = {
    "alone": ("n5-c64x7x7-k64x3x3-p1-float16-NHWC", tile(64, 1, 7, 7, taps=3, stages=2, filter_stages=2)),
    "in turn, in clusters": ("n5-c128x4x16-k128x1x1-float16-NHWC", tile(64, 1, 1, 32, turns=2, cluster=2)),
}


def sites(kind: str) -> list[str]:
    """Every call, in the order of the source, as name and how many of that name came before."""
    key, one = SABOTAGED[kind]
    body = made(Conv2d.parse(key), one).generated.source.partition('extern "C"')[2]
    found = [match[1] or match[2] for match in CALL.finditer(body)]
    return [f"{name} {found[:i].count(name)}" for i, name in enumerate(found) if name in WAITS]


SITES = {
    "alone": {
        "wait_slot": 2, "wait_bulk": 4, "wait_products": 3, "end_products": 1, "release_slot": 6, "expect_bytes": 1, "copy_bulk": 1,
        "copy_box": 1, "clear_chunk": 1, "start_slot": 2, "start_phases": 2, "syncthreads": 1,
    },
    "in turn, in clusters": {
        "wait_slot": 4, "wait_bulk": 2, "wait_products": 1, "end_products": 1, "release_slot": 5, "expect_bytes": 1, "cluster_barrier": 1,
        "copy_bulk": 1, "copy_shared": 1, "start_slot": 3, "start_phases": 2,
    },
}  # fmt: skip


def test_every_call_is_left_out_once() -> None:
    for kind, counts in SITES.items():
        assert sorted(sites(kind)) == sorted(f"{name} {i}" for name, count in counts.items() for i in range(count))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, counts in SITES.items() for name in counts])
def test_nothing_can_be_left_out(kind: str, name: str) -> None:
    """Without one of its waits, of what they wait for, or of what is copied, a kernel is wrong for some order of threads, or refused."""
    key, one = SABOTAGED[kind]
    conv = Conv2d.parse(key)
    kernel = made(conv, one)
    for which in range(SITES[kind][name]):

        def without(source: str, which: int = which) -> str:
            places = [match for match in CALL.finditer(source) if (match[1] or match[2]) == name]
            start, end = places[which].span()
            return source[:start] + "[](auto...) {}(" + source[end:]

        assert goes_wrong(conv, kernel, without, range(16)), f"{name} {which}"
