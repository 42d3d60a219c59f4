"""What CUDA kernels wait for, they need: without any one barrier or wait for copies, some order of their threads gives another result.

The emulator runs the threads of a block in an order drawn from a seed; asynchronous copies land at once or when they are waited for. Shared
memory starts as NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import emulated
import pytest
from emulated import MARK, generated
from waiting_kernels import KERNELS, STEP

from im2win.spec.conv2d import Conv2d

pytestmark = pytest.mark.usefixtures("unrestored")

SEEDS = range(12)
BARRIER = "__syncthreads();"
WAIT = re.compile(r"im2win::wait_copies<(\d+)>\(\);")



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


@pytest.mark.sampled(6)
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "number"), [(kind, i) for kind, row in KERNELS.items() for i in range(len(row[2]))])
def test_every_barrier_is_needed(kind: str, number: int) -> None:
    assert goes_wrong(kind, without_barrier(number)), f"{kind}: right without the barrier behind which {KERNELS[kind][2][number]}"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("edit", [without_wait, waiting_for_one_less], ids=["none", "one less"])
@pytest.mark.parametrize("kind", [kind for kind in KERNELS if kind != "warpgroups, halo tile fetched"])
def test_every_wait_is_needed(kind: str, edit: Callable[[str], str]) -> None:
    """(Where windows are fetched, and filters copied as a whole, no thread copies anything asynchronously.)"""
    assert goes_wrong(kind, edit)


@pytest.mark.sampled
@pytest.mark.parametrize("what", [r"wait_products<1>\(\);", r"finish_products\(\);", r"wait_full_barrier\(.*\);"])
@pytest.mark.parametrize("kind", [kind for kind in KERNELS if kind.startswith("warpgroups")])
def test_what_warpgroups_wait_for_is_needed(kind: str, what: str) -> None:
    """Products run on behind their step: filters stay until they are read, and sums are not read before they are done."""
    assert goes_wrong(kind, lambda source: re.sub(f"im2win::{what}", "", source))
