"""K steps that load their inputs themselves: exact in every form, without a call or a symbol left, and refused where nothing is shared."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ops import host, run, tiled
from oracle import assert_equal, exact_tensors, oracle

from im2win.registry.cpu_lowering import lower
from im2win.registry.ranking import ranked_tiles
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d

LAYERS = {
    "n1-c8x9x13-k40x3x3-p1-bias-relu": "channels left over",
    "n2-c6x11x7-k32x3x3-p1-g2-NHWC-add": "both layouts, groups",
    "n1-c4x17x19-k16x5x5-s2-p2-bias": "strides",
    "n1-c4x12x9-k16x4x1-p2x0": "a column of taps",
    "n1-c4x9x12-k16x1x7-p0x3": "a row of taps",
    "n1-c8x14x14-k16x3x3-p6-d6": "much padding",
}
ALGORITHMS = ("direct/tiled", "im2win/stored", "im2win/fused", "mec/tiled", "mcfa/tiled")


def _tiles(conv: Conv2d, algorithm: str, padding: str = "multiplied") -> list[Any]:
    """The best tile of each axis, with inputs reloaded."""
    ranked = [tile for _, tile in ranked_tiles(conv, schedule_of(algorithm), host())]
    first = {tile.axis: tile for tile in reversed(ranked)}
    return [replace(tile, padding=padding, inputs="reloaded") for tile in first.values()]


def _skipping(conv: Conv2d, algorithm: str) -> list[Any]:
    """The best tile of each axis, and the best of channels with whole output rows, whose vectors fit any machine's registers."""
    tiles = _tiles(conv, algorithm, "skipped")
    [channels] = (tile for tile in tiles if tile.axis == "channels")
    return [*tiles, replace(channels, lanes=8, vectors=1, rows=1, cols=conv.output_size[1], pass_blocks=1)]


@pytest.mark.pairwise
@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", LAYERS, ids=LAYERS.values())
def test_exact(key: str, algorithm: str, turn: int) -> None:
    """Tiles of both axes as they are ranked, with another order of sums, and not unrolled, in turn."""
    conv = Conv2d.parse(key)
    tiles = [one for tile in _tiles(conv, algorithm) for one in (tile, replace(tile, order="cvu", unroll=4), replace(tile, unroll=1))]
    distinct = list(dict.fromkeys(tiles))
    tensors = exact_tensors(conv)
    assert_equal(conv, run(tiled(conv, algorithm, distinct[turn % len(distinct)]), tensors), oracle(conv, **tensors))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", ["n1-c8x9x13-k40x3x3-p1-bias-relu", "n1-c4x9x12-k16x1x7-p0x3"])
def test_exact_where_padding_is_skipped(key: str, algorithm: str) -> None:
    conv = Conv2d.parse(key)
    scheduler = schedule_of(algorithm).scheduler
    tiles = [tile for tile in _skipping(conv, algorithm) if not scheduler.violations(conv, tile, host())]
    assert tiles
    tensors = exact_tensors(conv)
    for tile in tiles:
        assert_equal(conv, run(tiled(conv, algorithm, tile), tensors), oracle(conv, **tensors))


@pytest.mark.parametrize("pass_blocks", [3, 6])
@pytest.mark.parametrize("algorithm", ["direct/tiled", "im2win/fused", "mcfa/tiled"])
def test_a_pass_of_parts_of_groups(algorithm: str, pass_blocks: int) -> None:
    """The staged rows of such a pass have as many channels as the groups that it meets: a number that differs from pass to pass."""
    conv = Conv2d.parse("n1-c12x9x10-k96x3x3-s2-p1-g3-NHWC-bias")
    tile = next(tile for tile in _tiles(conv, algorithm) if tile.axis == "channels")
    parts = replace(tile, lanes=8, vectors=1, rows=1, cols=min(tile.cols, 5), pass_blocks=pass_blocks)
    assert not schedule_of(algorithm).scheduler.violations(conv, parts, host())
    tensors = exact_tensors(conv)
    assert_equal(conv, run(tiled(conv, algorithm, parts), tensors), oracle(conv, **tensors))


@pytest.mark.parametrize(
    ("key", "padding", "products"),
    [
        ("n1-c64x14x14-k64x3x3-p1", "multiplied", 1),
        ("n1-c64x14x12-k64x3x3-p1", "skipped", 1),
        ("n1-c64x14x14-k64x3x3-p6-d6", "multiplied", 2),  # one for taps that lie inside for all windows, one for some of them
    ],
)
def test_every_step_begins_with_a_fence_that_is_no_instruction(key: str, padding: str, products: int, tmp_path: Path) -> None:
    conv = Conv2d.parse(key)
    tiles = _skipping(conv, "direct/tiled") if padding == "skipped" else _tiles(conv, "direct/tiled", padding)
    tile = next(tile for tile in reversed(tiles) if tile.axis == "channels")
    assert lower(conv, schedule_of("direct/tiled"), tile, host()).script().count("im2win_fence") == products
    library = tiled(conv, "direct/tiled", tile).export(tmp_path / "kernel.so")
    assert "im2win_fence" not in subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout


def test_what_refuses_to_reload() -> None:
    tile = _tiles(Conv2d.parse("n1-c12x14x14-k64x3x3-p1"), "direct/tiled")[0]

    def rules(key: str, algorithm: str, **changes: Any) -> list[str]:
        broken: list[str] = schedule_of(algorithm).scheduler.violations(Conv2d.parse(key), replace(tile, **changes), host())
        return broken

    assert rules("n1-c12x14x14-k64x3x3-p1", "direct/tiled") == []
    assert rules("n1-c12x14x14-k64x3x3-p1", "direct/tiled", inputs="kept") == ["`inputs` (=kept) must be one of shared, reloaded"]
    assert "`inputs` must be shared" in str(rules("n1-c12x14x14-k64x3x3-p1", "im2col/tiled"))
    assert "`inputs` must be shared" in str(rules("n1-c12x14x14-k64x1x1", "direct/tiled"))


def test_the_space_offers_both() -> None:
    conv = Conv2d.parse("n1-c64x14x14-k64x3x3-p1")
    tiles = [tile for _, tile in ranked_tiles(conv, schedule_of("direct/tiled"), host())]
    assert {tile.inputs for tile in tiles} == {"shared", "reloaded"}
    assert all("inputs" not in tile.as_dict() or tile.inputs == "reloaded" for tile in tiles)
