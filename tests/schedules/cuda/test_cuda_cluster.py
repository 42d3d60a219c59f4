"""Thread blocks in clusters that copy parts of filters for each other: exact, in any order of blocks; a missing wait is found."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from emulated import Emulated, Kernel, Made, differences, expected, generated, goes_wrong, tiles, typed
from im2win.schedules.cuda.tile_scheduler.split_k import SplitTile
from oracle import exact_tensors

from im2win.codegen import cuda as cuda_codegen
from im2win.device.gpu import H200
from im2win.registry import cuda_lowering
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.kernels.persistent import grid
from im2win.schedules.cuda.legality.multistage import problems
from im2win.schedules.cuda.loaders.multicast import with_clusters
from im2win.schedules.cuda.tiles.multistage import CudaTile
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.spec.conv2d import Conv2d


def tile(product: str, channels: int, windows: int, order: str, *patch: int, cluster: int, stages: int = 3, slabs: int = 1,
         across: int = 1, outputs: int = 0) -> CudaTile:  # fmt: skip
    sizes = channels * across, windows, channels, windows
    return CudaTile(product, *sizes, slabs, stages, order, *patch, outputs=outputs, cluster=cluster)


def in_parts(one: CudaTile, parts: int) -> SplitTile:
    return SplitTile(**vars(one), split=parts)


EXACT: tuple[tuple[str, str, CudaTile, str], ...] = (
    ("n2-c40x8x16-k40x3x3-p1", "implicit_gemm/tiled", tile("wg_tf32x3", 24, 64, "uvc", cluster=4), "taps, two blocks along channels"),
    ("n4-c64x8x8-k72x3x3-p1-float16-NHWC-bias-relu", "implicit_gemm/tiled", tile("wg_f16", 40, 64, "uvc", cluster=2, stages=4), "halves"),
    ("n2-c64x9x16-k32x3x3-p1-float16", "direct/tiled", tile("wg_f16", 32, 64, "Cuvc", 1, 8, 8, cluster=2), "a patch, fetched"),
    ("n2-c128x8x8-k32x1x1-int8-NHWC", "implicit_gemm/tiled", tile("wg_s8", 32, 64, "uvc", cluster=2, slabs=2), "bytes, two steps"),
    ("n2-c36x8x16-k16x3x3-p1-g2-NHWC-relu6", "im2win/stored", tile("wg_tf32", 8, 64, "uvc", cluster=2), "groups, a stored tensor"),
    ("n1-c128x8x16-k24x3x3-p1", "implicit_gemm/split_k", in_parts(tile("wg_tf32x3", 24, 64, "uvc", cluster=2), 2), "parts of sums"),
    ("n1-c40x9x32-k40x3x3-p1", "winograd/tiled", tile("wg_tf32x3", 24, 64, "Cuvc", 1, 8, 8, cluster=4, outputs=2), "tiles of rows"),
    ("n2-c96x9x13-k64x3x3-p1-float16-NHWC-bias-add-relu", "winograd/tiled",
     tile("wg_f16", 64, 64, "Cuvc", 1, 8, 7, cluster=2, outputs=2, slabs=2), "tiles of rows, halves"),
)  # fmt: skip


@pytest.mark.parametrize(("key", "algorithm", "one"), [row[:3] for row in EXACT], ids=[row[3] for row in EXACT])
def test_outputs_are_exact(key: str, algorithm: str, one: CudaTile) -> None:
    conv, kernel = Conv2d.parse(key), (algorithm, one)
    assert backend_for(H200, "winograd").problems(conv, schedule_of(algorithm), one) == []
    tensors = typed(conv, exact_tensors(conv))
    right, emulated = expected(conv, tensors), Emulated(conv, [kernel])
    for seed in range(3):
        wrong = differences(conv, [kernel], emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


FEW = replace(H200, multiprocessors=6)  # so few that blocks of small problems stay
STAYING = {
    "two blocks along channels": ("n2-c64x19x21-k100x3x3-p1-float16-NHWC-bias", PersistentTile("wg_f16", 64, 3, 5, 1, 2, 2, 2)),
    "more blocks than patches": ("n1-c64x4x8-k64x3x3-p1-float16", PersistentTile("wg_f16", 64, 4, 8, 1, 2, 2, 4)),
    "bytes": ("n2-c64x19x21-k64x3x3-p1-int8-NHWC", PersistentTile("wg_s8", 64, 3, 5, 1, 2, 1, 4)),
}


def staying(conv: Conv2d, one: PersistentTile) -> Made:
    row = schedule_of("direct/persistent")
    return Made(str(one), cuda_codegen.generate_source(cuda_lowering.lower(conv, row, one, FEW), FEW), one.pack(conv))


@pytest.mark.parametrize("name", STAYING)
def test_blocks_that_stay_are_exact(name: str) -> None:
    conv, one = Conv2d.parse(STAYING[name][0]), STAYING[name][1]
    assert grid(conv, one, FEW) % (one.cluster * one.pack(conv).blocks(conv)) == 0
    tensors, kernel = typed(conv, exact_tensors(conv)), staying(conv, one)
    right, emulated = expected(conv, tensors), Emulated(conv, [kernel])
    for seed in range(2):
        wrong = differences(conv, [kernel], emulated(tensors, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


PIECES = ("cluster_barrier", "wait_releases", "release<", "start_releases<", "copy_shared<", "wait_bulk")


@pytest.mark.parametrize(
    ("kind", "what"), [*(("steps", what) for what in PIECES), *(("stays", PIECES[i]) for i in (0, 4, 5))]
)  # fmt: skip
def test_nothing_can_be_left_out(kind: str, what: str) -> None:
    """Without its barriers, its waits or what they count, a kernel gives another result for some order of threads, or is refused."""
    key, kernel = sabotaged(kind)
    call = re.compile(rf"im2win::{what.replace('<', '<[0-9]>')}\(")
    assert goes_wrong(Conv2d.parse(key), kernel, lambda source: call.sub("[](auto...) {}(", source), range(12))


def sabotaged(kind: str) -> tuple[str, Kernel | Made]:
    if kind == "stays":
        key, one = STAYING["bytes"]
        return key, staying(Conv2d.parse(key), one)
    return EXACT[1][0], (EXACT[1][1], EXACT[1][2])


def test_a_slot_is_given_back_behind_the_barrier() -> None:
    """Before it, threads of this block may still read what the cluster's next copies overwrite."""
    step, condition, given = r"__syncthreads\(\);((?:(?!__syncthreads).)*?)", r"(if \(v_\d+ < \d+\)) \{\s*", r"im2win::release<2>[^;]*;"
    given_back = re.compile(rf"{step}{condition}(if \([^{{]*\{{\s*{given}\s*\}})", re.DOTALL)

    def early(source: str) -> str:
        changed, count = given_back.subn(r"\2 { \3 } __syncthreads();\1\2 {", source)
        assert count
        return changed

    key, kernel = sabotaged("steps")
    assert goes_wrong(Conv2d.parse(key), kernel, early, range(24))


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ("n2-c64x8x16-k64x3x3-p1-float16", {"cluster": 3}, "`cluster` (=3) must be one of 1, 2, 4"),
        ("n2-c64x8x16-k64x3x3-p1-float16", {"cluster": 2, "product": "f16"}, "`cluster` (=2) must be 1 but for a warpgroup's `product`"),
        ("n3-c64x8x8-k64x3x3-p1-float16", {"cluster": 2}, "`cluster` (=2) must divide the 3 thread blocks along windows"),
        (
            "n4-c64x8x16-k64x3x3-p1-int8-NHWC",
            {"cluster": 4, "product": "wg_s8", "block_m": 16, "warp_m": 16, "slabs": 1},
            None,
        ),
    ],
)
def test_rules(key: str, changes: dict[str, object], message: str | None) -> None:
    conv, plan = Conv2d.parse(key), schedule_of("implicit_gemm/tiled").cuda
    assert plan is not None
    one = replace(tile("wg_f16", 64, 64, "uvc", cluster=1), **changes)  # type: ignore[arg-type]
    assert problems(conv, one, H200, plan) == ([message] if message else [])


def test_tiles_that_are_older_have_no_clusters() -> None:
    """Records and manifests of before lack the field: there a block is alone; and who is alone is recorded as ever."""
    for one in (EXACT[1][2], PersistentTile("wg_f16", 64, 3, 5, 1, 2, 2)):
        alone = replace(one, cluster=1)
        assert "cluster" not in alone.as_dict() and type(one).from_dict(alone.as_dict()) == alone
        shared = replace(one, cluster=2)
        assert shared.as_dict()["cluster"] == 2 and type(one).from_dict(shared.as_dict()) == shared
        with pytest.raises(ValueError, match="cluster"):
            type(one).from_dict({**alone.as_dict(), "cluster": True})


def test_kernels_say_how_many_blocks_a_cluster_has() -> None:
    conv = Conv2d.parse(EXACT[1][0])
    made = generated(conv, EXACT[1][1], EXACT[1][2])
    assert made.source.count("__cluster_dims__(2, 1, 1)") == 2  # declared and defined
    assert [launch.cluster for launch in made.launches] == [2]
    alone = generated(conv, EXACT[1][1], replace(EXACT[1][2], cluster=1))
    assert "cluster" not in alone.source.partition('extern "C"')[2] and [launch.cluster for launch in alone.launches] == [1]
    assert with_clusters(alone.source) == alone.source


def test_the_tuner_does_not_try_them() -> None:
    """Measured, they do not pay; a tile that says so has them all the same."""
    conv = Conv2d.parse("n128-c256x12x12-k512x3x3")
    assert {one.cluster for one in tiles(conv, "implicit_gemm/tiled", "wg_tf32x3")} == {1}
