"""What CUDA kernels wait for, they need: without any one barrier or wait for copies, some order of their threads gives another result.

The emulator runs the threads of a block in an order drawn from a seed; asynchronous copies land at once or when they are waited for. Shared
memory starts as NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import emulated
import pytest
from emulated import MARK, Kernel, generated

from im2win.schedules.cuda.tiles.multistage import CudaTile
from im2win.spec.conv2d import Conv2d

SEEDS = range(12)
BARRIER = "__syncthreads();"
WAIT = re.compile(r"im2win::wait_copies<(\d+)>\(\);")

# One kernel of each kind: two warps down and two across, more steps than stages, and patches of more chunks than are held at a time.
# In order: what each barrier is for.
TABLE, OFFSETS, STEP, PIXELS, OUTPUTS = (
    "the table of taps is filled by all",
    "the offsets of pixels are filled by all",
    "copies of a step have landed for all",
    "the pixels of tiles are loaded by all",
    "the outputs of tiles are made by all",
)
KERNELS: dict[str, tuple[str, Kernel, tuple[str, ...]]] = {
    "gather, fma": (
        "n1-c20x5x6-k32x3x3-p1", ("implicit_gemm", CudaTile("fma", 32, 32, 16, 16, 1, 3, "uvc")), (TABLE, STEP),
    ),
    "gather, tensor cores": (
        "n1-c20x5x6-k32x3x3-p1-float16-NHWC", ("implicit_gemm", CudaTile("f16", 32, 32, 16, 16, 1, 3, "uvc")), (TABLE, STEP),
    ),
    "gather without a table": (
        "n1-c32x5x6-k32x3x3-p1-float16-NHWC", ("implicit_gemm", CudaTile("f16", 32, 32, 16, 16, 1, 2, "uvc")), (STEP,),
    ),
    "gather fetched": (
        "n1-c20x5x6-k32x3x3-p1-float16", ("implicit_gemm", CudaTile("f16", 32, 32, 16, 16, 1, 3, "uvc")), (TABLE, STEP),
    ),
    "patch, fma": (
        "n1-c60x5x6-k32x3x3-p1", ("direct", CudaTile("fma", 32, 32, 16, 16, 1, 3, "Cuvc", 1, 5, 6)), (OFFSETS, STEP),
    ),
    "patch, tensor cores": (
        "n1-c60x5x6-k32x3x3-p1-NHWC", ("im2win_fused", CudaTile("tf32x3", 32, 32, 16, 16, 1, 2, "Cuvc", 1, 5, 6)), (OFFSETS, STEP),
    ),
    "patch fetched": (
        "n1-c100x5x6-k32x3x3-p1-float16", ("direct", CudaTile("f16", 32, 32, 16, 16, 1, 3, "Cuvc", 1, 5, 6)), (OFFSETS, STEP),
    ),
    "warpgroups, gather": (
        "n1-c20x5x6-k32x3x3-p1", ("implicit_gemm", CudaTile("wg_tf32", 32, 128, 16, 64, 2, 3, "uvc")), (TABLE, STEP),
    ),
    "warpgroups, slabs in turn": (
        "n1-c64x5x6-k32x3x3-p1-float16-NHWC", ("implicit_gemm", CudaTile("wg_f16", 32, 64, 16, 64, 1, 4, "uvc")), (STEP, STEP),
    ),
    "warpgroups, patch": (
        "n1-c60x5x6-k32x3x3-p1", ("direct", CudaTile("wg_tf32x3", 32, 64, 16, 64, 1, 3, "Cuvc", 1, 5, 6)), (OFFSETS, STEP, STEP),
    ),
    "warpgroups, patch fetched": (
        "n1-c100x5x6-k32x3x3-p1-float16", ("direct", CudaTile("wg_f16", 32, 64, 32, 64, 2, 3, "Cuvc", 1, 5, 6)), (OFFSETS, STEP),
    ),
    "warpgroups, tiles of rows": (
        "n1-c60x5x6-k32x3x3-p1", ("winograd", CudaTile("wg_tf32x3", 32, 64, 16, 64, 1, 3, "Cuvc", 1, 5, 3, outputs=2)),
        (OFFSETS, STEP, STEP),
    ),
    "winograd": (
        "n1-c20x5x6-k32x3x3-p1", ("winograd", CudaTile("fma", 32, 32, 16, 16, 1, 3, "uvc", outputs=2)), (PIXELS, TABLE, STEP, OUTPUTS),
    ),
    "in parts": (
        "n1-c20x5x6-k32x3x3-p1", ("mcfa", CudaTile("fma", 32, 32, 16, 16, 1, 3, "uvc")), (TABLE, STEP),
    ),
    "planes": (
        "n1-c3x10x9-k16x5x5-p2", ("direct", CudaTile("fma", 16, 64, 8, 32, 3, 3, "cuv", 1, 7, 9)), (STEP,),
    ),
}  # fmt: skip


def without_barrier(number: int) -> Callable[[str], str]:
    """Takes the barrier of this number out of a source."""

    def edit(source: str) -> str:
        start = [match.start() for match in re.finditer(re.escape(BARRIER), source)][number]
        return source[:start] + source[start + len(BARRIER) :]

    return edit


def without_wait(source: str) -> str:
    return WAIT.sub("", source)


def waiting_for_one_less(source: str) -> str:
    return WAIT.sub(lambda match: f"im2win::wait_copies<{int(match[1]) + 1}>();", source)


def goes_wrong(kind: str, edit: Callable[[str], str]) -> bool:
    """Whether the edited kernel gives another result, or breaks a rule, for some seed."""
    key, kernel, _ = KERNELS[kind]
    return emulated.goes_wrong(Conv2d.parse(key), kernel, edit, SEEDS)


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_as_they_are_go_right(kind: str) -> None:
    assert not goes_wrong(kind, str)


@pytest.mark.parametrize("kind", KERNELS)
def test_every_wait_is_in_the_table(kind: str) -> None:
    """And the kernels are what their names say."""
    key, (algorithm, tile), barriers = KERNELS[kind]
    source = generated(Conv2d.parse(key), algorithm, tile).source
    kernels = source[source.index(MARK) :]
    kernel = kernels.rpartition(" transform_parts_kernel(")[0] or kernels  # the transform by itself is for measuring
    assert kernel.count(BARRIER) == len(barriers)
    assert len(WAIT.findall(kernel)) == (barriers.count(STEP) if "copy_async<" in kernel else 0)
    assert ("fetched_ptr" in kernel) == ("fetched" in kind) and ("im2win::product_" in kernel) == (tile.arithmetic.unit == "warp")
    assert ("im2win::wgmma_" in kernel) == tile.warpgroup == kind.startswith("warpgroups")


@pytest.mark.parametrize(("kind", "number"), [(kind, i) for kind, row in KERNELS.items() for i in range(len(row[2]))])
def test_every_barrier_is_needed(kind: str, number: int) -> None:
    assert goes_wrong(kind, without_barrier(number)), f"{kind}: right without the barrier behind which {KERNELS[kind][2][number]}"


@pytest.mark.parametrize("edit", [without_wait, waiting_for_one_less], ids=["none", "one less"])
@pytest.mark.parametrize("kind", [kind for kind in KERNELS if kind != "warpgroups, patch fetched"])
def test_every_wait_is_needed(kind: str, edit: Callable[[str], str]) -> None:
    """(Where windows are fetched, and filters copied as a whole, no thread copies anything asynchronously.)"""
    assert goes_wrong(kind, edit)


@pytest.mark.parametrize("what", [r"wait_products<1>\(\);", r"finish_products\(\);", r"wait_bulk\(.*\);"])
@pytest.mark.parametrize("kind", [kind for kind in KERNELS if kind.startswith("warpgroups")])
def test_what_warpgroups_wait_for_is_needed(kind: str, what: str) -> None:
    """Products run on behind their step: filters stay until they are read, and sums are not read before they are done."""
    assert goes_wrong(kind, lambda source: re.sub(f"im2win::{what}", "", source))
