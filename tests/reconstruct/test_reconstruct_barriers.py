"""Which barriers kernels need: the argument about indices, on kernels small enough to see it, on TVM's, and on our own."""

from __future__ import annotations

import re

import pytest
import winograd_pair
from emulated import generated
from waiting_kernels import KERNELS
from winograd_pair import TENSOR_CORES, Pair

from im2win.emulator import Launch
from im2win.reconstruct.parse.unit import Kernel, Unit
from im2win.reconstruct.rules.barriers import barrier_verdicts, weakened
from im2win.reconstruct.trace.footprints import epochs
from im2win.reconstruct.trace.trace import Trace
from im2win.spec.conv2d import Conv2d

SHARED = "  __shared__ alignas(64) float s[256];\n"
DYNAMIC = "  extern __shared__ __align__(128) float s[];\n"
T = "((int)threadIdx.x)"
BARRIER = "  __syncthreads();\n"
STAGE = f"  s[{T}] = x[{T}];\n"


def kernel(body: str, block: tuple[int, int, int] = (128, 1, 1), grid: tuple[int, int, int] = (1, 1, 1), head: str = "") -> Kernel:
    """A kernel of two tensors, of which it writes y."""
    source = f'{head}extern "C" __global__ void k(float* __restrict__ x, float* __restrict__ y) {{\n{body}}}\n'
    return Unit(source, (Launch("k", ("x", "y"), grid, block),)).kernel("k")


# Name: body, then for each barrier its outcome and a part of the reason.
CASES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "another warp reads": (
        f"{SHARED}{STAGE}  __syncthreads();\n  y[{T}] = s[(127 - {T})];\n",
        [("needed", r"thread \d+ of warp 0 writes byte \d+ of s in line 3, thread \d+ of warp 3 reads it in line 5")],
    ),
    "the warp itself reads": (f"{SHARED}{STAGE}{BARRIER}  y[{T}] = s[({T} ^ 31)];\n", [("warp", "only threads of one warp conflict")]),
    "the thread itself reads": (f"{SHARED}{STAGE}{BARRIER}  y[{T}] = s[{T}];\n", [("none", "no thread touches what another writes")]),
    "a barrier of the warp": (f"{SHARED}{STAGE}  __syncwarp();\n  y[{T}] = s[({T} ^ 1)];\n", [("needed", "thread 0 of warp 0")]),
    "a needless barrier of the warp": (f"{SHARED}{STAGE}  __syncwarp();\n  y[{T}] = s[{T}];\n", [("none", "")]),
    "written again in a loop": (
        f"{SHARED}  for (int i = 0; i < 4; ++i) {{\n    s[{T}] = x[({T} + i)];\n    __syncthreads();\n    y[{T}] = s[(127 - {T})];\n"
        "    __syncthreads();\n  }\n",
        [("needed", "writes"), ("needed", "writes byte")],
    ),
    "two buffers in turns": (
        f"{SHARED}  for (int i = 0; i < 4; ++i) {{\n    s[(((i & 1) * 128) + {T})] = x[({T} + i)];\n    __syncthreads();\n"
        f"    y[{T}] = s[(((i & 1) * 128) + (127 - {T}))];\n    __syncthreads();\n  }}\n",
        [("needed", ""), ("none", "")],
    ),
    "two in a row": (f"{SHARED}{STAGE}{BARRIER}{BARRIER}  y[{T}] = s[(127 - {T})];\n", [("none", ""), ("needed", "")]),
    "words of two halves": (
        f"  __shared__ alignas(64) half h[256];\n  h[{T}] = 1;\n  __syncthreads();\n  y[{T}] = ((float*)h)[({T} >> 1)];\n",
        [("warp", "only threads of one warp")],
    ),
    "halves of another's word": (
        f"  __shared__ alignas(64) half h[512];\n  *(float4*)(h + ({T} * 8)) = x4;\n  __syncthreads();\n  y[{T}] = h[{T}];\n",
        [("needed", "")],
    ),
    "a condition on threads": (
        f"{SHARED}  if ({T} < 32) {{\n    s[{T}] = x[{T}];\n  }}\n{BARRIER}  if ({T} < 32) {{\n    y[{T}] = s[(31 - {T})];\n  }}\n",
        [("warp", "")],
    ),
    "a condition on data": (
        f"{SHARED}  s[{T}] = 0.0f;\n  __syncthreads();\n  if (x[0] > 0.0f) {{\n    y[{T}] = s[(127 - {T})];\n  }}\n",
        [("not shown", "may read")],
    ),
    "an index from data": (
        f"{SHARED}{STAGE}{BARRIER}  y[{T}] = s[((int)x[{T}])];\n", [("not shown", "line 5: the place in s that it reads depends on data")]
    ),
    "a barrier not all reach": (
        f"{SHARED}{STAGE}  if (x[0] > 0.0f) {{\n    __syncthreads();\n  }}\n  y[{T}] = s[{T}];\n", [("not shown", "not all threads")]
    ),
    "written by all": (
        f"{SHARED}  s[({T} & 31)] = x[({T} & 31)];\n  __syncthreads();\n  y[{T}] = s[({T} & 31)];\n",
        [("needed", "")],
    ),
    "global memory between threads": (f"  y[{T}] = x[{T}];\n{BARRIER}  y[({T} + 128)] = y[(127 - {T})];\n", [("needed", "of y in line")]),
    "other blocks are told": (
        f"  y[{T}] = x[{T}];\n  __syncthreads();\n  if ({T} == 0) {{\n    __threadfence();\n    atomicAdd(flags, 1);\n  }}\n",
        [("needed", "it orders __threadfence in line 5, which other blocks take part in")],
    ),
    "a function that is not known": (
        f"{SHARED}{STAGE}  __syncthreads();\n  reverse(s);\n  y[{T}] = s[{T}];\n", [("not shown", "what reverse does to s is not known")]
    ),
    "a loop that is not followed": (
        f"{SHARED}{STAGE}{BARRIER}  while (x[0] > 0.0f) {{\n    y[{T}] = s[{T}];\n  }}\n", [("not shown", "not followed")]
    ),
    "dynamic arrays are one memory": (
        f"{DYNAMIC}  extern __shared__ __align__(128) float t[];\n{STAGE}  __syncthreads();\n  y[{T}] = t[(127 - {T})];\n",
        [("needed", "of s in line")],
    ),
    "through a pointer": (
        f"{DYNAMIC}  float* p = (float*)(s + 128);\n  p[{T}] = x[{T}];\n{BARRIER}  y[{T}] = s[({T} + 128)];\n  y[{T}] = p[({T} ^ 1)];\n",
        [("warp", "")],
    ),
    "a product of a warp": (
        "  nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::row_major> a[1];\n"
        f"  __shared__ alignas(64) half h[1024];\n  for (int i = 0; i < 8; ++i) {{\n"
        f"    h[((({T} >> 5) * 256) + ((i * 32) + ({T} & 31)))] = 1;\n  }}\n  __syncthreads();\n"
        f"  nvcuda::wmma::load_matrix_sync(a[0], (&(h[(({T} >> 5) * 256)])), 16);\n  y[{T}] = 0.0f;\n",
        [("warp", "only threads of one warp")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str) -> None:
    body, wanted = CASES[name]
    found = barrier_verdicts(kernel(body))
    assert [verdict.outcome for verdict in found] == [outcome for outcome, _ in wanted], found
    for verdict, (_, reason) in zip(found, wanted, strict=True):
        assert re.search(reason, verdict.why), verdict.why


def test_a_copy_is_under_way_until_it_is_waited_for() -> None:
    """The first barrier is behind no wait: what it parts is not there yet, and the second one is what is needed."""
    copy = f"  im2win::copy_async<4>((&(s[{T}])), (&(x[{T}])));\n  im2win::commit_copies();\n"
    body = f"{SHARED}{copy}  __syncthreads();\n  im2win::wait_copies<0>();\n  __syncthreads();\n  y[{T}] = s[(127 - {T})];\n"
    assert [verdict.outcome for verdict in barrier_verdicts(kernel(body))] == ["none", "needed"]
    early = body.replace("  im2win::wait_copies<0>();\n", "  im2win::wait_copies<1>();\n")
    assert {verdict.outcome for verdict in barrier_verdicts(kernel(early))} <= {"none", "needed", "not shown"}


def test_a_wait_completes_the_oldest_groups_alone() -> None:
    """Of three groups, waits leave the youngest two, one and none to later epochs, whoever committed more than they name."""
    copies = "".join(f"  im2win::copy_async<4>((&(s[({T} + {i})])), (&(x[{T}])));\n  im2win::commit_copies();\n" for i in range(3))
    for left in range(5):
        trace = Trace(kernel(f"{SHARED}{copies}  im2win::wait_copies<{left}>();\n{BARRIER}  y[{T}] = s[{T}];\n"), {"s"})
        before, behind = epochs(trace)
        pending = [access for access in behind.accesses if access.pending]
        assert len([access for access in before.accesses if access.pending]) == 3
        assert pending == before.accesses[-min(left, 3) :][: min(left, 3)], left


def test_places_that_depend_on_the_block() -> None:
    """Terms of the block alone move all of it; anything else is looked at block by block, as far as that goes."""
    block = "((int)blockIdx.x)"
    stored = f"{SHARED}{STAGE}{BARRIER}  y[(({block} * 128) + {T})] = s[({T} ^ 1)];\n{BARRIER}  y[(({block} * 128) + {T})] = 0.0f;\n"
    assert [verdict.outcome for verdict in barrier_verdicts(kernel(stored, grid=(1 << 20, 1, 1)))] == ["warp", "none"]
    folded = stored.replace(f"(({block} * 128) + {T})", f"((({block} * 128) + {T}) % 1000)")
    assert [verdict.outcome for verdict in barrier_verdicts(kernel(folded, grid=(9, 1, 1)))] == ["warp", "none"]
    assert {verdict.outcome for verdict in barrier_verdicts(kernel(folded, grid=(1 << 20, 1, 1)))} == {"not shown"}


def test_pointers_that_may_be_the_same_show_nothing() -> None:
    body = f"{SHARED}{STAGE}  __syncthreads();\n  y[{T}] = s[{T}];\n"
    one = kernel(body)
    loose = Unit(one.source.replace("__restrict__ y", "y"), one.launches).kernel("k")
    assert [verdict.outcome for verdict in barrier_verdicts(loose)] == ["not shown"]


def test_warps_are_counted_along_x_then_y() -> None:
    body = f"{SHARED}  s[((((int)threadIdx.y) * 32) + {T})] = 0.0f;\n{BARRIER}  y[{T}] = s[((((int)threadIdx.y) * 32) + (31 - {T}))];\n"
    assert barrier_verdicts(kernel(body, (32, 4, 1)))[0].outcome == "warp"
    narrow = body.replace("* 32", "* 16").replace("(31 - ", "(15 - ")
    assert barrier_verdicts(kernel(narrow, (16, 8, 1)))[0].outcome == "warp"
    crossed = narrow.replace("s[((((int)threadIdx.y)", "s[(((((int)threadIdx.y) ^ 2)", 1)
    assert barrier_verdicts(kernel(crossed, (16, 8, 1)))[0].outcome == "needed"


def test_a_function_with_a_barrier_inside() -> None:
    head = "__device__ float wait(float v) { __syncthreads(); return v; }\n"
    body = f"{SHARED}{STAGE}  __syncthreads();\n  y[{T}] = wait(s[{T}]);\n"
    assert barrier_verdicts(kernel(body, head=head))[0].outcome == "not shown"
    assert barrier_verdicts(kernel(body, head=head.replace("__syncthreads(); ", "")))[0].outcome == "none"


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        (Pair(private=True), 2),
        (Pair(channels=6, filters=24, size=20, step=3, private=True), 2),  # nothing divides
        (TENSOR_CORES, 4),  # TVM puts both operands into one array, one after the other
    ],
)
def test_tvms_barriers_around_loads_of_a_warp_become_barriers_of_the_warp(sizes: Pair, count: int) -> None:
    """The document's sync-free product: TVM's schedule binds loads to the warps that read them, and TVM inserts block barriers still."""
    unit = winograd_pair.unit(sizes)
    result, matches, verdicts = weakened(unit)
    assert [verdict.outcome for verdict in verdicts] == ["warp"] * count and len(matches) == count
    assert "__syncthreads" not in result.source and result.source.count("__syncwarp();") == count
    assert all(match.why.startswith("only threads of one warp conflict") for match in matches)
    again, matches, _ = weakened(result)
    assert again == result and not matches


def test_tvms_barriers_between_warps_stay() -> None:
    unit = winograd_pair.unit(Pair())
    result, matches, verdicts = weakened(unit)
    assert result == unit and not matches and [verdict.outcome for verdict in verdicts] == ["needed", "needed"]


def test_a_race_that_is_there_already_shows_nothing() -> None:
    body = f"{SHARED}  s[({T} & 31)] = x[{T}];\n  s[({T} & 31)] = 0.0f;\n  __syncthreads();\n  if ({T} < 32) {{\n    s[{T}] = 1.0f;\n  }}\n"
    assert barrier_verdicts(kernel(body))[0].outcome == "needed"
    once = kernel(f"{SHARED}  s[({T} & 31)] = x[{T}];\n  __syncthreads();\n  y[{T}] = 0.0f;\n")
    assert barrier_verdicts(once)[0].outcome == "none", "the race is on one side of the barrier, which changes nothing about it"


def test_barriers_in_loops_go_first() -> None:
    """Either of the two would do before the loop's first step; the one in the loop is met more often."""
    body = f"{SHARED}{STAGE}{BARRIER}  for (int i = 0; i < 8; ++i) {{\n    __syncthreads();\n    y[{T}] = s[(127 - {T})];\n  }}\n"
    assert [verdict.outcome for verdict in barrier_verdicts(kernel(body))] == ["needed", "none"]


@pytest.mark.parametrize("kind", KERNELS)
def test_our_own_kernels_need_all_their_barriers(kind: str) -> None:
    """What `test_cuda_races` finds out by taking them away, the argument says beforehand; what warpgroups wait for it does not follow."""
    key, (algorithm, tile), barriers = KERNELS[kind]
    made = generated(Conv2d.parse(key), algorithm, tile)
    unit = Unit(made.source, made.launches, made.workspace)
    found = [verdict for name, kernel in unit.kernels.items() if name.startswith("conv2d_kernel") for verdict in barrier_verdicts(kernel)]
    outcome = "not shown" if tile.product.startswith("wg_") else "needed"
    assert [verdict.outcome for verdict in found] == [outcome] * len(barriers), found
    if outcome == "not shown":
        assert all("what im2win::init_full_barrier waits for or does to memory is not known" in verdict.why for verdict in found)
