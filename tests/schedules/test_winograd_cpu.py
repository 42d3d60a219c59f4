"""Winograd on the CPU: its definitions alone, its tiles over row blocks, passes and borders, what it allocates and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from allocations import allocated
from ops import exact, host, run, tiled
from oracle import Array, Tensors, assert_close, assert_equal, exact_tensors, normal_tensors, oracle
from tvm import te

import im2win
from im2win.builder.build import build_tile
from im2win.codegen.llvm import TileError, compile_module, llvm_target
from im2win.compute import winograd
from im2win.numerics.tolerance import tolerance
from im2win.numerics.winograd_matrices import transform
from im2win.packing.winograd import WinogradPack
from im2win.records.emission import emitted_now
from im2win.records.log import Log
from im2win.records.lookup import choose
from im2win.registry.cpu_lowering import lower
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import candidates, schedule_of
from im2win.registry.sources import code_digest
from im2win.schedules.cpu_winograd.legality import violations
from im2win.schedules.cpu_winograd.model import buffers, row_block_bytes
from im2win.schedules.cpu_winograd.space import forms, space
from im2win.schedules.cpu_winograd.tile import WinogradTile
from im2win.spec.conv2d import Conv2d

ROW = schedule_of("winograd")
PLAIN = Conv2d.parse("n2-c5x11x13-k7x3x3-p1")
TILE = WinogradTile(outputs=2, depth=4, lanes=4, vectors=1, cols=4, row_block=1, images=1, pass_blocks=1, unroll=4)


def judge(conv: Conv2d, outputs: int, y: Array, tensors: Tensors) -> None:
    """Equal to the oracle where the form divides by powers of two only, else within the tolerance."""
    expected = oracle(conv, **tensors)
    if all(transform(outputs, taps).dyadic for taps in conv.kernel):
        assert_equal(conv, y, expected)
    else:
        assert_close(conv, y, expected, tolerance(conv))


# --- definitions


def defined(conv: Conv2d, pack: WinogradPack, arguments: list[te.Tensor], tensors: Tensors) -> Array:
    """What a definition computes, by TVM's default loops."""
    kernel = tvm.compile(te.create_prim_func(arguments), llvm_target(host()))
    given = {**tensors, "filter": pack.filter(conv, tensors["filter"])}
    if conv.bias:
        given["bias"] = pack.bias(conv, tensors["bias"])
    y = tvm.runtime.tensor(np.full(conv.output_shape, np.nan, np.float32))
    kernel(*(tvm.runtime.tensor(array) for array in given.values()), y)
    return np.asarray(y.numpy())


DEFINED = [
    ("n2-c5x11x13-k7x3x3-p1", 2),  # sizes that tiles do not divide, two images
    ("n2-c5x11x13-k7x3x3-p1", 4),
    ("n1-c4x8x9-k6x3x3-p0.1.2.0-g2-bias-add-relu", 3),
    ("n1-c16x13x14-k4x5x5-p2-NHWC-bias", 4),
    ("n1-c32x12x7-k8x3x3", 6),  # refused as a kernel, right as a definition
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("key", "outputs"), DEFINED)
def test_definitions(key: str, outputs: int) -> None:
    """Element-wise, as matrix products, and by row blocks: the same convolution."""
    conv = Conv2d.parse(key)
    tensors, rows = exact_tensors(conv), winograd.tiles(conv, outputs)[0]
    small, whole = WinogradPack(outputs, 3, "ijbck"), WinogradPack(outputs, conv.out_channels // conv.groups, "bkcij")
    row_blocks = WinogradPack(outputs, 4, "bijck", 4)
    last = max(d for d in range(1, rows) if rows % d == 0)
    split = winograd.define(conv, row_blocks, *((last, 1) if conv.batch == 1 else (rows, 2)))
    for pack, arguments in (
        (whole, winograd.ewmm(conv, whole)), (small, winograd.bgemm(conv, small)), (row_blocks, split),
    ):  # fmt: skip
        judge(conv, outputs, defined(conv, pack, arguments, tensors), tensors)


@pytest.mark.parametrize("axes", [winograd.EWMM, winograd.BGEMM])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_input_transform(axes: str, layout: str) -> None:
    """V = B^T d B of every tile, zeros beyond the input, in the order that the axes say."""
    conv = Conv2d(2, 3, 6, 7, 4, 3, padding=(1, 0, 2, 1), layout=layout)
    x = exact_tensors(conv)["data"]
    data = te.placeholder(conv.input_shape, "float32", name="data")
    kernel = tvm.compile(te.create_prim_func([data, winograd.input_transform(conv, 2, axes, data)]), llvm_target(host()))
    y = tvm.runtime.tensor(np.full(winograd.shape(conv, 2, axes), np.nan, np.float32))
    kernel(tvm.runtime.tensor(x), y)
    planes = x if layout == "NCHW" else x.transpose(0, 3, 1, 2)
    rows, cols = winograd.tiles(conv, 2)
    field = np.pad(planes, ((0, 0), (0, 0), (1, 9), (0, 9)))
    bt = np.array(transform(2, 3).bt, np.float64)
    tiles = np.stack([[field[:, :, 2 * i : 2 * i + 4, 2 * j : 2 * j + 4] for j in range(cols)] for i in range(rows)])  # y x n c u v
    expected = np.einsum("iu,yxncuv,jv->ncyxij", bt, tiles, bt)
    assert np.array_equal(y.numpy(), expected.transpose(["ncyxij".index(axis) for axis in axes]))
    assert expected.size * 4 == winograd.transform_bytes(conv, 2)


# --- tiles

KERNELS = [
    ("n1-c32x14x14-k32x3x3-p1-bias-relu", {"outputs": 4, "lanes": 8, "vectors": 2, "cols": 3, "row_block": 2}, "a last block cut short"),
    ("n3-c8x12x20-k32x3x3", {"row_block": 5, "cols": 7, "lanes": 8, "pass_blocks": 2}, "passes, blocks that register tiles do not fill"),
    ("n2-c5x11x13-k17x3x3-p1-add-relu6", {"cols": 5, "pass_blocks": 5, "unroll": 1}, "channels that fill neither block nor vector"),
    ("n2-c5x11x13-k17x3x3-p1-NHWC-add", {"depth": 1, "unroll": 1, "lanes": 8, "vectors": 2, "row_block": 3}, "the same, channels last"),
    ("n1-c8x10x18-k24x3x3-p1-add", {"lanes": 8, "vectors": 3, "row_block": 5, "outputs": 2, "depth": 8}, "a residual on transposed rows"),
    ("n1-c8x9x18-k24x3x3-p1-bias-add-relu", {"outputs": 4, "lanes": 8, "vectors": 3, "depth": 8}, "the same, rows left out"),
    ("n1-c16x9x20-k32x5x5-p2", {"outputs": 2, "depth": 8, "lanes": 8, "vectors": 4, "cols": 5}, "5x5"),
    ("n1-c16x9x17-k32x5x5-p2-NHWC", {"outputs": 4, "depth": 8, "lanes": 8, "vectors": 2, "row_block": 3}, "5x5 in 4x4, channels last"),
    ("n1-c12x9x10-k24x3x3-p1-g3-bias", {"vectors": 2, "row_block": 5, "pass_blocks": 3}, "groups, each pass of one"),
    ("n1-c12x9x10-k24x3x3-p1-g3", {"outputs": 3, "vectors": 2, "row_block": 3, "pass_blocks": 1}, "groups of one block each"),
    ("n2-c6x7x1-k8x3x3-p1-add", {"cols": 1, "depth": 2, "unroll": 1}, "a single column, which no shuffle turns"),
    ("n2-c6x1x7-k8x3x3-p1", {"outputs": 3, "cols": 3, "depth": 2, "unroll": 2}, "a single row"),
    ("n6-c8x7x7-k16x3x3-p1-bias-add", {"outputs": 4, "lanes": 8, "row_block": 2, "images": 3, "cols": 5}, "three images, rows left out"),
    ("n4-c5x6x6-k7x3x3-NHWC", {"row_block": 2, "images": 4, "cols": 16}, "a whole batch at once, channels last"),
    ("n1-c8x4x33-k8x4x4-p2x1", {"outputs": 2, "cols": 16, "depth": 8}, "an even kernel"),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("key", "changes"), [row[:2] for row in KERNELS], ids=[row[2] for row in KERNELS])
def test_kernels(key: str, changes: dict[str, Any]) -> None:
    """Exactly where the form allows, over NaN and between guards, for one thread and for several."""
    conv, tile = Conv2d.parse(key), replace(TILE, **changes)
    if host().registers < 32 and any("registers" in broken for broken in violations(conv, tile, host())):
        pytest.skip(f"the tile needs more than the {host().registers} vector registers of this CPU")
    assert violations(conv, tile, host()) == []
    tensors = exact_tensors(conv)
    buffer = np.full(int(np.prod(conv.output_shape)) + 58, np.nan, np.float32)
    out = buffer[29:-29].reshape(conv.output_shape)
    run(tiled(conv, "winograd/tiled", tile), tensors, out)
    judge(conv, tile.outputs, out, tensors)
    assert np.isnan(buffer[:29]).all() and np.isnan(buffer[-29:]).all()
    normal = normal_tensors(conv)
    assert_close(conv, run(tiled(conv, "winograd/tiled", tile), normal), oracle(conv, **normal), tolerance(conv))


def test_a_zero_beyond_the_border_is_a_zero() -> None:
    """An infinity in one tile stays there: no other tile reads it, and none multiplies it by what lies beyond the input."""
    conv = Conv2d.parse("n1-c4x16x16-k4x3x3-p1")
    tensors = exact_tensors(conv)
    tensors["data"][0, 0, 15, 15] = np.inf
    y = run(tiled(conv, "winograd/tiled", replace(TILE, row_block=4)), tensors)
    assert np.isfinite(y[:, :, :14, :]).all() and np.isfinite(y[:, :, :, :14]).all() and not np.isfinite(y[:, :, 15, 15]).any()


def test_the_product_lives_in_registers() -> None:
    """Sums of the register tile are SSA values: nothing in memory behind them, whether tiles divide the row block or not."""
    machine = host()
    conv = Conv2d(1, 16, 30, 30, 2 * machine.lanes, 3)
    tile = WinogradTile(2, min(16, machine.lanes), machine.lanes, 2, machine.registers // 2 - 2, 2, 1, 1, 4)
    module = lower(conv, ROW, tile, machine)
    code = str(compile_module(module, machine).executable.mod.inspect_source("ll"))
    assert not re.search(r"alloca (\[\d+ x float\]|<)", code)


# --- what it holds


@pytest.mark.parametrize(
    "key", ["n2-c8x12x14-k16x3x3-p1", "n2-c5x11x13-k17x3x3-p1", "n2-c12x9x10-k32x3x3-p1-g2", "n2-c8x9x11-k16x3x3-p1-NHWC"]
)
def test_buffers_are_those_of_the_formula(key: str) -> None:
    conv = Conv2d.parse(key)
    found = space(conv, host())
    for tile in (found[len(found) // 2], found[-1]):
        named, total = allocated(conv, "winograd/tiled", tile)
        assert named == {name: count for name, count in buffers(conv, tile).items() if count}, tile
        row_blocks = conv.batch // tile.images * winograd.tiles(conv, tile.outputs)[0] // tile.row_block
        held = min(host().threads, row_blocks * tile.pack.blocks(conv) // tile.pass_blocks)
        least = held * (named[winograd.INPUT] + named["conv"])
        # TVM puts no buffer in the place of one more than sixteen times as large: the smallest of the row block may lie beside M.
        beside = sum(size for size in (named[winograd.PADDED], named[winograd.DOWN]) if size * 16 < named["conv"])
        assert least <= total <= held * (row_block_bytes(conv, tile) * 1.01 + beside), tile


def test_larger_filters_count() -> None:
    """An operator says what its packed filters take beyond the filters: (16 - 9) / 9 of them for F(2x2, 3x3)."""
    conv = Conv2d(1, 32, 8, 8, 32, 3)
    tile = WinogradTile(2, 4, 8, 2, 3, 1, 1, 1, 4)
    op = build_tile(conv, "winograd/tiled", tile, host())
    _, kernel = allocated(conv, "winograd/tiled", tile)
    assert op.extra_bytes - kernel == 4 * 32 * 32 * (16 - 9)


# --- what it refuses

RULES = [
    ({"outputs": 1}, "`outputs` (=1) must be at least 2, or no product is saved"),
    ({"outputs": 0}, "`outputs` (=0) must be at least 1"),
    ({"outputs": 7}, "`outputs` (=7) and the kernel make input tiles of 9; they must be at most 8"),
    ({"outputs": 6, "cols": 1}, "`outputs` (=6) lets errors grow to"),
    ({"depth": 3}, "`depth` (=3) must be one of"),
    ({"depth": 16, "unroll": 3}, "`unroll` (=3) must divide `depth` (=16)"),
    ({"depth": 16}, "`depth` (=16) must not be half zeros beyond 5 channels"),
    ({"lanes": 2}, "`lanes` (=2) must be at least 4, what shuffles can transpose to NCHW"),
    ({"cols": 40, "row_block": 6}, "sums and operands must fit the"),
    ({"cols": 8}, "`cols` (=8) must fit the row block's tiles (=7)"),
    ({"row_block": 4}, "`row_block` (=4) must divide the rows of tiles (=6)"),
    ({"images": 3}, "`images` (=3) must divide `batch` (=2)"),
    ({"images": 2}, "`images` (=2) must be 1, or `row_block` (=1) whole images of 6"),
    ({"pass_blocks": 3}, "`pass_blocks` (=3) must divide the channel blocks (=2)"),
    ({"vectors": 3}, "the block (=12) must not hold a whole vector of padding beyond 7 channels"),
]


@pytest.mark.parametrize(("changes", "message"), RULES, ids=[str(changes) for changes, _ in RULES])
def test_rules(changes: dict[str, Any], message: str) -> None:
    assert violations(PLAIN, TILE, host()) == []
    with pytest.raises(TileError, match=re.escape(message)):
        im2win.build(PLAIN, algorithm="winograd", tile=replace(TILE, **changes))


def test_tiles_from_plain_values() -> None:
    assert WinogradTile.from_dict(TILE.as_dict()) == TILE
    with pytest.raises(ValueError, match=r"`cols` \(='4'\) must be of type int"):
        im2win.build(PLAIN, algorithm="winograd", tile={**TILE.as_dict(), "cols": "4"})
    other = default_tile(PLAIN, "direct/tiled")[1]
    for algorithm, tile in (("winograd", {"rows": 1}), ("winograd", other), ("direct/tiled", TILE)):
        with pytest.raises(ValueError, match=r"tile: fields .* must be"):
            im2win.build(PLAIN, algorithm=algorithm, tile=tile)
    with pytest.raises(ValueError, match=r"`tile` \(='F\(2, 3\)'\) must be a tile of `algorithm` winograd, or a mapping"):
        im2win.build(PLAIN, algorithm="winograd", tile="F(2, 3)")


REASONS = [
    ("n1-c8x8x8-k8x3x3-s2", "Winograd's form is for stride 1 and dilation 1"),
    ("n1-c8x8x8-k8x3x3-d2", "Winograd's form is for stride 1 and dilation 1"),
    ("n1-c8x8x8-k8x1x3", "transforms are for kernels of 2 to 7 rows and columns"),
    ("n1-c8x12x12-k8x8x8", "transforms are for kernels of 2 to 7 rows and columns"),
    ("n1-c8x8x8-k8x3x3-g8", "depthwise layers have no sums over channels, which transforms could pay for"),
    ("n1-c8x8x8-k12x3x3-g2", "a group's output channels (=6) must be a multiple of 4, the least vector"),
    ("n1-c1x8x8-k8x7x7", "its least error, "),
]


@pytest.mark.parametrize(("key", "reason"), REASONS)
def test_reasons(key: str, reason: str) -> None:
    found = ROW.supports(Conv2d.parse(key))
    assert found is not None and found.startswith(reason)


def test_forms_keep_the_tolerance_and_save_tiles() -> None:
    assert forms(Conv2d.parse("n1-c64x30x30-k64x3x3")) == [2, 3, 4]
    assert forms(Conv2d.parse("n1-c512x30x30-k64x3x3")) == [2, 3, 4]  # sums over more channels do not make larger forms safe
    assert forms(Conv2d.parse("n1-c64x6x6-k64x3x3")) == [2, 4]  # of 4x4 outputs: 3 takes as many tiles as 2
    assert forms(Conv2d.parse("n1-c64x30x30-k64x5x5")) == [2, 3, 4]
    assert forms(Conv2d.parse("n1-c64x30x30-k64x3x3-relu6")) == [2]


@pytest.mark.parametrize(("lanes", "registers"), [(4, 16), (4, 32), (8, 16), (16, 32)])
@pytest.mark.parametrize("key", ["n1-c64x28x28-k64x3x3-p1", "n4-c5x7x7-k17x3x3-p1", "n1-c16x9x9-k16x5x5-g2", "n1-c3x9x9-k5x2x2-NHWC"])
def test_every_machine_has_tiles(key: str, lanes: int, registers: int) -> None:
    conv, machine = Conv2d.parse(key), replace(host(), lanes=lanes, registers=registers)
    tiles = space(conv, machine)
    assert len(set(tiles)) == len(tiles) > 0
    assert not any(violations(conv, tile, machine) for tile in tiles)


# --- its place among the others


def test_the_model_prefers_it_where_it_saves_most() -> None:
    """And not where there is one input channel, or hardly a tile for each filter that is read."""
    assert default_tile(Conv2d.parse("n1-c64x56x56-k64x3x3-p1"))[0] == "winograd/tiled"
    assert default_tile(Conv2d.parse("n1-c1x56x56-k64x3x3-p1"))[0] != "winograd/tiled"


def test_accuracy_exact_leaves_it_out() -> None:
    conv = Conv2d.parse("n1-c64x56x56-k64x3x3-p1")
    assert "winograd/tiled" not in [row.key for row in candidates("auto", conv, accuracy="exact")]
    assert default_tile(conv, accuracy="exact")[0] != "winograd/tiled"
    with pytest.raises(ValueError, match="it rounds more than a sum of products, which accuracy 'exact' leaves out"):
        im2win.build(conv, algorithm="winograd", accuracy="exact")


@pytest.mark.slow
def test_it_is_tuned_recorded_found_and_built(tmp_path: Path) -> None:
    conv = Conv2d.parse("n1-c8x10x10-k16x3x3-p1-bias-relu")
    record = im2win.tune(conv, algorithm="winograd", trials=1, logs=tmp_path)
    records = Log(tmp_path).read(conv, host().name)
    assert record.algorithm == "winograd" and all(one.outcome == "ok" for one in records)
    assert record.fingerprint == emitted_now(record) and record.tolerance == tolerance(conv)
    assert record.generator == code_digest("cpu", record.method)
    found = choose(conv, host(), ["winograd/tiled"], tmp_path)
    assert found is not None and found.exact and found.tile == WinogradTile.from_dict(record.tile)
    near = choose(conv.with_(width=12), host(), ["winograd/tiled"], tmp_path)
    assert near is None or near.tier == "nearest layer"
    op = im2win.build(conv, logs=tmp_path, algorithm="winograd")
    assert op.tuned and op.tile == record.tile and op.extra_bytes == record.extra_bytes
    tensors = normal_tensors(conv)
    assert_close(conv, run(op, tensors), oracle(conv, **tensors), tolerance(conv))


def test_exactness_is_told_by_the_tile() -> None:
    assert exact(PLAIN, TILE) and not exact(PLAIN, replace(TILE, outputs=4))
