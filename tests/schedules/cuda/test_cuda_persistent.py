"""Kernels whose blocks stay: exact on the emulator, wrong without any of their barriers, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulated import Emulated, Made, differences, expected, goes_wrong, typed
from oracle import exact_tensors

from im2win.codegen import cuda as cuda_codegen
from im2win.device.gpu import H200
from im2win.emulator import TensorMap
from im2win.packing import codec as packs
from im2win.registry import cuda_lowering
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.legality.persistent import unsupported_reason, violations
from im2win.schedules.cuda.space.persistent import output_tiles, space
from im2win.schedules.cuda.tile_scheduler.persistent import resident_grid
from im2win.schedules.cuda.tiles.persistent import HaloTile, PersistentTile
from im2win.spec.conv2d import Conv2d

ROW = schedule_of("direct/persistent")
SMALL = replace(H200, multiprocessors=3)  # so few that blocks of small problems stay
GOOD = PersistentTile("wg_f16", 64, 3, 5, 1, 2, 2)


def tile(*numbers: int, product: str = "wg_f16") -> PersistentTile:
    return PersistentTile(product, *numbers)


def made(conv: Conv2d, one: PersistentTile) -> Made:
    assert ROW.cuda is not None and violations(conv, one, SMALL) == []
    source = cuda_codegen.generate_source(cuda_lowering.lower(conv, ROW, one, SMALL), SMALL)
    return Made(str(one), source, one.pack(conv))


EXACT = {
    "one tile for each warpgroup": ("n1-c16x9x11-k64x3x3-p1-float16-NHWC", tile(64, 3, 5, 1, 2, 2)),
    "tiles in turn, two steps, an epilogue": ("n2-c64x19x21-k64x3x3-p1-float16-NHWC-bias-relu", tile(64, 3, 5, 1, 3, 2)),
    "128 bytes of a pixel, blocks of channels": ("n2-c64x19x21-k100x3x3-p1-float16-NHWC-bias-add", tile(64, 3, 5, 2, 2, 1)),
    "a stride: a plane for every parity": ("n2-c64x19x21-k100x3x3-p1-float16-NHWC-s2", tile(128, 4, 4, 1, 2, 2)),
    "channels left over, two to a thread": ("n2-c40x9x24-k70x3x3-p1-float16", tile(128, 4, 8, 1, 2, 2)),
    "64 channels a step, channels first": ("n2-c40x9x24-k70x3x3-p1-float16", tile(128, 3, 16, 2, 2, 1)),
    "a stride, channels first": ("n2-c40x20x24-k64x3x3-p1-float16-s2-bias", tile(64, 4, 4, 1, 2, 2)),
    "taps apart, channels first": ("n2-c40x12x24-k64x3x3-p2-float16-d2-bias-relu", tile(64, 4, 8, 1, 2, 2)),
    "one tap": ("n3-c64x13x14-k64x1x1-float16-NHWC-s2", tile(64, 3, 7, 1, 2, 3)),
    "bfloat16, a stride": ("n2-c64x19x21-k100x3x3-p1-bfloat16-NHWC-s2", tile(128, 4, 4, 1, 2, 2, product="wg_bf16")),
    "bfloat16, channels first": ("n2-c40x9x24-k70x3x3-p1-bfloat16-bias-relu", tile(128, 4, 8, 1, 2, 2, product="wg_bf16")),
    "an odd number of channels": ("n1-c8x6x8-k33x3x3-float16-NHWC", tile(64, 2, 6, 1, 2, 1)),
    "integers": ("n2-c64x19x21-k64x3x3-p1-int8-NHWC-bias", tile(64, 3, 5, 1, 2, 2, product="wg_s8")),
    "integers, channels first": ("n2-c72x9x48-k70x3x3-p1-int8", tile(128, 3, 16, 1, 2, 1, product="wg_s8")),
    "integers of one tap, 128 channels a step": ("n3-c130x5x32-k64x1x1-int8-bias", tile(64, 3, 16, 2, 2, 3, product="wg_s8")),
    "integers and a stride, channels first": ("n2-c40x20x32-k64x3x3-p1-int8-s2", tile(64, 4, 8, 1, 2, 2, product="wg_s8")),
    "integers and a stride of rows, taps apart": ("n1-c64x19x48-k64x3x5-p2-int8-s2x1-d2", tile(64, 3, 16, 1, 2, 2, product="wg_s8")),
    "int8 to int8, channels first": ("n2-c64x9x48-k64x3x3-p1-int8-out.int8-bias-relu", tile(64, 3, 16, 1, 2, 2, product="wg_s8")),
    "int8 to int8, eights of a channel, then of two": ("n2-c64x5x96-k70x3x3-p1-int8-out.int8", tile(128, 1, 48, 1, 2, 1, product="wg_s8")),
    "int8 to int8, a tile that reaches out": ("n1-c64x3x96-k64x1x1-int8-out.int8-relu", tile(64, 2, 80, 1, 2, 2, product="wg_s8")),
    "four channels' columns exchanged, rows begin within eight": ("n2-c40x9x56-k70x3x3-p1-float16-bias-relu", tile(128, 3, 40, 1, 2, 1)),
    "the same, of int8, and tiles that reach out": ("n2-c64x9x48-k64x3x3-p1-int8-out.float16", tile(64, 4, 32, 1, 2, 2, product="wg_s8")),
    "rows of one tap, one eight left over": ("n1-c40x5x56-k64x1x1-float16", tile(64, 2, 24, 1, 2, 2)),
    "int8 to int8, rows that are not whole eights": ("n1-c64x5x48-k64x3x3-int8-out.int8", tile(64, 2, 16, 1, 2, 1, product="wg_s8")),
    "four channels a group, 16 groups of a block": ("n2-c128x9x11-k128x3x3-p1-g32-float16-NHWC-bias-relu", tile(64, 3, 5, 1, 2, 2)),
    "32 groups of a block, steps of 128 bytes": ("n2-c128x9x11-k128x1x3-p0.1.0.1-g32-float16-NHWC", tile(128, 3, 5, 2, 2, 1)),
    "as many filters as a block, a stride": ("n1-c128x9x11-k128x3x3-p1-g2-bfloat16-NHWC-s2", tile(64, 2, 3, 2, 2, 1, product="wg_bf16")),
    "half of a group in a block": ("n1-c128x6x7-k256x3x3-p1-g2-float16-NHWC-add", tile(64, 3, 5, 1, 2, 2)),
    "all groups in a block that they do not fill": ("n1-c48x6x7-k48x3x3-p1-g3-float16-NHWC", tile(64, 3, 5, 1, 2, 2)),
    "twice as many filters as channels": ("n1-c64x6x7-k128x3x3-p1-g16-float16-NHWC", tile(64, 3, 5, 1, 2, 2)),
    "groups, channels first": ("n2-c128x6x16-k128x3x3-p1-g16-float16-bias", tile(64, 3, 8, 1, 2, 2)),
    "groups of integers": ("n1-c128x6x7-k128x3x3-p1-g8-int8-NHWC", tile(64, 3, 5, 1, 2, 2, product="wg_s8")),
    "the last block has fewer groups": ("n1-c96x6x7-k96x1x1-g24-float16-NHWC", tile(64, 3, 5, 1, 2, 2)),
    "strides and taps that differ": ("n1-c16x29x31-k64x5x3-p0.2.1.0-float16-NHWC-s2x3-d2", tile(64, 3, 4, 1, 2, 2)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXACT)
def test_outputs_are_exact(name: str) -> None:
    key, one = EXACT[name]
    conv = Conv2d.parse(key)
    tensors, kernel = typed(conv, exact_tensors(conv)), made(conv, one)
    right, emulated = expected(conv, tensors), Emulated(conv, [kernel])
    for seed in range(2):
        wrong = differences(conv, [kernel], emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


LAST = "n2-c64x12x16-k64x3x3-p1-float16-NHWC"
FIRST = "n2-c64x12x16-k64x3x3-p1-float16"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("key", "what"),
    [
        (LAST, "group_barrier"), (LAST, "wait_full_barrier"), (LAST, "wait_products<0>"),
        (FIRST, "group_barrier"), (FIRST, "wait_full_barrier"), (FIRST, "expect_bytes"),
    ],
)  # fmt: skip
def test_nothing_can_be_left_out(key: str, what: str) -> None:
    """Without its barriers, its waits or what they count, a kernel gives another result for some order of threads, or is refused."""
    conv = Conv2d.parse(key)
    kernel = made(conv, tile(64, 3, 8, 1, 2, 2))
    assert goes_wrong(conv, kernel, lambda source: source.replace(f"im2win::{what}(", "[](auto...) {}("), range(6))


def test_boxes() -> None:
    """What the driver is asked for: the innermost axis first, strides in bytes, zeros around the tensor."""
    conv = Conv2d.parse("n2-c64x19x21-k64x3x3-p1-float16-NHWC")
    [box] = [one for one in made(conv, GOOD).generated.launches[0].arguments if isinstance(one, TensorMap)]
    assert box == TensorMap("data", (64, 21, 19, 2), (2, 128, 2688, 51072), (32, 7, 5, 1), (1, 1, 1, 1), 64)
    first = Conv2d.parse("n2-c64x19x24-k64x3x3-p1-float16")
    [box] = [one for one in made(first, tile(64, 3, 8, 1, 2, 2)).generated.launches[0].arguments if isinstance(one, TensorMap)]
    assert box.sizes == (24, 19, 64, 2) and box.box == (24, 5, 32, 1) and box.swizzle == 0


def test_a_patch_in_shared_memory() -> None:
    conv = Conv2d.parse("n1-c64x56x56-k64x3x3-p1-float16-NHWC")
    field = HaloTile(conv, tile(64, 4, 56, 1, 2, 2))
    assert (field.pitch, field.lines, field.pixels, field.columns) == (58, 6, 348, 232)
    assert field.output_tiles == 14 and [field.shift(1, 2), field.shift(0, 1)] == [60, 1]
    strided = HaloTile(conv.with_(stride=2), tile(64, 4, 14, 1, 2, 2))
    assert (strided.planes, strided.pitch, strided.lines, strided.plane) == ((2, 2), 15, 5, 80)
    assert [strided.shift(u, v) for u, v in ((0, 1), (1, 0), (2, 2))] == [80, 160, 16]
    one = tile(64, 4, 56, 1, 2, 2)
    assert resident_grid(conv, one, H200) == 7 and resident_grid(conv.with_(batch=99), one, H200) == 132


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (LAST, {"product": "wg_s8"}, "`product` (=wg_s8) must be wg_f16 for float16"),
        (LAST, {"block_m": 96}, "`block_m` (=96) must be a multiple of 64"),
        (LAST, {"block_m": 128}, "`block_m` (=128) must hold less than 64 channels beyond 64"),
        (LAST, {"rows": 13}, "`rows` (=13) must be 1 to the output's 12"),
        (LAST, {"cols": 0}, "`cols` (=0) must be 1 to the output's 16"),
        (LAST, {"slabs": 3}, "`slabs` (=3) must be one of 1, 2"),
        (LAST, {"stages": 1}, "`stages` (=1) must be at least 2"),
        (LAST, {"groups": 0}, "`groups` (=0) must be at least 1"),
        (LAST, {"groups": 5}, "the block's 640 threads must be at most 512"),
        ("n1-c64x56x56-k64x3x3-p1-float16-NHWC", {"rows": 5, "cols": 56}, "columns must be at most 256"),
        ("n1-c128x16x16-k64x3x3-p1-float16-NHWC", {"stages": 4, "rows": 12, "cols": 16}, "all filters among them, must be at most 232448"),
        ("n1-c192x9x9-k192x1x1-g2-float16-NHWC", {}, "`block_m` (=64) must hold whole groups of 96 filters, or a part of one"),
        ("n1-c96x9x9-k192x3x3-g6-float16-NHWC", {"slabs": 2}, "must cut the 32 input channels of a block's groups into whole steps of 64"),
        (FIRST, {"stages": 3, "cols": 8}, "`stages` (=3) must be 2, channels first"),
        (FIRST, {}, "`cols` (=5) times the stride must be a multiple of 8"),
    ],
)
def test_rules(key: str, change: dict[str, object], message: str) -> None:
    found = violations(Conv2d.parse(key), replace(GOOD, **change), H200)  # type: ignore[arg-type]
    assert any(message in one for one in found), found


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("n1-c64x9x9-k64x3x3", "multiply float16 or bfloat16 or int8, not float32"),
        ("n1-c64x9x9-k64x3x3-g64-float16-NHWC", "depthwise layers have a schedule of their own"),
        ("n1-c336x9x9-k336x3x3-g3-float16-NHWC", "in whole steps of 64 bytes"),
        ("n1-c12x9x9-k64x3x3-float16-NHWC", "must be a multiple of 16 bytes, as TMA boxes need, not 24"),
        ("n1-c16x64x64-k64x16x16-s16-float16-NHWC", "TMA boxes bring every 8th pixel at the least, not every 16th"),
        ("n1-c64x9x9-k64x3x3-float16", "an input row must be a multiple of 16 bytes"),
        ("n1-c512x14x14-k64x3x3-p1-float16-NHWC", "bytes of shared memory, more than 232448"),
        ("n1-c64x8x8-k64x3x3-float16", "tiles of outputs are at least 8 outputs wide, more than 6"),
        ("n1-c64x16x24-k64x3x3-int8", "an input row must be a multiple of 16 bytes"),
        ("n1-c64x16x16-k64x3x3-int8", "tiles of outputs are at least 16 outputs wide, more than 14"),
    ],
)
def test_what_it_cannot_compute(key: str, reason: str) -> None:
    conv = Conv2d.parse(key)
    assert reason in str(unsupported_reason(conv)) and reason in str(ROW.supports(conv, "cuda"))
    assert space(conv, H200) == []


def test_the_space() -> None:
    """Legal tiles only; halo tiles that divide the output first; tiles, packs and accuracy come back from plain values."""
    conv = Conv2d.parse("n16-c64x224x224-k64x3x3-p1-float16-NHWC")
    found = space(conv, H200)
    assert len(found) > 50 and all(violations(conv, one, H200) == [] for one in found) and output_tiles(conv, 256)[0] == (4, 56)
    backend = backend_for(H200, "exact")
    assert backend.tile(ROW, found[0].as_dict()) == found[0] and backend.accuracy(found[0]) == "exact"
    pack = backend.pack(conv, ROW, found[0])
    assert packs.from_dict(packs.as_dict(pack)) == pack and pack.shape(conv)[1:] == (18, 2048)
    cost, best = backend.ranked(conv, ROW)[0]
    assert best.groups == 2 and 50e-6 < cost < 150e-6 and backend.proven(conv, best)
    with pytest.raises(ValueError, match="must be of type int"):
        PersistentTile.from_dict(found[0].as_dict() | {"rows": True})


def test_filters_are_packed_as_products_read_them() -> None:
    """[blocks, steps * taps, 16 bytes of a step, channel]: with two to a thread, rows g and g + 8 are neighbours."""
    conv = Conv2d.parse("n1-c40x8x8-k80x3x3-float16-NHWC")
    w = np.arange(80 * 40 * 9, dtype=np.float32).reshape(80, 40, 3, 3).astype(np.float16)
    packed = tile(64, 3, 5, 1, 2, 1).pack(conv).filter(conv, w).reshape(2, 2, 9, 4, 64, 8)
    assert (packed[0, 0, 4, 1, 3] == w[6, 8:16, 1, 1]).all() and (packed[0, 0, 4, 1, 11] == w[7, 8:16, 1, 1]).all()
    assert (packed[0, 1, 0, 0, 0] == w[0, 32:40, 0, 0]).all() and not packed[0, 1, 0, 1:].any() and not packed[1, :, :, :, 16:].any()


def test_short_runs_of_bytes_cost() -> None:
    """Channels first, a tile narrower than the map is stored in a run of bytes for each of its rows; 32 bytes are a sector."""
    backend, conv = backend_for(H200), Conv2d.parse("n32-c64x56x56-k256x1x1-float16")

    def seconds(layout: str, rows: int, cols: int) -> float:
        return backend.cost(replace(conv, layout=layout), ROW, tile(256, rows, cols, 1, 2, 2))

    assert seconds("NCHW", 1, 56) < 0.7 * seconds("NCHW", 4, 8), "whole rows of the map"
    assert seconds("NHWC", 4, 8) < 0.7 * seconds("NCHW", 4, 8), "all channels of a pixel are one run"
