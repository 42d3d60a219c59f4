"""Register tiles live in registers: no memory pool behind them, and no spills where LLVM could see them."""

from __future__ import annotations

import pytest
from ops import host

from im2win.algorithms import ALGORITHMS
from im2win.codegen import compile_module, lower
from im2win.problem import Conv2d
from im2win.schedules.tile import Tile

POOL = "TVMBackendAllocWorkspace"


def source(key: str, tile: Tile, algorithm: str = "direct") -> str:
    conv = Conv2d.parse(key)
    return str(compile_module(lower(conv, ALGORITHMS[algorithm], tile, host()), host()).executable.mod.inspect_source("ll"))


def wide_tile(vectors: int, cols: int) -> Tile:
    lanes = host().lanes
    tile = Tile("channels", lanes, vectors, 1, cols, 2, 1, "cuv", 4)
    if tile.accumulators + tile.vectors + 1 > host().registers + 1:
        pytest.skip(f"{host().isa} has {host().registers} vector registers, too few for a tile of 1024 bytes with a rest")
    return tile


def test_a_tile_of_1024_bytes_takes_nothing_from_the_pool() -> None:
    """14 windows in tiles of 4 and a rest of 2: two tiles, each above TVM's limit for the stack or just below it."""
    tile = wide_tile(4, 4)
    assert tile.accumulators * tile.lanes * 4 >= 1024
    code = source(f"n1-c8x14x14-k{tile.block}x1x1-NHWC", tile)
    assert POOL not in code and "alloca" not in code, "every sum is a register, with no memory behind it"


def test_what_is_staged_still_comes_from_the_pool() -> None:
    tile = wide_tile(4, 4)
    assert POOL in source(f"n1-c64x14x14-k{tile.block}x3x3-p1", tile)
