"""What tiles say of themselves to the tuner's cost model: a backend reads every number of it."""

from __future__ import annotations

import pytest
from ops import host

from im2win.device.gpu import H200
from im2win.registry import cpu_backend, cuda_backend
from im2win.registry.backends import Device, backend_for
from im2win.registry.schedules import candidates
from im2win.spec.conv2d import Conv2d

LAYERS = [
    "n1-c64x14x14-k64x3x3-p1", "n4-c64x28x28-k96x3x3-s2-p1-float16", "n32-c64x28x28-k64x1x1-float16-NHWC", "n8-c32x28x28-k32x3x3-p1-g32",
]  # fmt: skip


@pytest.mark.parametrize(("device", "read"), [(host(), cpu_backend.TILE_FEATURES), (H200, cuda_backend.TILE_FEATURES)], ids=["cpu", "cuda"])
def test_a_backend_reads_all_that_tiles_say(device: Device, read: tuple[str, ...]) -> None:
    backend, said = backend_for(device), set()
    for conv in (conv for conv in map(Conv2d.parse, LAYERS) if conv.dtype == "float32" or device is H200):
        for row in candidates("auto", conv, backend.target):
            tiles = [tile for _, tile in backend.ranked(conv, row)]
            values: dict[str, set[float]] = {}
            for tile in tiles:
                for name, value in tile.features().items():
                    values.setdefault(name, set()).add(value)
            said |= {name for name, seen in values.items() if len(seen) > 1 or name in read}  # a model learns from what differs
            assert len({len(backend.features(conv, row, tile, 1.0)) for tile in (tiles[0], tiles[-1])}) == 1
    assert said <= set(read) and len(set(read)) == len(read)
