"""The search space of Winograd on tensor cores: the legal tiles of partial kernel fusion's design space."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from im2win.device.gpu import Gpu
from im2win.schedules.studies.winograd_tc.legality import forms_of, violations
from im2win.schedules.studies.winograd_tc.tile import ARITHMETIC, FRAGMENTS, TensorCoreTile
from im2win.spec.conv2d import Conv2d

BLOCKS_M, BLOCKS_N, BLOCKS_K = (16, 32, 64), (16, 32, 64, 128), (16, 32, 64)
WAVES = (0, 16, 32)
FUSED = (("sync_free", "shmem", 0), *(("sync_free", "llc", wave) for wave in WAVES), ("sync_free", "none", 0), ("bgemm", "none", 0),
         *(("bgemm", "llc", wave) for wave in WAVES))  # fmt: skip
GROUPS = {2: (1, 2, 4), 4: (1, 2)}  # rows of a tile at a time, by outputs along its side
MAX_WASTE = 1.35  # most filters that blocks compute, over the fewest that any block size computes


def _tiles(conv: Conv2d) -> Iterator[TensorCoreTile]:
    for outputs, block, (mapping, fusion, wave), fragment in itertools.product(
        forms_of(conv), itertools.product(BLOCKS_M, BLOCKS_N, BLOCKS_K), FUSED, FRAGMENTS
    ):
        for groups in GROUPS[outputs] if mapping == "sync_free" else (1,):
            yield TensorCoreTile(outputs, *block, fragment, mapping, fusion, wave, ARITHMETIC[conv.dtype], groups)


def space(conv: Conv2d, gpu: Gpu) -> list[TensorCoreTile]:
    """Every legal tile worth a trial, in a fixed order."""

    def wasteful(tile: TensorCoreTile) -> bool:
        filters = tile.pack(conv).blocks(conv) * tile.block_n
        return filters > max(MAX_WASTE * conv.out_channels, -(-conv.out_channels // 16) * 16)

    return [tile for tile in _tiles(conv) if not violations(conv, tile, gpu) and not wasteful(tile)]
