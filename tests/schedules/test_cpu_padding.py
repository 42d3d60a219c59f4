"""Taps in the padding that CPU kernels leave out, and sums in chunks of channels: exact in every form, and refused where none is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from ops import host, run, sampled_tiles, tiled
from oracle import assert_equal, exact_tensors, oracle

from im2win.registry.cpu_lowering import lower
from im2win.registry.ranking import ranked_tiles
from im2win.registry.schedules import SCHEDULES, schedule_of
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", LAYERS, ids=LAYERS.values())
def test_exact(key: str, algorithm: str) -> None:
    conv = Conv2d.parse(key)
    assert skips(conv)
    tensors = exact_tensors(conv)
    expected = oracle(conv, **tensors)
    for tile in sampled_tiles(conv, algorithm, 1):
        divisors = [chunks for chunks in (2, 3, 4) if conv.in_channels // conv.groups % chunks == 0]
        for chunks in [tile.chunks, *divisors[:1]] if tile.axis == "channels" else [1]:
            assert_equal(conv, run(tiled(conv, algorithm, replace(tile, chunks=chunks)), tensors), expected)


@pytest.mark.parametrize("key", ["n1-c12x9x14-k32x3x3-p1-bias-relu", "n2-c12x9x14-k24x3x3-NHWC-add", "n1-c16x6x6-k20x1x1"])
def test_chunks_of_channels_are_exact_without_padding_too(key: str) -> None:
    conv = Conv2d.parse(key)
    tensors = exact_tensors(conv)
    expected = oracle(conv, **tensors)
    for algorithm, chunks in itertools.product(("direct/tiled", "im2win/fused"), (2, 4)):
        tile = next(tile for _, tile in ranked_tiles(conv, schedule_of(algorithm), host()) if tile.axis == "channels")
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
    assert _conditions(plain, "direct/tiled") == _conditions(plain, "im2win/fused") == 0


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
    long, short = Conv2d.parse("n1-c2048x28x28-k256x3x3-p24-d24"), Conv2d.parse("n1-c16x28x28-k64x3x3-p24-d24")
    for conv, offered in ((long, True), (short, False)):
        tiles = [tile for _, tile in ranked_tiles(conv, SCHEDULES["direct/tiled"], host())]
        assert any(tile.chunks > 1 for tile in tiles) == offered
        assert all("chunks" not in tile.as_dict() or tile.chunks > 1 for tile in tiles)
