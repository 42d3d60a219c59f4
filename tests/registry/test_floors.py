"""Floors of schedules: no tile costs less, and what is passed over because of them never held the best tile."""

from __future__ import annotations

import pytest

from im2win.device.gpu import H200
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile, first_of
from im2win.registry.schedules import candidates
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

LAYERS: list[tuple[str, Accuracy]] = [
    ("n1-c64x14x14-k64x3x3-p1", "float32"),  # small: latencies decide, and split-K is far ahead
    ("n1-c64x14x14-k64x3x3-p1", "exact"),  # on CUDA cores
    ("n1-c64x14x14-k64x3x3-p1", "tf32"),
    ("n8-c32x28x28-k64x3x3-p1", "float32"),
    ("n2-c3x64x64-k32x3x3-s2-p1", "float32"),  # few channels: channel planes
    ("n1-c8x33x33-k16x5x5-p2-NHWC", "float32"),  # Winograd with two sizes of tiles
    ("n32-c64x28x28-k64x1x1-float16-NHWC", "float32"),  # memory decides
    ("n32-c64x28x28-k64x3x3-p1-float16-NHWC", "float32"),  # the instructions of the products decide
    ("n4-c64x28x28-k96x3x3-s2-p1-float16-NCHW", "float32"),
    ("n32-c256x56x56-k512x1x1-s2-float16", "float32"),  # rows that no kernel need read
    ("n32-c64x28x28-k64x3x3-p1-float16-NHWC", "winograd"),
    ("n8-c64x14x14-k128x3x3-p1-int8-NHWC", "float32"),
    ("n4-c64x28x28-k64x3x3-p1-g4", "float32"),
    ("n2-c32x28x28-k32x3x3-p1-g32-float16-NHWC", "float32"),  # depthwise
]


@pytest.mark.parametrize(("key", "accuracy"), LAYERS)
def test_no_tile_costs_less_than_the_floor(key: str, accuracy: Accuracy) -> None:
    """The whole space of every schedule; and the default tile is the first of all spaces together."""
    conv, backend = Conv2d.parse(key), backend_for(H200, accuracy)
    spaces = {row.key: backend.ranked(conv, row) for row in candidates("auto", conv, "cuda", accuracy)}
    for row in candidates("auto", conv, "cuda", accuracy):
        floor = backend.floor(conv, row)
        assert floor >= 0 and all(cost >= floor for cost, _ in spaces[row.key]), row.key
    best = first_of(conv, spaces, backend)
    assert best is not None and default_tile(conv, "auto", H200, accuracy) == best[1:]


def test_floors_pass_over_schedules() -> None:
    """A layer that memory decides: what stores its windows first is above what does not."""
    conv, backend = Conv2d.parse("n32-c64x56x56-k64x3x3-p1-float16-NHWC"), backend_for(H200)
    floors = {row.key: backend.floor(conv, row) for row in candidates("auto", conv, "cuda")}
    best = backend.ranked(conv, next(row for row in candidates("direct/warp_specialized", conv, "cuda")))[0][0]
    assert all(floors[name] > best for name in ("im2win/stored", "im2col/tiled", "mec/tiled", "mcfa/tiled"))
