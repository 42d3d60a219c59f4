"""Launch overlap: every kernel waits before it touches global memory, and is launched with the attribute; nothing else changes."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from compiled_c import empty, pointer
from emulated import Emulated, Made, differences, expected, typed
from emulated_c import Library
from machine_code import disassembled
from ops import host
from oracle import exact_tensors
from tvm.ir.instrument import pass_instrument

from im2win.builder.build import build_tile
from im2win.builder.cache import artefact_name
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.cuda_source import Generated
from im2win.codegen.llvm import TileError
from im2win.device.gpu import H200
from im2win.export import c_abi
from im2win.reconstruct.parse.unit import Unit
from im2win.registry import cuda_lowering
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.launch_overlap import CALL, LAUNCH, with_waits, without_waits
from im2win.schedules.cuda.model import launch_overlap
from im2win.schedules.cuda.passes import CONFIG, PIPELINE
from im2win.schedules.cuda.tiles.depthwise import DepthwiseTile
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile as Tile
from im2win.spec.conv2d import Conv2d

WARPS = "direct/warp_specialized"
ODD, STRIDED = "n2-c64x7x7-k64x3x3-p1-float16-bias-add", "n3-c64x14x14-k64x1x1-s2-float16-bias-relu"
LAST, STEM = "n1-c64x8x16-k64x3x3-p1-float16-NHWC-bias", "n2-c3x11x12-k64x7x7-s2-p3-float16-bias-relu"
SCHEDULED = ScheduledTile("fma", 32, 32, 8, 4, 4, "uvc", 2, 0, 4, "pipelines+copies")

CASES: dict[str, tuple[str, str, Any, int]] = {  # problem, algorithm, tile, kernels
    "halo, in turn": (LAST, WARPS, Tile("wg_f16", 64, 4, 8, 1, 2, 1, taps=3, pingpong=2), 1),
    "bfloat16": (LAST.replace("float16", "bfloat16"), WARPS, Tile("wg_bf16", 64, 4, 8, 1, 2, 1, tma_boxes="taps"), 1),
    "int8": ("n1-c64x8x16-k128x3x3-p1-int8-NHWC-out.int8-bias-relu", WARPS, Tile("wg_s8", 64, 8, 8, 1, 3, 1, 2, taps=9), 1),
    "clusters add accumulators": (
        "n1-c128x7x7-k64x1x1-float16-NHWC", WARPS, Tile("wg_f16", 64, 1, 49, 1, 2, 1, 2, shared="accumulators"), 1,
    ),
    "rearranged": (ODD, WARPS, Tile("wg_f16", 64, 7, 7, 2, 2, 1, taps=3, tma_boxes="rearranged"), 1),
    "lines": ("n2-c64x7x8-k64x1x1-float16", WARPS, Tile("wg_f16", 64, 1, 56, 1, 2, 1, tma_boxes="lines"), 1),
    "copied": (STRIDED, WARPS, Tile("wg_f16", 64, 1, 49, 1, 2, 1, images=2, tma_boxes="copied"), 2),
    "channels_last": (STRIDED, WARPS, Tile("wg_f16", 64, 1, 49, 1, 2, 1, images=2, tma_boxes="channels_last"), 2),
    "channels_last_taps": (ODD, WARPS, Tile("wg_f16", 64, 7, 7, 1, 3, 1, images=2, tma_boxes="channels_last_taps"), 2),
    "window_rows": (STEM, WARPS, Tile("wg_f16", 64, 3, 6, 1, 2, 1, taps=7, tma_boxes="window_rows"), 2),
    "resident filters": (LAST, "direct/persistent", PersistentTile("wg_f16", 64, 4, 8, 1, 2, 2), 1),
    "split_k": (LAST, "implicit_gemm/split_k", MultistageTile("f16", 64, 64, 32, 32, 1, 2, "uvc", split=2), 2),
    "multistage": (LAST, "implicit_gemm/tiled", MultistageTile("f16", 64, 64, 32, 32, 1, 3, "uvc"), 1),
    "CUDA cores": ("n2-c16x12x14-k32x3x3-p1-bias-add", "implicit_gemm/tiled", MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc"), 1),
    "stored windows": ("n2-c16x12x14-k32x3x3-p1-bias", "im2win/stored", MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc"), 2),
    "Winograd": (ODD, "winograd/tiled", MultistageTile("f16", 16, 64, 16, 32, 1, 3, "uvc", outputs=2), 3),
    "a schedule of TVM's, rewritten": ("n1-c32x8x8-k32x3x3-p1", "im2win/scheduled", SCHEDULED, 2),
    "depthwise": ("n2-c32x9x11-k32x3x3-p1-g32-float16-NHWC", "direct/depthwise", DepthwiseTile("fma_f16", 2, 1, 1, 16, 1, "window"), 1),
}  # fmt: skip


@functools.cache
def both(name: str) -> tuple[Conv2d, Generated, Generated]:
    """(problem, its kernels as they are, the same launched with overlap)."""
    key, algorithm, tile, _ = CASES[name]
    conv, row = Conv2d.parse(key), schedule_of(algorithm)
    plain, overlapped = (cuda_lowering.lower(conv, row, tile, H200, overlap) for overlap in (False, True))
    return conv, cuda_codegen.generate_source(plain, H200), cuda_codegen.generate_source(overlapped, H200)


def kernels(source: str) -> dict[str, tuple[list[str], str]]:
    """(names of pointers and TMA descriptors, body) of every kernel that a source defines."""
    found = {}
    for part in re.split(r'extern "C" __global__ ', source)[1:]:
        head, bracket, body = part.partition("{")
        if bracket and ";" not in head:
            name, parameters = re.findall(r"(\w+)\(([^()]*)\) $", head)[0]
            found[name] = [one.split()[-1] for one in parameters.split(",") if "*" in one or "CUtensorMap" in one], body
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_access_is_behind_the_wait(name: str) -> None:
    """At the outermost level, where every thread passes: producers, consumers and epilogues are in what follows."""
    _, plain, overlapped = both(name)
    found = kernels(overlapped.source)
    assert {one.kernel for one in overlapped.launches if one.overlap} == set(found) and len(found) >= CASES[name][3]
    assert not any(one.overlap for one in plain.launches) and CALL not in plain.source and "griddepcontrol" not in plain.source
    for handles, body in found.values():
        before, wait, behind = body.partition(f"  {CALL}();\n")
        assert wait and handles and CALL not in behind
        assert before.count("{") == before.count("}") and before.count("(") == before.count(")")
        before, maps = re.subn(r"  im2win::prefetch_map\(&\w+\);\n", "", before)  # descriptors are no global memory that kernels write
        assert maps == len(re.findall(r"__grid_constant__", body_head(overlapped.source, body)))
        assert not re.search(rf"\b(?:{'|'.join(handles)}|return|goto)\b", before)
        assert all(re.search(rf"\b{handle}\b", behind) for handle in handles)
    assert without_waits(overlapped.source).replace(device_part(overlapped), "") == plain.source.replace(device_part(plain), "")
    assert overlapped.launches == tuple(replace(one, overlap=True) for one in plain.launches)
    assert cuda_codegen.fingerprint(overlapped) == cuda_codegen.fingerprint(plain)


def body_head(source: str, body: str) -> str:
    """The line of a kernel's definition before this body."""
    return source[: source.index(body)].rpartition("\n")[2]


def device_part(generated: Generated) -> str:
    """The device functions before the kernels."""
    return generated.source.partition('extern "C"')[0]


@pytest.mark.parametrize("name", ["rearranged", "channels_last_taps", "clusters add accumulators"])
def test_the_prologue_of_warp_specialized_kernels_runs_before_the_wait(name: str) -> None:
    """Barriers are initialised and met, and tables are made; copies by either producer, and the epilogue's stores, come later."""
    source = both(name)[2].source
    _, body = list(kernels(source).values())[-1]
    before, _, behind = body.partition(f"{CALL}();")
    assert "init_full_barrier" in before and "init_empty_barrier" in before and "init_" not in behind
    assert ("cluster_barrier" if "cluster" in name else "__syncthreads()") in before
    assert re.search(r"im2win::copy_(?:box|shared)", behind) and "output_ptr" in behind and not re.search("im2win::copy_", before)
    assert behind.index("if (((int)threadIdx.x) < 128)") < behind.index("im2win::copy_")  # consumers, then producers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["channels_last_taps", "rearranged", "split_k", "Winograd", "bfloat16", "int8"])
def test_exact(name: str) -> None:
    conv, _, overlapped = both(name)
    _, algorithm, tile, _ = CASES[name]
    schedule = schedule_of(algorithm).on_gpu
    made = Made(name, overlapped, schedule.pack(conv, tile), schedule.workspace_bytes(conv, tile) // conv.itemsize)
    tensors = typed(conv, exact_tensors(conv))
    assert not differences(conv, [made], Emulated(conv, [made])(tensors, 1), expected(conv, tensors))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_machine_code_waits_first(name: str, tmp_path: Path) -> None:
    """The compiler and the assembler move no access of global memory before the wait, and let the next kernel begin behind it."""
    for code in disassembled(both(name)[2].source, tmp_path).values():
        (wait,) = (i for i, line in enumerate(code) if "ACQBULK" in line)
        (begin,) = (i for i, line in enumerate(code) if "PREEXIT" in line)
        accesses = [i for i, line in enumerate(code) if re.search(r"\b(?:LDG|STG|LD|ST|UTMALDG|UBLKCP|LDGSTS|ATOMG?|REDG?)\b", line)]
        assert wait < begin < min(accesses)


def test_launches_have_the_attribute(tmp_path: Path) -> None:
    """In TVM's host code: the module, and the library that is linked from it."""
    key, algorithm, tile, count = CASES["channels_last"]
    conv, row = Conv2d.parse(key), schedule_of(algorithm)
    for overlap in (False, True):
        module, watch = cuda_lowering.lower(conv, row, tile, H200, overlap), _Parameters()
        with cuda_codegen.reconstructed():
            generate_with(watch, module)
        assert len(watch.found) == count
        for one in watch.found:
            assert one.count(LAUNCH) == overlap and (one[-1] == "tirx.use_dyn_shared_memory" or "tirx.use_dyn_shared_memory" not in one)
        if shutil.which("nvcc"):
            cuda_codegen.compile_module(module, H200).export(tmp_path / f"{overlap}.so")
            assert (tmp_path / f"{overlap}.so").read_bytes().count(LAUNCH.encode()) == overlap * count


@pass_instrument
class _Parameters:
    """Reads the launch parameters of every kernel when the passes have run."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def run_after_pass(self, module: Any, info: Any) -> None:
        if info.name == "im2win.LaunchOverlap":
            kernels = [one for one in module.functions.values() if one.attrs.get("tirx.is_global_func")]
            self.found = [list(map(str, one.attrs["tirx.kernel_launch_params"])) for one in kernels]


def generate_with(watch: Any, module: Any) -> None:
    """Lowers a module under an instrument."""
    with tvm.transform.PassContext(config=CONFIG, instruments=[watch]):
        lowering, _, _ = tvm.tirx.get_tir_pipeline(PIPELINE)
        lowering(tvm.tirx.transform.BindTarget(cuda_codegen.cuda_target(H200))(module))


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch that makes overlap the default."""
    monkeypatch.setattr(launch_overlap, "BY_DEFAULT", True)


@pytest.mark.usefixtures("by_default")
def test_exported_to_c(tmp_path: Path) -> None:
    """The source as C++ on the emulator, which takes both ways to launch."""
    key, algorithm, tile, count = CASES["channels_last"]
    conv = Conv2d.parse(key)
    path, _ = c_abi.cuda.export(conv, algorithm, tile, H200, tmp_path, "layer")
    text = path.read_text()
    assert text.count("error = launch_with_overlap(") == text.count(f"  {CALL}();") == count and "error = cudaLaunchKernel(" not in text
    assert "cudaLaunchAttributeProgrammaticStreamSerialization" in text
    library, tensors = Library(path), typed(conv, exact_tensors(conv))
    made = schedule_of(algorithm).on_gpu.workspace_bytes(conv, tile)
    right = expected(conv, tensors)
    x, w, bias, y, workspace = (aligned(a) for a in (
        tensors["data"], schedule_of(algorithm).on_gpu.pack(conv, tile).filter(conv, tensors["filter"]), tensors["bias"],
        np.zeros_like(right), np.zeros(made + 512, np.uint8),
    ))  # fmt: skip
    assert library.call(*map(pointer, (x, w, bias, y, workspace)), None) == 0, library.failure
    assert (y == right).all()


def aligned(array: Any) -> Any:
    """A copy of an array as CUDA aligns it."""
    copy = empty(array.shape, array.dtype, 256)
    copy[...] = array
    return copy


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc on PATH")
@pytest.mark.usefixtures("by_default")
def test_exported_source_compiles(tmp_path: Path) -> None:
    key, algorithm, tile, _ = CASES["channels_last"]
    path, _ = c_abi.cuda.export(Conv2d.parse(key), algorithm, tile, H200, tmp_path, "layer")
    command = path.read_text().splitlines()[1].removeprefix("// ").split()
    subprocess.run([*command, "-Werror", "all-warnings"], cwd=tmp_path, check=True)


def test_the_default_is_one_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    key, algorithm, tile, _ = CASES["channels_last"]
    small, row = Conv2d.parse(key), schedule_of(algorithm)
    large, (_, slow) = Conv2d.parse("n256-c256x56x56-k256x3x3-p1-float16-NHWC"), (0, Tile("wg_f16", 128, 1, 56, 1, 4, 2, taps=3))
    names, asked = [], []
    for switch in (False, True):
        monkeypatch.setattr(launch_overlap, "BY_DEFAULT", switch)
        asked.append(cuda_lowering.overlaps(small, row, tile, H200))
        names.append(artefact_name(small, algorithm, tile.as_dict(), H200))
        assert not cuda_lowering.overlaps(large, row, slow, H200), "launches take little of its time"
        assert not cuda_lowering.overlaps(small, row, tile, replace(H200, arch="sm_86"))
        source = cuda_codegen.generate_source(cuda_lowering.lower(small, row, tile, H200), H200).source
        assert (CALL in source) == switch
    emitted = cuda_codegen.generate_source(cuda_lowering.emit(small, row, tile, H200), H200).source
    assert CALL not in emitted  # records are proven by kernels without it
    assert asked == [False, True] and names[0] != names[1]


def test_what_cannot_overlap_is_refused() -> None:
    key, algorithm, tile, _ = CASES["multistage"]
    conv, row = Conv2d.parse(key), schedule_of(algorithm)
    with pytest.raises(TileError, match=r"`overlap` \(=True\) needs compute capability 9\.0 or newer, not 8\.6"):
        cuda_lowering.lower(conv, row, tile, replace(H200, arch="sm_86"), overlap=True)
    assert cuda_lowering.lower(conv, row, tile, replace(H200, arch="sm_86"))
    on_cpu = Conv2d.parse("n1-c4x5x5-k4x1x1")
    with pytest.raises(TileError, match=r"`overlap` \(=True\) is for kernels on a GPU, not on "):
        build_tile(on_cpu, *default_tile(on_cpu, "direct/tiled", host()), host(), overlap=True)


def test_the_reconstructor_reads_kernels_that_wait() -> None:
    generated = both("stored windows")[2]
    unit = Unit(generated.source, generated.launches, generated.workspace)
    assert set(unit.kernels) == {one.kernel for one in generated.launches}


HEAD = 'extern "C" __global__ void __launch_bounds__(32) k(float* __restrict__ x_ptr, const __grid_constant__ CUtensorMap map, int n) {\n'
PLACED = {
    "  int a = n;\n@  x_ptr[a] = 1;\n": "behind declarations",
    "  if (n) {\n    f();\n  } else {\n    g();\n  }\n@  h(&map);\n": "behind a condition that accesses nothing",
    "  f();\n@  if (n) {\n    f();\n  } else {\n    x_ptr[0] = 1;\n  }\n": "before a condition with an access in its last branch",
    "  f();\n@  for (int i = 0; i < n; ++i) {\n    x_ptr[i] = 1;\n  }\n": "before a loop",
    "  int max_ptr = 0;\n@  float y = x_ptr[0];\n": "behind a name that only looks alike",
}  # fmt: skip


@pytest.mark.parametrize("body", PLACED, ids=PLACED.values())
def test_where_waits_go(body: str) -> None:
    wait, fetched = f"  {CALL}();\n", "  im2win::prefetch_map(&map);\n"
    given = HEAD + wait + body.replace("@", "") + "}\n"
    assert with_waits(given) == HEAD + fetched + body.replace("@", wait) + "}\n"
    assert without_waits(with_waits(given)) == without_waits(given)


def test_a_kernel_without_access_is_refused() -> None:
    with pytest.raises(AssertionError, match="kernel k has no access of global memory"):
        with_waits(f"{HEAD}  {CALL}();\n  f();\n}}\n")
