"""Kernels to which filters and windows come in steps: exact on the emulator, wrong without any of their waits, and what they refuse."""

from __future__ import annotations

import itertools
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
from im2win.schedules.streamed.kernel import LEFT, begins_with, grid, registers, resident
from im2win.schedules.streamed.legality import problems, unable
from im2win.schedules.streamed.space import MOST, SHAPES, patches, space
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
    "wait_slot", "wait_bulk", "wait_products", "end_products", "release_slot", "expect_bytes", "cluster_barrier", "copy_shared",
    "copy_bulk", "copy_box", "clear_chunk", "start_slot", "start_phases", "syncthreads",
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


@pytest.mark.parametrize("kind", SABOTAGED)
def test_slots_are_given_back_behind_the_wait(kind: str) -> None:
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
                         tile(64, 1, 1, 256, slabs=2, stages=4, filter_stages=4, turns=2, cluster=4)),
    "nine taps, 256 x 104": ("n32-c256x14x14-k256x3x3-p1-float16-NHWC-bias-relu",
                             tile(256, 1, 7, 14, slabs=2, filter_stages=4, groups=2)),
    "nine taps of four images": ("n32-c512x7x7-k512x3x3-p1-float16-NHWC", tile(128, 4, 7, 7, slabs=2, filter_stages=6, groups=2)),
    "four blocks, nine taps": ("n32-c64x14x14-k64x3x3-p1-float16-NHWC-bias", tile(64, 1, 4, 14, taps=3)),
    "two blocks": ("n32-c128x14x14-k128x3x3-p1-float16-NHWC-bias-relu", tile(128, 1, 7, 14, taps=1, filter_stages=4, groups=2)),
    "integers": ("n32-c256x14x14-k256x3x3-p1-int8-NHWC-out.int8-bias-relu",
                 tile(64, 1, 14, 14, stages=3, taps=3, filter_stages=4, turns=2, product=S8)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_nothing_is_spilled_and_products_overlap(name: str, tmp_path: Path) -> None:
    """The assembler says when it keeps sums in memory, or lets every product wait for the one before."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    conv, one = Conv2d.parse(COMPILED[name][0]), COMPILED[name][1]
    assert problems(conv, one, H200) == []
    code = tmp_path / "kernel.cu"
    code.write_text(cuda_codegen.generate_source(cuda_codegen.lower(conv, ROW, one, H200), H200).source)
    command = ["nvcc", "-O3", "-std=c++17", "-arch=sm_90a", "-cubin", "-w", "-Xptxas", "-v", "-o", tmp_path / "kernel.cubin", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used, most = re.search(r"Used (\d+) registers", said), begins_with(one, H200, resident(StreamedField(flat(conv), one), H200))
    assert used and (int(used[1]) == most if one.exchanges else int(used[1]) <= most)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    assert "Performance Loss" not in said and "injected" not in said


def test_registers_pass_from_those_that_copy() -> None:
    conv, one = Conv2d.parse(COMPILED["one tap, 128 x 256"][0]), COMPILED["one tap, 128 x 256"][1]
    source = cuda_codegen.generate_source(cuda_codegen.lower(conv, ROW, one, H200), H200).source
    assert "im2win::take_registers<240>()" in source and "im2win::give_registers<24>()" in source
    assert source.count("__cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) ") == 2  # declared and defined
    assert registers(one, H200, 2) == 104 and registers(replace(one, turns=2), H200, 1) == 112
    for groups, turns, blocks in itertools.product((1, 2, 3, 4), (1, 2), (1, 2, 3)):
        any_ = replace(one, groups=groups, turns=turns)
        if any_.exchanges and any_.threads * blocks <= H200.threads:
            held = begins_with(any_, H200, blocks) * any_.threads
            assert registers(any_, H200, blocks) * any_.multipliers + LEFT * 128 <= held <= 65536 // blocks
    assert registers(replace(one, groups=1), H200, 1) == 240 and not replace(one, groups=1).exchanges
    alone = 'extern "C" __global__ void __launch_bounds__(64) k(float* x) {\n}\n'
    assert with_residents(alone) == alone


# --- tiles


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
    field = StreamedField(conv, tile(64, 4, 7, 7))
    assert (field.pitch, field.lines, field.columns, field.copied, field.reach) == (8, 8, 248, 256, 265)
    assert [field.shift(1, 2), field.shift(0, 1)] == [10, 1] and field.patches == 2 and field.held == 273
    part = StreamedField(conv, tile(64, 1, 4, 7))
    assert (part.pitch, part.lines, part.columns, part.copied, part.reach) == (8, 6, 32, 48, 49)
    strided = StreamedField(conv.with_(height=14, width=14, stride=2), tile(64, 2, 7, 7))
    assert (strided.planes, strided.pitch, strided.lines, strided.plane, strided.columns) == ((2, 2), 8, 8, 128, 120)
    assert StreamedField(conv, tile(64, 1, 7, 7, cluster=2)).part == (1, 4, 8)
    assert StreamedField(conv.with_(width=9), tile(64, 1, 7, 5, cluster=2)).part == (1, 8, 7)
    assert flat(conv) == conv and flat(conv.with_(kernel=1, padding=0)).input_shape == (1, 1, 392, 64)


def test_the_grid() -> None:
    """Blocks that run at once, in whole clusters; those of four leave multiprocessors beyond sixteens idle."""
    conv = Conv2d.parse("n128-c512x28x28-k512x1x1-float16-NHWC")
    one = tile(128, 1, 1, 256, slabs=2, stages=4, filter_stages=4, groups=2)
    assert [grid(conv, replace(one, cluster=cluster), H200) for cluster in (1, 2, 4)] == [132, 132, 128]
    small = tile(64, 1, 1, 64, slabs=1, groups=1)
    assert resident(StreamedField(flat(conv), small), H200) == 4 and grid(conv, small, H200) == 528
    assert grid(conv.with_(batch=1, height=8, width=8), small, H200) == 8


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
        ({"images": 2}, "`images` (=2) must be 1 where a patch has less than all 12 x 16 outputs of one"),
        ({"rows": 13}, "`rows` (=13) must be 1 to the output's 12"),
        ({"cols": 0}, "`cols` (=0) must be 1 to the output's 16"),
        ({"slabs": 3}, "`slabs` (=3) must be 1 or 2"),
        ({"stages": 1}, "`stages` (=1) must be at least 2"),
        ({"filter_stages": 1}, "`filter_stages` (=1) must be at least 2"),
        ({"turns": 0}, "`turns` (=0) must be at least 1"),
        ({"taps": 2}, "`taps` (=2) must divide the kernel's 9"),
        ({"cluster": 3}, "`cluster` (=3) must be one of 1, 2, 4"),
        ({"cluster": 4}, "`cluster` (=4) must divide the 2 thread blocks along channels"),
        ({"rows": 12, "cols": 16, "images": 2}, "the product's 424 columns must be at most 256"),
        ({"turns": 5}, "the block's 768 threads must be at most 640"),
        ({"rows": 12, "cols": 16, "turns": 4}, "the 152 registers of a thread must be at most the 112 that it gets"),
        ({"taps": 9, "filter_stages": 7}, "bytes of shared memory must be at most 232448"),
    ],
)
def test_rules(change: dict[str, object], message: str) -> None:
    found = problems(Conv2d.parse(KEY), replace(GOOD, **change), H200)  # type: ignore[arg-type]
    assert any(message in one for one in found), found


def test_parts_of_a_cluster_begin_where_banks_do() -> None:
    flat_one = Conv2d.parse("n2-c64x12x16-k128x1x1-float16-NHWC")
    assert problems(flat_one, tile(64, 1, 1, 48, cluster=2), H200) == []  # 24 pixels each
    [message] = problems(flat_one, tile(64, 1, 1, 40, cluster=2), H200)
    assert message == "`cluster` (=2) must cut patches in parts of whole images, rows or 8 pixels"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("n1-c64x9x9-k64x3x3-NHWC", "are multiplied in float16 or int8, not float32"),
        ("n1-c64x9x9-k64x3x3-float16", "are for channels last, not NCHW"),
        ("n1-c64x9x9-k64x3x3-g2-float16-NHWC", "are for one group, not 2"),
        ("n1-c12x9x9-k64x3x3-float16-NHWC", "must be a multiple of 16 bytes, as copies of boxes need, not 24"),
        ("n1-c64x240x240-k64x225x3-s225x1-float16-NHWC", "the least patches take"),
    ],
)
def test_what_it_cannot_compute(key: str, reason: str) -> None:
    conv = Conv2d.parse(key)
    assert reason in str(unable(conv)) and reason in str(ROW.supports(conv, "cuda"))
    assert space(conv, H200) == []


def test_the_space() -> None:
    """Legal tiles only, of every shape; whole images where they fit; tiles, packs and accuracy come back from plain values."""
    conv = Conv2d.parse("n32-c512x7x7-k512x3x3-p1-float16-NHWC")
    found = space(conv, H200)
    assert 100 < len(found) <= MOST * len(SHAPES) and all(problems(conv, one, H200) == [] for one in found)
    assert patches(conv, 256)[0] == (4, 7, 7) and len({one.block_m for one in found}) > 2
    assert {one.cluster for one in found} == {1, 2, 4} and {one.turns for one in found} == {1, 2}
    backend = backend_for(H200, "exact")
    assert backend.tile(ROW, found[0].as_dict()) == found[0] and backend.accuracy(found[0]) == "exact"
    pack = backend.pack(conv, found[0])
    assert packs.from_dict(packs.as_dict(pack)) == pack and np.prod(pack.shape(conv)) == 512 * 512 * 9
    cost, best = backend.ranked(conv, ROW)[0]
    assert 10e-6 < cost < 60e-6 and backend.proven(conv, best)
    with pytest.raises(ValueError, match="must be of type int"):
        StreamedTile.from_dict(found[0].as_dict() | {"turns": True})
