"""Fused kernels compute what the two did; pairs that cannot be fused are left alone, and the reason is given."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import fusable
import numpy as np
import pytest
import winograd_pair
from fusable import PAIRS, X, Y, sums
from oracle import Array
from winograd_pair import TENSOR_CORES, Pair

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import ToolchainError
from im2win.device.gpu import H200
from im2win.emulator import Emulation, EmulationError
from im2win.reconstruct.fusion import llc, shmem
from im2win.reconstruct.fusion.pairs import pair
from im2win.reconstruct.fusion.tiles import NotFused
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.rules.barriers import weakened
from im2win.reconstruct.validate.validators import poisoned

LIMIT = H200.block_shared
SEEDS = range(3)
UNEVEN = Pair(channels=6, filters=24, size=20, step=3, private=True)  # 81 tiles: conditions on blocks, threads and both


def run(emulation: Emulation, unit: Unit, tensors: dict[str, Array], seed: int = 0, resident: int = 1) -> dict[str, Array]:
    """Copies of the tensors after all launches; workspaces begin as NaN."""
    held = {name: array.copy() for name, array in tensors.items()}
    spaces = {name: poisoned(int(np.prod(shape)), dtype) for name, (shape, dtype) in unit.workspace.items()}
    emulation({**held, **spaces}, seed, resident)
    return held


# --- the small pairs, each kind in one source


def test_every_small_pair_fuses_through_shared_memory() -> None:
    fused = [shmem.fuse(fusable.unit(name), LIMIT)[0] for name in PAIRS]
    assert all([launch.kernel for launch in unit.launches] == ["consume_pkf_shmem"] and not unit.workspace for unit in fused)
    assert_outputs(fusable.together(fused))


def test_every_small_pair_fuses_through_the_cache() -> None:
    fused = [llc.fuse(fusable.unit(name), LIMIT)[0] for name in PAIRS]
    assert all([launch.kernel for launch in unit.launches] == ["consume_pkf_llc_clear", "consume_pkf_llc"] for unit in fused)
    whole = fusable.together(fused)
    assert_outputs(replace(whole, source=llc.SIGNALS + whole.source.replace(llc.SIGNALS, "")), residents=(1, 6))


def assert_outputs(unit: Unit, residents: Sequence[int] = (1,)) -> None:
    made = fusable.tensors()
    tensors = {f"{name}_{i}": array for i in range(len(PAIRS)) for name, array in made.items()}
    emulation = Emulation(unit.source, unit.launches)
    for seed, resident in itertools.product(SEEDS, residents):
        found = run(emulation, unit, tensors, seed, resident)
        for i, name in enumerate(PAIRS):
            np.testing.assert_array_equal(found[f"output_{i}"], fusable.expected(made["data"]), f"{name}, seed {seed}, {resident} resident")


def test_factors_are_changed_where_that_is_right_and_digits_taken_apart_elsewhere() -> None:
    for name in ("two barriers", "more threads"):
        index = re.findall(r"V_tile\[(.*?)\] =", shmem.fuse(fusable.unit(name), LIMIT)[0].source)
        assert index and "V_origin" not in index[0]
    source = shmem.fuse(fusable.unit("columns of the next block"), LIMIT)[0].source
    assert "- V_origin) % 64)" in source, "min() of a column carries into the next digit"


# --- what TVM schedules


SIZES = {"all warps copy": Pair(), "each its own": Pair(private=True), "nothing divides": UNEVEN}


@pytest.mark.parametrize("name", SIZES)
def test_the_winograd_pair(name: str) -> None:
    sizes = SIZES[name]
    unit, tensors = winograd_pair.unit(sizes), winograd_pair.tensors(sizes)
    fused, [match] = shmem.fuse(unit, LIMIT) if sizes.private else llc.fuse(unit, LIMIT, wave=1)
    assert "1 block(s) of winograd_kernel" in match.why and match.after in fused.source
    emulation = Emulation(fused.source, fused.launches)
    for seed in SEEDS:
        np.testing.assert_array_equal(run(emulation, fused, tensors, seed, resident=8)["output"], winograd_pair.expected(sizes, tensors))


def test_the_documents_kernel() -> None:
    """Input transform and product on tensor cores in one kernel, V in shared memory, and one barrier of the block left."""
    sizes = TENSOR_CORES
    unit, tensors = winograd_pair.unit(sizes), winograd_pair.tensors(sizes)
    fused = weakened(shmem.fuse(unit, LIMIT)[0])[0]
    assert fused.source.count("__syncthreads();") == 1 and fused.source.count("__syncwarp();") == 4
    emulation = Emulation(fused.source, fused.launches)
    for seed in SEEDS:
        np.testing.assert_array_equal(run(emulation, fused, tensors, seed)["output"], winograd_pair.expected(sizes, tensors))
    with contextlib.suppress(ToolchainError):
        assert cuda_codegen.cubin(fused.source, H200).startswith(b"\x7fELF")


def test_launch_parameters_are_computed_anew() -> None:
    unit = winograd_pair.unit(Pair())
    shared, cached = shmem.fuse(unit, LIMIT)[0], llc.fuse(unit, LIMIT)[0]
    [launch] = shared.launches
    assert (launch.grid, launch.block, launch.dynamic_bytes) == ((4, 2, 1), (32, 4, 1), 16 * 8 * 16 * 4)
    assert set(launch.arguments) == {"data", "filter", "output"}
    clear, launch = cached.launches
    assert (launch.grid, launch.block, launch.dynamic_bytes) == ((4 + 8, 1, 1), (32, 4, 1), 0) and clear.grid == (1, 1, 1)
    assert launch.arguments[-1] == "V_flags" == clear.arguments[0] and cached.workspace["V_flags"] == ((1 + 4,), "uint32")
    assert "float* V_ptr" in cached.source.split("winograd_kernel_1_pkf_llc(")[1], "one block reads what another has written"


def test_the_documents_size_on_todays_shared_memory() -> None:
    """What a block holds of V is more than the 48 KiB that a kernel may declare; dynamic shared memory goes up to the GPU's limit."""
    unit = winograd_pair.unit(Pair(channels=64, filters=16, size=10, block_p=16))
    with pytest.raises(NotFused, match=r"V takes 65536 bytes of a block's shared memory, with the rest 67584; there are 49152"):
        shmem.fuse(unit, 49152)
    assert shmem.fuse(unit, LIMIT)[0].launches[0].dynamic_bytes == 65536


# --- the order of blocks


def test_without_the_wait_some_order_goes_wrong() -> None:
    unit, tensors = llc.fuse(fusable.unit("fewer threads"), LIMIT)[0], fusable.tensors()
    broken = Emulation(re.sub(r"im2win::await_done\(\([^;]*;", ";", unit.source), unit.launches)
    assert not all(np.array_equal(run(broken, unit, tensors, seed, 12)["output"], fusable.expected(tensors["data"])) for seed in range(8))


def test_without_the_signal_blocks_wait_for_ever() -> None:
    unit = llc.fuse(fusable.unit("fewer threads"), LIMIT)[0]
    broken = Emulation(re.sub(r"im2win::signal_done\(\([^;]*;", ";", unit.source), unit.launches)
    with pytest.raises(EmulationError, match="blocks wait for each other, or for one that has not started"):
        run(broken, unit, fusable.tensors(), resident=3)


@pytest.mark.parametrize("wave", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", ["fewer threads", "two blocks for one", "blocks along two axes", "one axis, columns last"])
def test_waves_serve_every_block_after_those_it_reads(name: str, wave: int) -> None:
    """`order` checks itself; here it is asked for every shape."""
    unit = fusable.unit(name)
    if name == "one axis, columns last":
        with pytest.raises(NotFused, match="waves need one axis"):
            llc.fuse(unit, LIMIT, wave)
    else:
        assert llc.fuse(unit, LIMIT, wave)[0].launches[1].grid == llc.fuse(unit, LIMIT)[0].launches[1].grid


# --- what is refused


def changed(*pairs: tuple[str, str]) -> Unit:
    unit = fusable.unit("fewer threads")
    for before, after in pairs:
        assert before in unit.source
        unit = replace(unit, source=unit.source.replace(before, after))
    return unit


BASE = fusable.unit("fewer threads")
REFUSED: dict[str, tuple[Unit, str]] = {
    "an output": (replace(BASE, workspace={}), "no workspace lies between any two kernels"),
    "read twice": (replace(BASE, launches=(*BASE.launches, BASE.launches[1])), "no workspace lies between"),
    "disturbed": (
        replace(BASE, launches=(BASE.launches[0], replace(BASE.launches[0], arguments=("data", "other")), BASE.launches[1])),
        "no workspace",
    ),
    "two blocks write": (changed(("(((int)blockIdx.x) * 16)", "(((int)blockIdx.x) * 8)")), "two blocks of produce write one element of V"),
    "no formula": (fusable.unit_of(PAIRS["fewer threads"][0], sums(f"(3 - {X})", Y, (4, 2, 1))), "is no formula of its index"),
    "data decides": (changed(("V_ptr[((e * 64)", "V_ptr[((((int)output_ptr[0]) * 64)")), "depends on data"),
    "nobody writes": (changed(("step < 3", "step < 2")), "reads of V_ptr what nobody writes"),
    "an address": (changed(("sum[0] = 0.0f;", "sum[0] = look_up(V_ptr);")), "no workspace lies between"),
    "the input again": (replace(BASE, launches=(BASE.launches[0], replace(BASE.launches[1], arguments=("V", "data")))), "no workspace"),
    "behind a pointer": (changed(("sum[0] = 0.0f;", "sum[0] = 0.0f;\n  float* p = (V_ptr + 4);")), "no workspace lies between"),
    "a name": (
        changed(("for (int e = 0; e < 6; ++e)", "for (int thread = 0; thread < 6; ++thread)"), ("(e * 64)", "(thread * 64)")),
        "has a thread of its own",
    ),
    "an extent": (changed(("(((int)blockIdx.x) * 16)", "(((int)blockIdx.x) * ((int)blockDim.x))")), "uses blockDim, which would be"),
    "a function": (
        replace(
            changed(("sum[0] = 0.0f;", "sum[0] = zero();")),
            source="__device__ float zero() { return threadIdx.x * 0.0f; }\n" + BASE.source.replace("sum[0] = 0.0f;", "sum[0] = zero();"),
        ),
        "uses threadIdx in zero",
    ),
    "outside": (replace(BASE, workspace={"V": ((100,), "float32")}), "reaches outside its 100 elements"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fused_is_refused_with_its_reason(name: str) -> None:
    unit, message = REFUSED[name]
    for fuse in (shmem.fuse, llc.fuse):
        with pytest.raises(NotFused, match=message):
            fuse(unit, LIMIT)


def test_pairs_are_found_by_name() -> None:
    assert pair(BASE, "produce").tensor == "V"
    with pytest.raises(NotFused, match="between consume and None"):
        pair(BASE, "consume")


def test_a_negative_wave() -> None:
    with pytest.raises(NotFused, match=r"`wave` \(=-1\) must be at least 0"):
        llc.fuse(BASE, LIMIT, -1)
