"""Warp-specialized kernels: exact on the emulator, and wrong without any of their waits."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from emulated import Emulated, differences, expected, goes_wrong, typed
from oracle import exact_tensors
from warp_specialized import ROW, S8, SMALL, made, tile

from im2win.codegen import cuda as cuda_codegen
from im2win.device.gpu import H200
from im2win.registry import cuda_lowering
from im2win.schedules.cuda.legality.warp_specialized import violations
from im2win.schedules.cuda.mainloop.barriers import with_residents
from im2win.schedules.cuda.mainloop.registers import LEFT, begins_with, registers, resident
from im2win.schedules.cuda.tiles.fields import field_of, flat
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d


def check(conv: Conv2d, one: WarpSpecializedTile, seeds: int = 2) -> None:
    tensors, kernel = typed(conv, exact_tensors(conv)), made(conv, one)
    right, emulated = expected(conv, tensors), Emulated(conv, [kernel])
    for seed in range(seeds):
        wrong = differences(conv, [kernel], emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


EXACT = {
    "pixels of all images in one row": ("n3-c64x13x14-k64x1x1-float16-NHWC", tile(64, 1, 1, 64)),
    "one after the other": ("n3-c40x13x14-k128x1x1-float16-NHWC-bias-add-relu", tile(128, 1, 1, 48, slabs=2, groups=2, filter_stages=3)),
    "in turn, half a cluster's pixels each": ("n3-c72x13x14-k128x1x1-float16-NHWC-silu", tile(64, 1, 1, 64, pingpong=2, cluster=2)),
    "four share pixels": ("n3-c72x5x14-k200x1x1-float16-NHWC-relu6", tile(64, 1, 1, 64, slabs=2, cluster=4, stages=3)),
    "bfloat16, parts of an image": ("n2-c64x9x11-k64x3x3-p1-bfloat16-NHWC-bias", tile(64, 1, 4, 5, taps=3, product="wg_bf16")),
    "bfloat16, four share pixels": (
        "n3-c72x5x14-k200x1x1-bfloat16-NHWC-relu6", tile(64, 1, 1, 64, slabs=2, cluster=4, stages=3, product="wg_bf16"),
    ),
    "int8 to bfloat16": ("n2-c64x7x7-k128x3x3-p1-int8-NHWC-out.bfloat16-bias", tile(128, 1, 7, 7, taps=3, groups=2, product=S8)),
    "groups of 128 filters, half of one in a block": ("n2-c128x5x5-k256x3x3-p1-g2-float16-NHWC-bias", tile(64, 1, 5, 5, taps=3)),
    "groups of 16, four in a block": (
        "n4-c128x5x5-k128x3x3-p1-g8-float16-NHWC", tile(64, 2, 5, 5, slabs=2, taps=9, cluster=2, shared="filters"),
    ),
    "groups whose sums blocks share": (
        "n1-c256x4x4-k128x3x3-p1-g2-float16-NHWC-relu", tile(64, 1, 4, 4, taps=3, cluster=2, shared="accumulators"),
    ),
    "groups of one tap, in one row": ("n2-c64x5x5-k64x1x1-g4-int8-NHWC", tile(64, 1, 1, 32, product=S8)),
    "groups, what a tap reads": ("n2-c64x5x5-k64x3x3-p1-g2-bfloat16-NHWC", tile(64, 1, 5, 5, product="wg_bf16", tma_boxes="taps")),
    "parts of an image": ("n2-c64x9x11-k64x3x3-p1-float16-NHWC-bias", tile(64, 1, 4, 5, taps=3)),
    "rows as wide as the image": ("n2-c32x9x7-k64x3x3-p1-float16-NHWC", tile(64, 1, 4, 7, taps=9)),
    "whole images, zeros between them": ("n5-c40x7x7-k70x3x3-p1-float16-NHWC-bias", tile(64, 2, 7, 7, taps=9, slabs=2)),
    "zeros that differ": ("n3-c16x6x5-k64x3x4-p1.2.0.1-float16-NHWC", tile(64, 2, 5, 5, taps=4)),
    "more zeros than the kernel is wide": ("n3-c16x5x5-k64x1x1-p2-float16-NHWC", tile(64, 2, 9, 9)),
    "two share images": ("n5-c32x7x7-k128x3x3-p1-float16-NHWC-bias", tile(64, 2, 7, 7, cluster=2)),
    "four share rows, in turn": ("n5-c32x7x7-k256x3x3-p1-float16-NHWC", tile(64, 1, 7, 7, stages=3, taps=3, pingpong=2, cluster=4)),
    "rows that the cluster does not divide": ("n2-c32x9x12-k128x3x3-p1-float16-NHWC-add", tile(64, 1, 3, 6, cluster=2, taps=3)),
    "two share filters": ("n4-c40x7x7-k70x3x3-p1-float16-NHWC-bias", tile(64, 2, 7, 7, taps=3, cluster=2, shared="filters")),
    "four share filters, in turn": (
        "n4-c72x7x7-k128x3x3-p1-float16-NHWC-add", tile(64, 1, 7, 7, stages=3, taps=9, pingpong=2, cluster=4, shared="filters"),
    ),
    "two share filters of one tap": (
        "n3-c72x5x14-k128x1x1-float16-NHWC", tile(128, 1, 1, 56, slabs=2, groups=2, cluster=2, shared="filters"),
    ),
    "two share sums": ("n3-c128x9x7-k70x3x3-p1-float16-NHWC-bias-add-relu", tile(64, 1, 5, 7, taps=3, cluster=2, shared="accumulators")),
    "four share sums of whole images": (
        "n5-c256x7x7-k128x3x3-p1-float16-NHWC-bias", tile(128, 2, 7, 7, taps=9, stages=3, groups=2, cluster=4, shared="accumulators"),
    ),
    "eight share sums": ("n3-c512x5x14-k130x1x1-float16-NHWC-relu6", tile(128, 1, 1, 64, slabs=2, cluster=8, shared="accumulators")),
    "shared sums of a stride": ("n3-c64x14x14-k128x3x3-p1-float16-NHWC-s2", tile(64, 1, 4, 7, cluster=2, shared="accumulators")),
    "shared sums of integers": (
        "n3-c256x7x7-k64x3x3-p1-int8-NHWC-out.int8-bias-relu", tile(64, 1, 7, 7, taps=9, cluster=4, product=S8, shared="accumulators"),
    ),
    "a tap's pixels": ("n3-c64x9x7-k70x3x3-p1-float16-NHWC-bias-add", tile(64, 1, 5, 7, tma_boxes="taps")),
    "a tap's pixels of whole images, shared": (
        "n6-c72x6x6-k128x3x3-float16-NHWC-bias-relu", tile(64, 4, 4, 4, slabs=2, stages=3, cluster=2, pingpong=2, tma_boxes="taps"),
    ),
    "a tap's pixels, filters shared": ("n4-c40x7x7-k70x3x3-float16-NHWC", tile(64, 2, 5, 5, cluster=2, shared="filters", tma_boxes="taps")),
    "a tap's pixels, sums shared": (
        "n3-c40x9x8-k64x3x3-p1-float16-NHWC-s2", tile(64, 3, 5, 4, cluster=2, shared="accumulators", tma_boxes="taps")
    ),
    "taps apart, strides that differ, pixels of each": (
        "n2-c16x29x31-k64x5x3-p0.2.1.0-float16-NHWC-s2x3-d2", tile(64, 1, 3, 4, filter_stages=3, tma_boxes="taps"),
    ),
    "a tap's pixels of integers": ("n3-c80x7x7-k64x3x3-p1-int8-NHWC-out.int8-bias", tile(64, 2, 7, 7, product=S8, tma_boxes="taps")),
    "a stride, whole images": ("n3-c32x14x14-k128x3x3-p1-float16-NHWC-s2", tile(128, 2, 7, 7, groups=2, stages=3)),
    "a stride, shared": ("n2-c32x13x14-k128x3x3-p1-float16-NHWC-s2", tile(64, 1, 4, 4, cluster=2, taps=3)),
    "a stride of one tap": ("n3-c64x13x14-k64x1x1-float16-NHWC-s2", tile(64, 1, 3, 7, filter_stages=3)),
    "taps apart": ("n2-c40x12x12-k64x3x3-p2-float16-NHWC-d2-bias-relu", tile(64, 1, 12, 12, taps=3)),
    "strides and taps that differ": ("n1-c16x29x31-k64x5x3-p0.2.1.0-float16-NHWC-s2x3-d2", tile(64, 1, 3, 4, taps=5)),
    "an odd number of channels": ("n1-c8x6x8-k33x3x3-float16-NHWC", tile(64, 1, 2, 6)),
    "channels that the block does not divide": ("n2-c24x6x8-k160x3x3-p1-float16-NHWC-bias", tile(128, 1, 3, 8, groups=2, pingpong=1)),
    "two warpgroups, twice": ("n2-c24x8x8-k128x3x3-p1-float16-NHWC", tile(128, 1, 4, 8, groups=2, pingpong=2, taps=3)),
    "products of a warpgroup one below the other": ("n2-c24x8x8-k128x3x3-p1-float16-NHWC", tile(128, 1, 4, 8, pingpong=2, taps=9)),
    "integers": ("n2-c64x9x12-k64x3x3-p1-int8-NHWC-bias", tile(64, 1, 5, 6, taps=3, product=S8)),
    "integers, 128 channels a step": ("n3-c144x7x7-k128x1x1-int8-NHWC", tile(64, 1, 1, 48, slabs=2, cluster=2, pingpong=2, product=S8)),
    "int8 to int8": ("n3-c64x7x7-k64x3x3-p1-int8-NHWC-out.int8-bias-relu", tile(64, 3, 7, 7, taps=9, product=S8)),
    "int8 to int8, added": ("n3-c64x7x7-k72x1x1-int8-NHWC-out.int8-bias-add", tile(64, 1, 1, 64, product=S8)),
    "int8 to float16": ("n2-c64x7x7-k128x3x3-p1-int8-NHWC-out.float16-bias", tile(128, 1, 7, 7, taps=3, groups=2, product=S8)),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EXACT)
def test_outputs_are_exact(name: str) -> None:
    key, one = EXACT[name]
    check(Conv2d.parse(key), one)


@pytest.mark.sampled(2)
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
            filter_stages=draw.randint(2, 4), groups=draw.randint(1, 2), pingpong=draw.randint(1, 2), cluster=draw.choice([1, 2, 4]),
            product={"float16": "wg_f16", "int8": S8}[dtype], shared=draw.choice(["windows", "filters", "accumulators"]),
            tma_boxes=draw.choice(["halo", "halo", "taps"]),
        )  # fmt: skip
        if not violations(conv, one, SMALL):
            return check(conv, one, 1)


# --- what is left out

CALL = re.compile(r"im2win::(\w+)(?:<[\d, ]+>)?\((?=[^;]*;)|__(syncthreads)\(")
WAITS = (
    "wait_empty_barrier", "wait_full_barrier", "wait_products", "end_products", "arrive_empty_barrier", "expect_bytes", "cluster_barrier",
    "copy_shared", "copy_bulk", "copy_box", "clear_chunk", "init_empty_barrier", "init_full_barrier", "syncthreads", "send_four",
    "add_four",
)  # fmt: skip
SABOTAGED = {
    "alone": ("n5-c64x7x7-k64x3x3-p1-float16-NHWC", tile(64, 1, 7, 7, taps=3, stages=2, filter_stages=2)),
    "in turn, in clusters": ("n5-c128x4x16-k128x1x1-float16-NHWC", tile(64, 1, 1, 32, pingpong=2, cluster=2)),
    "filters shared": ("n6-c128x4x16-k128x1x1-float16-NHWC", tile(64, 1, 1, 32, pingpong=2, cluster=2, shared="filters")),
    "sums shared": ("n5-c128x4x16-k128x1x1-float16-NHWC", tile(64, 1, 1, 32, cluster=2, shared="accumulators")),
}


def sites(kind: str) -> list[str]:
    """Every call, in the order of the source, as name and how many of that name came before."""
    key, one = SABOTAGED[kind]
    body = made(Conv2d.parse(key), one).generated.source.partition('extern "C"')[2]
    found = [match[1] or match[2] for match in CALL.finditer(body)]
    return [f"{name} {found[:i].count(name)}" for i, name in enumerate(found) if name in WAITS]


SITES = {
    "alone": {
        "wait_empty_barrier": 2, "wait_full_barrier": 4, "wait_products": 3, "end_products": 1, "arrive_empty_barrier": 6,
        "expect_bytes": 1, "copy_bulk": 1, "copy_box": 1, "clear_chunk": 1,
        "init_empty_barrier": 2, "init_full_barrier": 2, "syncthreads": 1,
    },
    "in turn, in clusters": {
        "wait_empty_barrier": 4, "wait_full_barrier": 2, "wait_products": 1, "end_products": 1, "arrive_empty_barrier": 5,
        "expect_bytes": 1, "cluster_barrier": 1, "copy_bulk": 1, "copy_shared": 1, "init_empty_barrier": 3, "init_full_barrier": 2,
    },
    "filters shared": {
        "wait_empty_barrier": 4, "wait_full_barrier": 2, "wait_products": 1, "end_products": 1, "arrive_empty_barrier": 5,
        "expect_bytes": 1, "cluster_barrier": 1, "copy_shared": 1, "copy_box": 1, "init_empty_barrier": 3, "init_full_barrier": 2,
    },
    "sums shared": {
        "wait_empty_barrier": 4, "wait_full_barrier": 4, "wait_products": 1, "end_products": 1, "arrive_empty_barrier": 6,
        "expect_bytes": 3, "cluster_barrier": 1, "copy_bulk": 1, "copy_box": 1, "init_empty_barrier": 3, "init_full_barrier": 3,
        "send_four": 4, "add_four": 4,
    },
}  # fmt: skip


def test_every_call_is_left_out_once() -> None:
    for kind, counts in SITES.items():
        assert sorted(sites(kind)) == sorted(f"{name} {i}" for name, count in counts.items() for i in range(count))


@pytest.mark.sampled(6)
@pytest.mark.valuewise
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


@pytest.mark.parametrize("kind", SABOTAGED)
def test_stages_are_released_behind_the_wait(kind: str) -> None:
    """Before it, products of the copy before may still read what is copied next."""
    key, one = SABOTAGED[kind]
    conv = Conv2d.parse(key)
    early = re.compile(r"im2win::wait_products<1>\(\);")

    def later(source: str) -> str:
        changed, count = early.subn("im2win::wait_products<2>();", source)
        assert count
        return changed

    assert goes_wrong(conv, made(conv, one), later, range(16))


def test_zeros_are_seen_by_products() -> None:
    """Threads store them, behind which stands a fence, and a barrier."""
    key, one = SABOTAGED["alone"]
    source = made(Conv2d.parse(key), one).generated.source
    body = source[source.index("im2win::clear_chunk((") :]
    assert re.search(r"im2win::fence_stores\(\);\s*__syncthreads\(\);", body)


# --- the machine's code

COMPILED = {
    "one tap, 128 x 256": ("n32-c512x28x28-k256x1x1-float16-NHWC-bias-relu",
                           tile(128, 1, 1, 256, slabs=2, stages=4, filter_stages=4, groups=2, cluster=2)),
    "one tap, in turn": ("n32-c512x28x28-k256x1x1-float16-NHWC-bias-add-relu",
                         tile(64, 1, 1, 256, slabs=2, stages=4, filter_stages=4, pingpong=2, cluster=4)),
    "nine taps, 256 x 104": ("n32-c256x14x14-k256x3x3-p1-float16-NHWC-bias-relu",
                             tile(256, 1, 7, 14, slabs=2, filter_stages=4, groups=2)),
    "nine taps of four images": ("n32-c512x7x7-k512x3x3-p1-float16-NHWC", tile(128, 4, 7, 7, slabs=2, filter_stages=6, groups=2)),
    "no two blocks": ("n32-c256x56x56-k512x1x1-float16-NHWC", tile(128, 1, 1, 112, slabs=1, groups=2)),
    "few registers to begin with": ("n32-c256x56x56-k576x1x1-float16-NHWC", tile(192, 1, 1, 200, slabs=2, groups=3)),
    "sums shared, tile after tile": ("n128-c512x7x7-k512x3x3-float16-NHWC-bias-relu",
                                       tile(128, 4, 5, 5, slabs=2, stages=3, groups=2, cluster=2, shared="accumulators", tma_boxes="taps")),
    "sums shared": ("n1-c2048x7x7-k512x1x1-float16-NHWC-bias-relu",
                    tile(128, 1, 1, 49, slabs=2, stages=4, filter_stages=4, groups=2, cluster=4, shared="accumulators")),
    "a tap's pixels": ("n128-c512x7x7-k512x3x3-float16-NHWC-bias-relu",
                       tile(128, 4, 5, 5, slabs=2, stages=4, filter_stages=4, groups=2, tma_boxes="taps")),
    "four blocks, nine taps": ("n32-c64x14x14-k64x3x3-p1-float16-NHWC-bias", tile(64, 1, 4, 14, taps=3)),
    "two blocks": ("n32-c128x14x14-k128x3x3-p1-float16-NHWC-bias-relu", tile(128, 1, 7, 14, taps=1, filter_stages=4, groups=2)),
    "integers": ("n32-c256x14x14-k256x3x3-p1-int8-NHWC-out.int8-bias-relu",
                 tile(64, 1, 14, 14, stages=3, taps=3, filter_stages=4, pingpong=2, product=S8)),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", COMPILED)
def test_nothing_is_spilled_and_products_overlap(name: str, tmp_path: Path) -> None:
    """The assembler says when it keeps sums in memory, or lets every product wait for the one before."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    conv, one = Conv2d.parse(COMPILED[name][0]), COMPILED[name][1]
    assert violations(conv, one, H200) == []
    code = tmp_path / "kernel.cu"
    code.write_text(cuda_codegen.generate_source(cuda_lowering.lower(conv, ROW, one, H200), H200).source)
    command = ["nvcc", "-O3", "-std=c++17", "-arch=sm_90a", "-cubin", "-w", "-Xptxas", "-v", "-o", tmp_path / "kernel.cubin", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used, most = re.search(r"Used (\d+) registers", said), begins_with(one, H200, resident(field_of(conv, one), H200))
    assert used and (int(used[1]) == most if one.exchanges else int(used[1]) <= most)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    assert "Performance Loss" not in said and "injected" not in said


def test_registers_pass_from_those_that_copy() -> None:
    conv, one = Conv2d.parse(COMPILED["one tap, 128 x 256"][0]), COMPILED["one tap, 128 x 256"][1]
    source = cuda_codegen.generate_source(cuda_lowering.lower(conv, ROW, one, H200), H200).source
    assert "im2win::take_registers<240>()" in source and "im2win::give_registers<24>()" in source
    assert source.count("__cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) ") == 2  # declared and defined
    assert registers(one, H200, 2) == 104 and registers(replace(one, pingpong=2), H200, 1) == 112
    for groups, turns, blocks in itertools.product((1, 2, 3, 4), (1, 2), (1, 2, 3)):
        any_ = replace(one, groups=groups, pingpong=turns)
        if any_.exchanges and any_.threads * blocks <= H200.threads:
            held = begins_with(any_, H200, blocks) * any_.threads
            assert registers(any_, H200, blocks) * any_.multipliers + LEFT * 128 <= held <= 65536 // blocks
    assert registers(replace(one, groups=1), H200, 1) == 240 and not replace(one, groups=1).exchanges
    alone = 'extern "C" __global__ void __launch_bounds__(64) k(float* x) {\n}\n'
    assert with_residents(alone) == alone
