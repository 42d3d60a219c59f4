"""Register tiles live in registers: no memory pool behind them, and no spills where LLVM could see them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from ops import host
from tvm import tirx

from im2win.codegen.llvm import compile_module
from im2win.registry.cpu_lowering import lower
from im2win.registry.schedules import schedule_of
from im2win.schedules.cpu.loop_peeling import _likely
from im2win.schedules.cpu.tile import Tile
from im2win.spec.conv2d import Conv2d


def source(key: str, tile: Tile) -> str:
    conv = Conv2d.parse(key)
    row = schedule_of("direct/tiled")
    return str(compile_module(lower(conv, row, tile, host()), host()).executable.mod.inspect_source("ll"))


def from_the_pool(code: str) -> int:
    """How often the code names the function that takes memory from TVM's pool."""
    return code.count("TVMBackendAllocWorkspace")


def wide_tile(vectors: int, cols: int) -> Tile:
    tile = Tile("channels", host().lanes, vectors, 1, cols, 2, 1, "cuv", 4)
    if tile.accumulators + tile.vectors + 1 > host().registers + 1:
        pytest.skip(f"{host().isa} has {host().registers} vector registers, too few for a tile of 1024 bytes")
    return tile


def test_a_tile_of_1024_bytes_takes_nothing_from_the_pool() -> None:
    """14 windows in tiles of 4 and a rest of 2: the whole tile is above TVM's limit for the stack, one of a single vector below it."""
    wide, narrow = wide_tile(4, 4), wide_tile(1, 4)
    assert wide.accumulators * wide.lanes * 4 >= 1024 > narrow.accumulators * narrow.lanes * 4
    code = source(f"n1-c8x14x14-k{wide.block}x1x1-NHWC", wide)
    assert from_the_pool(code) == from_the_pool(source(f"n1-c8x14x14-k{narrow.block}x1x1-NHWC", narrow))
    assert not re.search(r"alloca (\[\d+ x float\]|<)", code), "every sum is a register, with no memory behind it"


def test_each_condition_of_a_predicate_is_cut_by_itself() -> None:
    """`likely(a and b)` would cut none."""
    i, j = (tirx.Var(name, "int32") for name in "ij")
    marked = str(_likely(tirx.And(tirx.And(i < 3, j < 4), i < j)))
    assert marked.count("likely(") == 3 and not re.search(r"likely\([^()]*and", marked), marked


@pytest.mark.parametrize("registers", [16, 32])
def test_tiles_fill_the_registers_and_no_more(registers: int) -> None:
    """Sums, a step of the vector operand, and one register for a broadcast, which an instruction may read from memory."""
    conv, machine = Conv2d.parse("n1-c8x40x40-k16x3x3-NHWC"), replace(host(), registers=registers, lanes=8)
    for cols in range(registers - 4, registers + 12):
        found = schedule_of("direct/tiled").scheduler.violations(conv, Tile("channels", 8, 1, 1, cols, 1, 1, "cuv", 4), machine)
        assert any("registers" in reason for reason in found) == (cols + 2 > registers + 1), cols


def test_what_is_staged_still_comes_from_the_pool() -> None:
    tile = wide_tile(4, 4)
    bare, padded = (source(f"n1-c64x14x14-k{tile.block}x3x3{end}-NHWC", tile) for end in ("", "-p1"))
    assert from_the_pool(padded) > from_the_pool(bare)
