"""Depthwise layers on the CPU: tiles of both axes, every border and epilogue, exactly; what the inner loop is, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from allocations import allocated
from ops import host, run, tiled
from oracle import assert_close, assert_equal, exact_tensors, normal_tensors, oracle
from tvm import te

from im2win.codegen.llvm import TileError, compile_module, llvm_target
from im2win.compute import depthwise
from im2win.numerics.tolerance import tolerance
from im2win.packing import codec
from im2win.packing.cpu_channels import ChannelPack
from im2win.registry.cpu_lowering import lower
from im2win.registry.ranking import default_tile, ranked_tiles
from im2win.registry.schedules import schedule_of
from im2win.schedules.cpu_depthwise.kernel import inner_tiles
from im2win.schedules.cpu_depthwise.legality import staged_bytes, violations
from im2win.schedules.cpu_depthwise.tile import DepthwiseTile
from im2win.spec.activations import ACTIVATIONS
from im2win.spec.conv2d import Conv2d

NAME = "direct/depthwise"
ROW = schedule_of(NAME)
CHANNELS = DepthwiseTile("channels", lanes=4, vectors=1, rows=1, cols=4, row_block=1, pass_blocks=1)
WINDOWS = DepthwiseTile("windows", lanes=8, vectors=1, rows=1, cols=1, row_block=1, pass_blocks=1)

KERNELS = [
    # --- vectors of channels, read in place
    ("n1-c16x14x14-k16x3x3-p1-g16-NHWC-bias-relu6", CHANNELS, {"row_block": 7, "pass_blocks": 4}, "tiles cut off at both sides"),
    ("n3-c16x9x8-k16x3x3-p1-g16-NHWC-add", CHANNELS, {"vectors": 2, "row_block": 3, "pass_blocks": 2}, "two tiles in a row, unrolled"),
    ("n1-c16x11x23-k16x5x5-s2-p2-g16-NHWC-bias-add-relu", CHANNELS, {"cols": 3, "row_block": 2, "pass_blocks": 2}, "5x5, stride 2"),
    ("n2-c13x9x17-k13x3x3-s2-p1-g13-NHWC-bias-add", CHANNELS, {"row_block": 5, "pass_blocks": 4}, "a smaller last channel block"),
    ("n1-c13x9x17-k13x3x3-g13-NHWC", CHANNELS, {"vectors": 2, "row_block": 7, "pass_blocks": 2}, "the same, two vectors, no padding"),
    ("n1-c8x15x30-k8x3x3-p6-d6-g8-NHWC", CHANNELS, {"cols": 3, "row_block": 5, "pass_blocks": 2}, "zeros in more tiles than are unrolled"),
    ("n1-c8x5x6-k8x3x3-p0.1.4.0-g8-NHWC-bias", CHANNELS, {"row_block": 7}, "four sides, rows of taps outside"),
    ("n1-c4x6x40-k4x2x13-p0x6-g4-NHWC", CHANNELS, {}, "a row of taps that is not unrolled"),
    ("n1-c3x7x7-k3x7x7-p3-g3-NHWC", CHANNELS, {"lanes": 1, "cols": 7, "row_block": 7, "pass_blocks": 3}, "fewer channels than lanes"),
    ("n1-c4x5x5-k4x1x1-s3-g4-NHWC-relu", CHANNELS, {"cols": 2, "row_block": 2}, "1x1"),
    # --- vectors of channels of a copy
    ("n2-c5x9x11-k10x3x3-p1-g5-NHWC-bias-add-relu", CHANNELS, {"lanes": 2, "row_block": 3, "pass_blocks": 5}, "two filters a channel"),
    ("n1-c4x9x11-k12x5x3-s2-p2x1-g4-NHWC", CHANNELS, {"vectors": 3, "cols": 2, "row_block": 5}, "three filters a channel"),
    ("n1-c16x9x11-k16x3x3-p1-g16-bias-add-relu", CHANNELS, {"row_block": 3, "pass_blocks": 2}, "transposed in and out, with a residual"),
    ("n1-c16x9x11-k16x3x3-g16", CHANNELS, {"vectors": 2, "row_block": 7}, "transposed, without padding"),
    ("n2-c8x9x11-k8x3x3-s2-p1-g8-relu6", CHANNELS, {"lanes": 8, "row_block": 5}, "transposed, stride 2"),
    ("n1-c4x9x11-k12x3x3-p1-g4", CHANNELS, {"row_block": 3}, "transposed, three filters a channel"),
    ("n1-c4x6x6-k4x3x3-s2-g4-bias", CHANNELS, {"cols": 2, "row_block": 2}, "transposed, a last column that no window reads"),
    ("n1-c4x9x1-k4x3x1-p1x0-g4", CHANNELS, {"cols": 1, "row_block": 9}, "a single column, which no shuffle turns"),
    # --- vectors of windows
    ("n2-c3x17x19-k3x3x3-p1-g3-bias-add-relu", WINDOWS, {"rows": 2, "row_block": 6, "pass_blocks": 3}, "rows and columns left over"),
    ("n1-c4x9x16-k4x3x3-p1-g4", WINDOWS, {"lanes": 4, "vectors": 2, "rows": 3, "row_block": 9, "pass_blocks": 2}, "whole vectors"),
    ("n1-c5x9x11-k15x3x3-p1-g5-bias", WINDOWS, {"rows": 3, "row_block": 3, "pass_blocks": 5}, "three filters a channel"),
    ("n1-c4x17x33-k4x5x5-s2-p2-g4-add", WINDOWS, {"vectors": 3, "rows": 3, "row_block": 9, "pass_blocks": 4}, "even and odd columns"),
    ("n1-c2x12x17-k2x3x3-s2-p1.2.0.1-g2", WINDOWS, {"rows": 2, "row_block": 2, "pass_blocks": 2}, "even padding, odd width"),
    ("n1-c2x20x41-k2x3x5-s3-p1.2.3.4-d2-g2-bias-relu6", WINDOWS, {"rows": 2, "row_block": 4}, "stride 3, dilation, four sides"),
    ("n1-c2x3x4-k2x5x5-p4-g2", WINDOWS, {"lanes": 4, "row_block": 7, "rows": 7}, "rows shorter than a vector, windows of zeros"),
    ("n2-c2x8x4-k18x1x1-g2-relu6", WINDOWS, {"lanes": 4, "rows": 2, "row_block": 2, "pass_blocks": 9}, "rows of one vector"),
    ("n1-c3x9x30-k3x7x13-p3x6-g3", WINDOWS, {"rows": 3, "row_block": 9}, "a large kernel"),
]  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("key", "tile", "changes"), [row[:3] for row in KERNELS], ids=[row[3] for row in KERNELS])
def test_kernels(key: str, tile: DepthwiseTile, changes: dict[str, Any]) -> None:
    """Exactly, over NaN and between guards; inputs lie between NaN, which no vector may take in."""
    conv, tile = Conv2d.parse(key), replace(tile, **changes)
    assert violations(conv, tile, host()) == []
    tensors = exact_tensors(conv)
    expected, buffer = oracle(conv, **tensors), np.full(int(np.prod(conv.output_shape)) + 58, np.nan, np.float32)
    around = np.full(tensors["data"].size + 58, np.nan, np.float32)
    around[29:-29] = tensors["data"].ravel()
    out = buffer[29:-29].reshape(conv.output_shape)
    run(tiled(conv, NAME, tile), {**tensors, "data": around[29:-29].reshape(conv.input_shape)}, out)
    assert_equal(conv, out, expected)
    assert np.isnan(buffer[:29]).all() and np.isnan(buffer[-29:]).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_epilogues(activation: str, layout: str) -> None:
    conv = Conv2d(1, 20, 9, 11, 20, 3, padding=1, groups=20, layout=layout, bias=True, residual=True, activation=activation)
    tensors = normal_tensors(conv)
    assert_close(conv, run(tiled(conv, NAME, ranked_tiles(conv, ROW, host())[0][1]), tensors), oracle(conv, **tensors), tolerance(conv))


@pytest.mark.sampled(10)
@pytest.mark.pairwise
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("channels", [2, 7, 16, 17, 33, 70])
@pytest.mark.parametrize(("kernel", "stride", "multiplier"), [(1, 1, 1), (2, 2, 1), (3, 1, 1), (3, 2, 2), (5, 2, 1), (7, 1, 3), (3, 3, 1)])
def test_default_tiles(kernel: int, stride: int, multiplier: int, channels: int, layout: str) -> None:
    conv = Conv2d(3, channels, 12, 13, channels * multiplier, kernel, stride, padding=kernel // 2, groups=channels, layout=layout)
    tensors = exact_tensors(conv)
    assert_equal(conv, run(tiled(conv, NAME, ranked_tiles(conv, ROW, host())[0][1]), tensors), oracle(conv, **tensors))


@pytest.mark.parametrize("key", ["n2-c6x9x11-k12x3x2-s2x1-p1-g6-bias-relu", "n1-c7x9x11-k7x3x3-p1-g7-NHWC-add"])
def test_definitions(key: str) -> None:
    """Each form of the definition alone, by TVM's default loops: the same convolution."""
    conv, tensors = Conv2d.parse(key), exact_tensors(Conv2d.parse(key))
    pack = ChannelPack(3)
    forms = [depthwise.channels(conv, pack)] if conv.layout == "NHWC" else [
        depthwise.channels_staged(conv, pack, 2), depthwise.windows(conv, ChannelPack(1), 2, 4)
    ]  # fmt: skip
    for one, arguments in zip((pack, ChannelPack(1)), forms, strict=False):
        kernel = tvm.compile(te.create_prim_func(arguments), llvm_target(host()))
        given = {**tensors, "filter": one.filter(conv, tensors["filter"])}
        if conv.bias:
            given["bias"] = one.bias(conv, tensors["bias"])
        y = tvm.runtime.tensor(np.full(conv.output_shape, np.nan, np.float32))
        kernel(*(tvm.runtime.tensor(array) for array in given.values()), y)
        assert_equal(conv, y.numpy(), oracle(conv, **tensors))


# --- the kernel's code


@pytest.mark.parametrize(
    ("key", "tile"),
    [
        ("n1-c64x30x30-k64x3x3-p1-g64-NHWC", replace(CHANNELS, vectors=2, cols=4)),
        ("n1-c64x30x30-k64x5x5-s2-p2-g64-NHWC", CHANNELS),
        ("n1-c4x30x30-k4x3x3-p1-g4", replace(WINDOWS, rows=2, row_block=30)),
    ],
)
def test_sums_live_in_registers(key: str, tile: DepthwiseTile) -> None:
    """Sums are SSA values, also in the tiles at the borders, and inputs and filters are loaded as vectors."""
    machine, conv = host(), Conv2d.parse(key)
    tile = replace(tile, lanes=machine.lanes) if tile.axis == "channels" else tile
    code = str(compile_module(lower(conv, ROW, tile, machine), machine).executable.mod.inspect_source("ll"))
    assert not re.search(r"alloca (\[\d+ x float\]|<)", code)
    assert "llvm.masked.gather" not in code and f"<{tile.lanes} x float>" in code


def test_inner_tiles() -> None:
    """Tiles that read beyond the sides are the first and the last, or every tile asks."""
    conv = Conv2d.parse("n1-c16x14x14-k16x3x3-p1-g16-NHWC")
    assert [inner_tiles(conv, replace(CHANNELS, cols=cols)) for cols in (1, 4, 5, 7, 14)] == [12, 2, 1, 0, 0]
    wide = Conv2d.parse("n1-c8x15x30-k8x3x3-p6-d6-g8-NHWC")
    assert inner_tiles(wide, replace(CHANNELS, cols=3)) == 0 and inner_tiles(wide, replace(CHANNELS, cols=8)) == 2


@pytest.mark.parametrize("key", ["n1-c16x12x14-k16x3x3-p1-g16", "n1-c8x12x14-k16x5x5-s2-p2-g8-NHWC", "n1-c16x12x14-k16x3x3-p1-g16-NHWC"])
def test_a_step_allocates_what_the_formula_says(key: str) -> None:
    conv = Conv2d.parse(key)
    for _, tile in ranked_tiles(conv, ROW, host())[:40:13]:
        named, _ = allocated(conv, NAME, tile)
        staged = {"pad", "turned", *(["rows"] if tile.axis == "channels" and conv.layout == "NCHW" else [])}
        assert sum(named.get(name, 0) for name in staged) <= staged_bytes(conv, tile), tile


def test_filters_are_packed_without_padding() -> None:
    conv, other = Conv2d.parse("n1-c12x9x11-k12x3x2-g12"), Conv2d.parse("n1-c13x9x11-k13x3x2-g13")
    for layer, runs in ((conv, (3, 6, 4)), (other, (1, 6, 13))):
        pack, tensors = ChannelPack(4), exact_tensors(layer)
        bias = np.arange(layer.out_channels, dtype=np.float32)
        packed, wide = pack.filter(layer, tensors["filter"]), pack.bias(layer, bias)
        assert packed.shape == pack.shape(layer) == runs and wide.shape == (pack.blocks(layer), runs[2])
        for (j, _, u, v), value in np.ndenumerate(tensors["filter"]):
            assert packed[j // runs[2], u * 2 + v, j % runs[2]] == value and wide[j // runs[2], j % runs[2]] == bias[j]
        assert codec.from_dict(codec.as_dict(pack)) == pack


# --- what it refuses, and when it is chosen

RULES = [
    (CHANNELS, {"axis": "rows"}, "`axis` (=rows) must be one of channels, windows"),
    (CHANNELS, {"lanes": 3}, "`lanes` (=3) must be one of"),
    (CHANNELS, {"cols": 0}, "`cols` (=0) must be at least 1"),
    (CHANNELS, {"lanes": 2}, "`lanes` (=2) must be at least 4, what shuffles can transpose to NCHW"),
    (CHANNELS, {"cols": 15}, "the tile's windows (=15) must fit the line (=14)"),
    (CHANNELS, {"row_block": 5}, "`row_block` (=5) must divide the output's rows (=12)"),
    (CHANNELS, {"row_block": 12, "rows": 5}, "`rows` (=5) must divide `row_block` (=12)"),
    (CHANNELS, {"pass_blocks": 3}, "`pass_blocks` (=3) must divide the channel blocks (=5)"),
    (CHANNELS, {"lanes": 8}, "the block (=8) must divide the output's channels (=20) of a padded copy"),
    (CHANNELS, {"vectors": 6}, "the block (=24) must be at most the output's channels (=20)"),
    (CHANNELS, {"vectors": 5, "cols": 7}, "sums and operands must fit the"),
    (WINDOWS, {"cols": 2}, "`cols` (=2) must be 1 with vectors of windows"),
    (WINDOWS, {"vectors": 3}, "the tile's windows (=24) must fit the line (=16)"),
    (WINDOWS, {"row_block": 13}, "`row_block` (=13) must be at most the output's rows (=12)"),
]


@pytest.mark.parametrize(("tile", "changes", "message"), RULES, ids=[row[2] for row in RULES])
def test_rules(tile: DepthwiseTile, changes: dict[str, Any], message: str) -> None:
    conv, tile = Conv2d.parse("n1-c20x12x14-k20x3x3-p1-g20"), replace(tile, **changes)
    assert any(message in broken for broken in violations(conv, tile, host()))
    with pytest.raises(TileError, match=re.escape(message)):
        lower(conv, ROW, tile, host())


def test_rules_of_channels_last() -> None:
    conv = Conv2d.parse("n1-c18x12x14-k18x3x3-p1-g18-NHWC")
    assert violations(conv, WINDOWS, host()) == ["vectors of windows need NCHW"]
    [broken] = violations(conv, CHANNELS, host())
    assert broken == "`pass_blocks` (=1) must be all 5 channel blocks where the last one is smaller"
    assert violations(conv, replace(CHANNELS, pass_blocks=5), host()) == []
    assert ROW.supports(conv) is None
    reason = "it is for depthwise layers, which have a group for every input channel"
    assert ROW.supports(Conv2d.parse("n1-c18x12x14-k18x3x3-p1-g9")) == reason


@pytest.mark.parametrize("layout", ["", "-NHWC"])
@pytest.mark.parametrize("key", ["n1-c32x112x112-k32x3x3-p1-g32", "n1-c576x14x14-k576x3x3-s2-p1-g576", "n1-c72x56x56-k72x5x5-s2-p2-g72"])
def test_the_model_chooses_it_for_mobile_networks(key: str, layout: str) -> None:
    assert default_tile(Conv2d.parse(key + layout), machine=host())[0] == NAME
