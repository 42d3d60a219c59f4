"""Taps in the padding that CPU kernels leave out, and sums in chunks of channels: exact in every form, and refused where none is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import tvm
from ops import host, run, sampled_tiles, tiled
from oracle import assert_equal, exact_tensors, oracle
from tvm.ir.instrument import pass_instrument

from im2win.codegen.llvm import llvm_target
from im2win.registry.cpu_lowering import lower
from im2win.registry.ranking import default_tile, ranked_tiles
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.schedules.cpu.loop_peeling import CONFIG
from im2win.schedules.cpu.registers import LAST_PASS, PIPELINE
from im2win.schedules.cpu.tile import Tile
from im2win.spec.conv2d import Conv2d
from im2win.spec.padding import MOST_NEEDED, multiplied, needed, skips, whole

LAYERS = {
    "n1-c8x14x14-k40x3x3-p12-d12": "of outer taps only corners are inside",
    "n2-c8x13x11-k16x3x3-p8x5-d8x5-NHWC-bias-relu": "both layouts, an epilogue",
    "n1-c4x2x2-k16x3x3-p1-bias-add": "a small map, not dilated",
    "n1-c6x9x9-k10x5x3-s2-p4x6-d2x4": "strides",
    "n1-c6x10x12-k32x3x3-s2x3-p5.0.7.9-d4x3-g2-bias-add-relu6": "four sides, groups",
    "n1-c8x20x1-k16x3x1-p6x0-d6x1": "a single column",
    "n2-c4x9x30-k33x1x3-p0x20-d1x20-NHWC": "a single kernel row, channels left over",
}
ALGORITHMS = ("direct/tiled", "im2win/stored", "im2win/fused", "mec/tiled", "mcfa/tiled")


@pytest.mark.pairwise
@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", LAYERS, ids=LAYERS.values())
def test_exact(key: str, algorithm: str, turn: int) -> None:
    """The default tile and tiles of both axes in turn, those of channels with their own chunks and with others."""
    conv = Conv2d.parse(key)
    assert skips(conv)
    divisors = [chunks for chunks in (2, 3, 4) if conv.in_channels // conv.groups % chunks == 0]
    tiles = [
        replace(tile, chunks=chunks)
        for tile in sampled_tiles(conv, algorithm, 1)
        for chunks in ([tile.chunks, *divisors[:1]] if tile.axis == "channels" else [1])
    ]
    tensors = exact_tensors(conv)
    assert_equal(conv, run(tiled(conv, algorithm, tiles[turn % len(tiles)]), tensors), oracle(conv, **tensors))


@pytest.mark.pairwise
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", LAYERS, ids=LAYERS.values())
def test_all_channels_of_a_tap_are_exact(key: str, algorithm: str, turn: int) -> None:
    """A tile of each axis, unrolled and not, in turn."""
    conv = Conv2d.parse(key)
    tiles = [tile for _, tile in ranked_tiles(conv, schedule_of(algorithm), host()) if tile.order == "uvc"]
    kinds = {(tile.axis, tile.unroll): tile for tile in sorted(tiles, key=lambda tile: tile.rows * tile.cols)}
    assert kinds.keys() >= {("channels", 1), ("channels", 4)}
    tile = kinds[sorted(kinds)[turn % len(kinds)]]
    tensors = exact_tensors(conv)
    assert_equal(conv, run(tiled(conv, algorithm, tile), tensors), oracle(conv, **tensors))


def test_a_register_tile_asks_for_all_channels_of_a_tap() -> None:
    conv, row = Conv2d.parse("n1-c61x14x14-k64x3x3-p12-d12"), schedule_of("direct/tiled")  # nothing else is 61 long
    tile = next(tile for _, tile in ranked_tiles(conv, row, host()) if tile.order == "uvc" and tile.axis == "channels")
    for order, first in (("cuv", "for "), ("uvc", "if ")):
        script = lower(conv, row, replace(tile, order=order, unroll=1), host()).script()
        lines = [line.strip() for line in script.splitlines()]
        nest = [line for line in lines if line.startswith("if ") or (line.startswith("for ") and "(61" in line)]
        assert nest[0].startswith(first), script


def test_where_all_channels_of_a_tap_are_offered() -> None:
    dilated, plain = Conv2d.parse("n1-c64x14x14-k64x3x3-p12-d12"), Conv2d.parse("n1-c64x14x14-k64x3x3-p1")
    for conv, algorithm, offered in ((dilated, "direct/tiled", True), (plain, "direct/tiled", False), (dilated, "im2col/tiled", False)):
        row = schedule_of(algorithm)
        tiles = [tile for _, tile in ranked_tiles(conv, row, host())]
        assert any(tile.order == "uvc" for tile in tiles) == offered
        broken = row.scheduler.violations(conv, replace(tiles[0], order="uvc", padding="multiplied"), host())
        assert offered or broken == ["`order` uvc is for layers that leave out taps in the padding, and not for a matrix"]


@pytest.mark.parametrize("key", ["n1-c12x9x14-k32x3x3-p1-bias-relu", "n2-c12x9x14-k24x3x3-NHWC-add", "n1-c16x6x6-k20x1x1"])
def test_chunks_of_channels_are_exact_without_padding_too(key: str) -> None:
    conv = Conv2d.parse(key)
    tensors = exact_tensors(conv)
    expected = oracle(conv, **tensors)
    for algorithm, chunks in itertools.product(("direct/tiled", "im2win/fused"), (2, 4)):
        tile = next(tile for _, tile in ranked_tiles(conv, schedule_of(algorithm), host()) if tile.axis == "channels")
        assert_equal(conv, run(tiled(conv, algorithm, replace(tile, chunks=chunks)), tensors), expected)


@pytest.mark.parametrize("algorithm", ["implicit_gemm/tiled", "im2col/tiled"])
@pytest.mark.parametrize(
    "key", ["n1-c16x7x7-k40x1x1-bias-relu", "n2-c12x6x5-k20x1x1-add", "n2-c12x7x7-k32x1x1-NHWC-bias-add", "n1-c16x4x9-k32x1x1-g2"]
)
def test_chunks_of_a_matrix_are_exact(key: str, algorithm: str) -> None:
    conv = Conv2d.parse(key)
    tensors = exact_tensors(conv)
    expected = oracle(conv, **tensors)
    tiles = [tile for _, tile in ranked_tiles(conv, schedule_of(algorithm), host()) if tile.axis == "channels"]
    for row_block, chunks in itertools.product((1, conv.output_size[0]), (2, 4)):
        tile = next(tile for tile in tiles if tile.row_block == row_block)
        assert_equal(conv, run(tiled(conv, algorithm, replace(tile, chunks=chunks)), tensors), expected)


@pytest.mark.parametrize("key", [*LAYERS, "n1-c3x8x8-k4x3x3-p1", "n1-c3x7x9-k4x5x2-s3x2-p2x1"])
def test_taps_are_counted_as_they_lie(key: str) -> None:
    conv = Conv2d.parse(key)
    for axis, extent in itertools.product(range(2), (1, 3)):
        size, pad = (conv.height, conv.width)[axis], conv.padding[axis]
        tiles: list[list[bool]] = []
        for start, tap in itertools.product(range(0, conv.output_size[axis], extent), range(conv.kernel[axis])):
            outputs = range(start, min(start + extent, conv.output_size[axis]))
            places = [one * conv.stride[axis] + tap * conv.dilation[axis] - pad for one in outputs]
            tiles.append([0 <= place < size for place in places])
        if extent == 1 or conv.stride[axis] == 1:
            assert multiplied(conv, axis, extent) == pytest.approx(sum(map(any, tiles)) / len(tiles))
        assert whole(conv, axis, extent) == pytest.approx(sum(map(all, tiles)) / (multiplied(conv, axis, extent) * len(tiles)))


def _conditions(key: str, algorithm: str, **changes: Any) -> int:
    """The number of conditions in the scheduled kernel's sum."""
    conv = Conv2d.parse(key)
    tile = next(tile for _, tile in ranked_tiles(conv, schedule_of(algorithm), host()) if tile.axis == "channels")
    text = lower(conv, schedule_of(algorithm), replace(tile, **changes), host()).script()
    return sum(line.strip().startswith("if ") for line in text.splitlines())


def test_layers_with_few_such_taps_keep_a_product_without_branches() -> None:
    dilated, plain = "n1-c64x14x14-k64x3x3-p12-d12", "n1-c64x14x14-k64x3x3-p1"
    assert needed(Conv2d.parse(dilated)) < 0.2 and needed(Conv2d.parse(plain)) > MOST_NEEDED[False]
    assert _conditions(dilated, "direct/tiled") == 3  # row, column, and all of the tile inside
    assert _conditions(dilated, "im2win/fused") == 2  # zeros are in the im2win tensor
    for algorithm in ("direct/tiled", "im2win/fused"):  # some machines rank a tile first that skips them
        assert _conditions(plain, algorithm, padding="multiplied") == 0


ROWS = {
    "n1-c8x7x7-k40x3x3-p1-bias-relu": "a small map",
    "n2-c6x7x7-k32x3x3-p1-g2-NHWC-add": "both layouts, groups",
    "n1-c4x17x21-k16x5x5-s2-p2-bias": "strides",
    "n1-c4x10x11-k16x3x3-p1.0.2.1": "four sides",
    "n1-c5x11x11-k12x4x3-p1x2": "more columns than the input has",
    "n1-c4x14x14-k33x3x3-p0x1": "columns alone, channels left over",
    "n1-c4x12x12-k16x5x3-p2x0": "rows alone",
    "n1-c4x1x12-k16x1x5-p0x2": "a single row",
}


def _of_rows(conv: Conv2d, algorithm: str) -> Any:
    """A tile that skips the padding: of whole output rows, with unrolled kernel columns."""
    row = schedule_of(algorithm)
    lanes = min(8, 1 << max((conv.out_channels // conv.groups).bit_length() - 1, 2))
    tile = Tile("channels", lanes, 1, 1, conv.output_size[1], 1, 1, "cuv", 4, padding="skipped")
    assert row.scheduler.violations(conv, tile, host()) == []
    return tile


@pytest.mark.pairwise
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", ROWS, ids=ROWS.values())
def test_rows_of_outputs_are_exact_without_the_padding(key: str, algorithm: str, turn: int) -> None:
    """Row blocks of one row and of all rows, sums in chunks, register tiles of all rows, in turn."""
    conv = Conv2d.parse(key)
    assert not skips(conv)
    tile = _of_rows(conv, algorithm)
    short = replace(tile, pass_blocks=tile.pack.blocks(conv))
    tall = replace(short, row_block=conv.output_size[0])
    tiles = [short, tall, replace(short, chunks=conv.in_channels // conv.groups), replace(tall, rows=conv.output_size[0])]
    legal = [one for one in tiles if not schedule_of(algorithm).scheduler.violations(conv, one, host())]
    tensors = exact_tensors(conv)
    assert_equal(conv, run(tiled(conv, algorithm, legal[turn % len(legal)]), tensors), oracle(conv, **tensors))


@pass_instrument
class _Lowered:
    """Takes the text of the lowered kernel."""

    text = ""

    def run_after_pass(self, module: Any, info: Any) -> None:
        if info.name == LAST_PASS:
            self.text = module.script()


def _products(key: str, padding: str) -> tuple[int, int]:
    """Products of a kernel row in the lowered kernel, one vector each, and all its branches."""
    conv, seen = Conv2d.parse(key), _Lowered()
    module = lower(conv, schedule_of("direct/tiled"), replace(_of_rows(conv, "direct/tiled"), padding=padding), host())
    with tvm.transform.PassContext(config=CONFIG, instruments=[seen]):
        tvm.compile(module, llvm_target(host()), tir_pipeline=PIPELINE)
    lines = [line.strip() for line in seen.text.splitlines()]
    return sum("filter" in line and "*" in line and "conv_local" in line for line in lines), sum(line.startswith("if ") for line in lines)


def test_columns_in_the_padding_are_left_out_without_a_branch() -> None:
    all_of_them, before = _products("n1-c64x7x7-k64x3x3-p1", "multiplied")
    inside, after = _products("n1-c64x7x7-k64x3x3-p1", "skipped")
    assert (all_of_them, inside) == (3 * 7, 3 * 7 - 2) and after == before + 1


def test_what_refuses_to_skip_the_padding() -> None:
    conv = Conv2d.parse("n1-c8x7x7-k32x3x3-p1")
    tile = _of_rows(conv, "direct/tiled")

    def rules(algorithm: str, **changes: Any) -> list[str]:
        broken: list[str] = schedule_of(algorithm).scheduler.violations(conv, replace(tile, **changes), host())
        return broken

    assert rules("direct/tiled", padding="none") == ["`padding` (=none) must be one of multiplied, skipped"]
    for changes in ({"cols": 4}, {"unroll": 1}, {"order": "cvu"}):
        assert "`padding` must be multiplied" in rules("direct/tiled", **changes)[0]
    assert "`padding` must be multiplied" in rules("im2col/tiled")[0]
    dilated = Conv2d.parse("n1-c8x14x14-k32x3x3-p12-d12")
    whole = replace(tile, cols=14)
    assert "whatever the tile is" in schedule_of("direct/tiled").scheduler.violations(dilated, whole, host())[0]


@pytest.mark.parametrize(
    ("key", "offered"), [("n1-c64x7x7-k64x3x3-p1", True), ("n1-c64x56x56-k64x3x3-p1", False), ("n1-c8x9x9-k8x3x3-p6-d6", False)]
)
def test_the_space_offers_tiles_that_skip_where_there_is_much_padding(key: str, offered: bool) -> None:
    conv = Conv2d.parse(key)
    tiles = [tile for _, tile in ranked_tiles(conv, SCHEDULES["direct/tiled"], host())]
    assert any(tile.padding == "skipped" for tile in tiles) == offered
    assert all("padding" not in tile.as_dict() or tile.padding == "skipped" for tile in tiles)


def test_what_refuses_chunks() -> None:
    conv = Conv2d.parse("n1-c12x14x14-k64x3x3-p1")

    def rules(algorithm: str, axis: str, chunks: int) -> list[str]:
        row = schedule_of(algorithm)
        tile = next(tile for _, tile in ranked_tiles(conv, row, host()) if tile.axis == axis)
        broken: list[str] = row.scheduler.violations(conv, replace(tile, chunks=chunks), host())
        return broken

    assert rules("direct/tiled", "channels", 3) == []
    assert rules("direct/tiled", "channels", 5) == ["`chunks` (=5) must divide a group's input channels (=12)"]
    assert rules("direct/tiled", "channels", 0) == ["`chunks` (=0) must be at least 1"]
    assert "`chunks` (=2) must be 1" in rules("im2col/tiled", "channels", 2)[0]
    assert "`chunks` (=2) must be 1" in rules("direct/tiled", "windows", 2)[0]


def test_the_space_offers_chunks_where_filters_exceed_the_cache() -> None:
    machine = replace(host(), mcpu="znver4", isa="avx512f", lanes=16, registers=32, l2_bytes=1 << 20)
    long, short = Conv2d.parse("n1-c2048x28x28-k256x3x3-p24-d24"), Conv2d.parse("n1-c16x28x28-k64x3x3-p24-d24")  # 36 KB of filters
    for conv, l1_bytes, offered in ((long, 48 << 10, True), (short, 48 << 10, False), (short, 32 << 10, True)):
        tiles = SCHEDULES["direct/tiled"].scheduler.space(conv, replace(machine, l1_bytes=l1_bytes))
        assert any(tile.chunks > 1 for tile in tiles) == offered
        assert all("chunks" not in tile.as_dict() or tile.chunks > 1 for tile in tiles)


@pytest.mark.parametrize(
    ("key", "registers", "offered"),
    [
        ("n1-c2048x7x7-k512x1x1", 16, True),
        ("n1-c2048x7x7-k512x1x1", 32, False),  # a register tile holds a row of seven windows
        ("n1-c2048x7x7-k512x1x1-s2", 16, False),  # the input is not the matrix
        ("n1-c64x7x7-k512x1x1", 16, False),  # filters stay in level-1 cache
    ],
)
def test_the_space_offers_chunks_of_a_matrix_where_registers_are_few(key: str, registers: int, offered: bool) -> None:
    conv, machine = Conv2d.parse(key), replace(host(), lanes=8, registers=registers, l1_bytes=32 << 10, l2_bytes=512 << 10)
    tiles = SCHEDULES["implicit_gemm/tiled"].scheduler.space(conv, machine)
    chunked = [tile for tile in tiles if tile.chunks > 1]
    assert bool(chunked) == offered
    for tile in chunked:
        line = tile.row_block * conv.output_size[1]
        assert 4 * conv.in_channels // tile.chunks * (tile.block + line) <= 24 << 10
        assert tile.accumulators > 8 and tile.cols >= tile.vectors


def test_the_model_prefers_a_line_of_windows_in_chunks_on_a_small_map() -> None:
    conv = Conv2d.parse("n1-c2048x7x7-k512x1x1")
    machine = replace(host(), mcpu="znver3", isa="avx2", lanes=8, registers=16, threads=2, l1_bytes=32 << 10, l2_bytes=512 << 10)
    name, tile = default_tile(conv, "auto", machine, "exact")
    assert name == "implicit_gemm/tiled"
    assert (tile.cols, tile.vectors, tile.row_block) == (5, 2, 7)
    assert tile.chunks > 1
