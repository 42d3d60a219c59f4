"""Convolutions for C: every algorithm exact through the exported library, and in programs; its promises; what it needs and shows."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_c import COMPILER, PROGRAMS, WARNINGS, constant, needs_compiler, pointer, run, sanitizing
from ops import exact, host
from oracle import Array, Tensors, assert_close, assert_equal, exact_tensors, normal_tensors, oracle
from paths import ROOT

import im2win
from im2win.builder.build import Kernel
from im2win.codegen import pool
from im2win.device.cpu import Machine
from im2win.export import c_abi
from im2win.export.c_abi import checks, cpu
from im2win.export.c_abi.header import identifier
from im2win.numerics.tolerance import tolerance
from im2win.packing.cpu_blocked import FilterPack, TapOrder
from im2win.registry.ranking import ranked_tiles
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.runtime.manifest import ArtefactError
from im2win.spec.conv2d import Conv2d

pytestmark = needs_compiler

GROUPS = Conv2d.parse("n2-c6x9x11-k40x3x3-p1-g2-bias-add-relu6")  # channels are filled up, bias with them
UNEVEN = Conv2d.parse("n1-c4x9x11-k17x3x3-p0.1.2.0-NHWC-bias-add-relu6")
EVERYDAY = Conv2d.parse("n1-c16x12x14-k32x3x3-p1-bias-add-relu")
SMALL = Conv2d.parse("n1-c8x6x8-k16x1x1")
GUARD = 4096  # bytes of a pattern on both sides of what a call may write
PATTERN = 0xA5


def kernel(conv: Conv2d, algorithm: str, machine: Machine | None = None) -> Kernel:
    """An algorithm's kernel with the best tile that is exact on integers, if there is one."""
    tiles = [tile for _, tile in ranked_tiles(conv, schedule_of(algorithm), machine or host())]
    return Kernel(conv, algorithm, next((tile for tile in tiles if exact(conv, tile)), tiles[0]), machine or host())


class Library:
    """An exported layer through ctypes, as C sees it."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem.removeprefix("lib")
        self.header = path.with_name(f"{self.name}.h")
        self.library = ctypes.CDLL(str(path))
        self.call, self.pack = self.library[f"im2win_conv_{self.name}"], self.library[f"im2win_conv_{self.name}_pack"]

    def packed(self, w: Array) -> Array:
        """Packed filters between NaN; all of them are written, and nothing else."""
        zone = np.full(constant(self.header, "PACKED_ELEMENTS") + 2, np.nan, np.float32)
        assert self.pack(pointer(np.ascontiguousarray(w)), pointer(zone[1:])) == 0
        assert np.isnan(zone[[0, -1]]).all() and not np.isnan(zone[1:-1]).any()
        return zone[1:-1]

    def __call__(self, conv: Conv2d, tensors: Tensors, packed: Array) -> Array:
        """The output; it and the workspace lie at odd places between guards, which must be left as they are."""
        size = constant(self.header, "WORKSPACE_BYTES")
        memory = np.full(size + 2 * GUARD + 1, PATTERN, np.uint8)
        y = np.full(math.prod(conv.output_shape) + 2, np.nan, np.float32)
        added = [pointer(tensors[name]) for name in ("bias", "residual") if name in tensors]
        workspace = pointer(memory[GUARD + 1 :]) if size else None
        assert self.call(pointer(tensors["data"]), pointer(packed), *added, pointer(y[1:]), workspace) == 0
        assert np.isnan(y[[0, -1]]).all(), "written outside the output"
        assert (memory[: GUARD + 1] == PATTERN).all() and (memory[-GUARD:] == PATTERN).all(), "written outside the workspace"
        return y[1:-1].reshape(conv.output_shape)


def exported(folder: Path, conv: Conv2d, algorithm: str, name: str = "layer", machine: Machine | None = None) -> Library:
    return Library(c_abi.export_kernel(kernel(conv, algorithm, machine), folder, name)[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("conv", (GROUPS, UNEVEN), ids=str)
@pytest.mark.parametrize("algorithm", [name for name, row in SCHEDULES.items() if row.supports(UNEVEN) is None])
def test_exact(conv: Conv2d, algorithm: str, tmp_path: Path) -> None:
    library, one = exported(tmp_path, conv, algorithm), kernel(conv, algorithm)
    tensors = exact_tensors(conv)
    packed = library.packed(tensors["filter"])
    assert (packed.reshape(one.tile.pack.shape(conv)) == one.tile.pack.filter(conv, tensors["filter"])).all()
    assert_equal(conv, library(conv, tensors, packed), oracle(conv, **tensors))


@pytest.mark.parametrize("key", ["n1-c6x10x11-k6x3x3-p2-d2-g6", "n1-c6x10x11-k10x3x2-s1x2-silu"])
def test_other_problems(key: str, tmp_path: Path) -> None:
    """Depthwise and dilated; an epilogue that calls the mathematics library, a kernel that is not square, filters of normal numbers."""
    conv = Conv2d.parse(key)
    library, tensors = exported(tmp_path, conv, "im2win/stored"), normal_tensors(conv)
    assert_close(conv, library(conv, tensors, library.packed(tensors["filter"])), oracle(conv, **tensors), tolerance(conv))


@pytest.mark.parametrize(
    "key", ["n1-c13x10x11-k13x3x3-p1-g13-NHWC-bias-add-relu", "n1-c16x10x11-k16x3x3-p1-g16-NHWC-bias", "n1-c4x9x11-k8x3x3-g4-bias"]
)
def test_depthwise(key: str, tmp_path: Path) -> None:
    """Blocks of channels of different groups: a bias is never filled up."""
    conv = Conv2d.parse(key)
    library, tensors = exported(tmp_path, conv, "direct/depthwise"), exact_tensors(conv)
    assert_equal(conv, library(conv, tensors, library.packed(tensors["filter"])), oracle(conv, **tensors))


def test_winograds_filters_of_any_form(tmp_path: Path) -> None:
    """Forms with divisions that round, rows unlike columns: filters are those of Python up to the last digit."""
    conv = Conv2d.parse("n1-c5x12x13-k18x3x3-p1")
    tiles = [tile for _, tile in ranked_tiles(conv, schedule_of("winograd"), host())]
    tile = next(tile for tile in tiles if not exact(conv, tile))
    library = Library(c_abi.export_kernel(Kernel(conv, "winograd/tiled", tile, host()), tmp_path, "layer")[0])
    tensors = normal_tensors(conv)
    packed, right = library.packed(tensors["filter"]), tile.pack.filter(conv, tensors["filter"]).ravel()
    np.testing.assert_allclose(packed, right, rtol=3e-7, atol=1e-7)
    assert_close(conv, library(conv, tensors, packed), oracle(conv, **tensors), tolerance(conv))


@pytest.mark.parametrize("order", ["cuv", "cvu", "uvc"])
def test_packing_in_every_order(tmp_path: Path, order: TapOrder) -> None:
    """The orders of a filter, of an im2win window and tap by tap, with channels and groups that fill no block."""
    conv, pack = Conv2d.parse("n1-c6x9x11-k14x3x2-g2"), FilterPack(4, order)
    w = exact_tensors(conv)["filter"]
    text = "\n".join(['#include "pack.h"', *cpu._windows(conv, pack), "int layer(const float *w, float *packed) {"])
    (tmp_path / "own.c").write_text(f"{text} return im2win_pack_1_windows(&filters, w, packed); }}\n")
    run(tmp_path, COMPILER, *cpu.FLAGS, f"-I{cpu.SOURCES}", "-shared", "own.c", cpu.SOURCES / "pack.c", "-o", "own.so")
    packed = np.full(pack.shape(conv), np.nan, np.float32)
    assert ctypes.CDLL(str(tmp_path / "own.so")).layer(pointer(w), pointer(packed)) == 0
    np.testing.assert_array_equal(packed, pack.filter(conv, w))


# --- programs


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two exported layers, first and second, that take most of what there is."""
    folder = tmp_path_factory.mktemp("two")
    threads = dataclasses.replace(host(), threads=5)  # more than there are CPUs, perhaps
    exported(folder, Conv2d.parse("n2-c5x11x13-k17x3x3-s2x1-p1-bias-add-relu"), "im2win/stored", "first", threads)
    exported(folder, Conv2d.parse("n1-c3x9x11-k8x3x3-p1-bias-add-relu"), "winograd", "second", threads)
    return folder


LINKED = {"static": ("libfirst.a", "libsecond.a"), "shared": ("-L.", "-lfirst", "-lsecond", "-Wl,-rpath,.")}


@pytest.mark.parametrize("libraries", LINKED.values(), ids=list(LINKED))
def test_program(two: Path, libraries: tuple[str, ...]) -> None:
    """Two layers in one program: exact sums, status codes, several callers, any number of threads, no allocation, fork."""
    count = ["-DCOUNT_ALLOCATIONS"] if hasattr(ctypes.CDLL(None), "__libc_malloc") else []
    run(two, COMPILER, "-std=c11", "-O1", *WARNINGS, *count, "-I.", PROGRAMS / "program.c", *libraries, "-pthread", "-lm", "-o", "program")
    assert run(two, "./program") == ""


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_pool_of_threads(sanitizer: str, tmp_path: Path) -> None:
    """Under a sanitizer where the compiler and the system have it, without one where not."""
    sources = PROGRAMS / "pool.c", pool.SOURCES / "pool.c"
    flags = *sanitizing(tmp_path, sanitizer), "-std=c11", "-O1", *WARNINGS, f"-I{pool.SOURCES}"
    run(tmp_path, COMPILER, *flags, *sources, "-pthread", "-o", "pool")
    run(tmp_path, "./pool")


def test_header_is_c_and_cpp(two: Path) -> None:
    """Both headers in one file, without a warning, as C and as C++."""
    (two / "both.c").write_text('#include "first.h"\n#include "second.h"\nint both(void) { return im2win_threads() + IM2WIN_OK; }\n')
    for language in ("-std=c99", "-xc++"):
        if language == "-std=c99" or shutil.which("g++"):
            run(two, COMPILER, language, *WARNINGS, "-c", "both.c", "-o", "both.o")


def test_example(tmp_path: Path, command: Callable[..., Any]) -> None:
    """The commands that it names: the command line's export, the compiler, the program."""
    shutil.copy(ROOT / "examples" / "c" / "layer.c", tmp_path)
    build, compiling, _, _ = (tmp_path / "layer.c").read_text().partition("*/")[0].strip().splitlines()[2:6]
    words = build.split()
    assert words[:2] == ["im2win", "build"] and "--c-abi" in words
    done = command(*(str(tmp_path / "build") if word == "build" and i > 1 else word for i, word in enumerate(words[1:], 1)))
    assert done.status == 0, done.err
    assert "conv9" in done.out and "workspace" in done.out and ".h" in done.out
    run(tmp_path, "sh", "-c", compiling)
    assert "0 wrong" in run(tmp_path, "build/layer")
    guide = (ROOT / "docs" / "c_cpp.md").read_text()
    assert f"{build.strip()}\n{compiling.partition(' &&')[0].strip()}\n" in guide
    (block,) = (one for one in re.findall(r"^```c\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE) if one.startswith("#include"))
    include, _, statements = block.partition("\n")
    function = f"void layer(const float *w, float *packed, const float *x, float *y, void *workspace) {{{statements}}}\n"
    (tmp_path / "guide.c").write_text(f"{include}\n{function}")
    run(tmp_path, COMPILER, *WARNINGS, "-std=c99", "-Ibuild", "-c", "guide.c", "-o", "guide.o")


# --- what a library needs and shows


@pytest.mark.skipif(not shutil.which("nm") or not shutil.which("ldd"), reason="needs nm and ldd")
def test_nothing_of_tvms(two: Path) -> None:
    """Neither at link time nor at run time; only what the header documents is visible, and the pool's one function."""
    documented = {"im2win_conv_first", "im2win_conv_first_pack", *cpu.SHARED}
    assert {line.split()[-1] for line in run(two, "nm", "-D", "--defined-only", "libfirst.so").splitlines()} == documented
    visible = [line.split() for line in run(two, "nm", "-g", "--defined-only", "libfirst.a").splitlines() if " " in line]
    assert {words[-1] for words in visible} == documented
    needed = {line.split()[0].split("/")[-1].split(".")[0] for line in run(two, "ldd", "libfirst.so").splitlines()}
    assert {"libc"} <= needed <= {"libc", "libm", "libpthread", "linux-vdso", "ld-linux-x86-64", "ld-linux-aarch64"}
    assert "RWE" not in run(two, "readelf", "-lW", "libfirst.so")


def test_constants(tmp_path: Path) -> None:
    conv = Conv2d.parse("n2-c6x9x11-k10x3x2-s2x1-p1.0.2.3-d1x2-g2-bias")
    header = exported(tmp_path, conv, "direct/tiled").header
    shapes = {
        "BATCH": 2, "IN_CHANNELS": 6, "HEIGHT": 9, "WIDTH": 11, "OUT_CHANNELS": 10, "KERNEL_HEIGHT": 3, "KERNEL_WIDTH": 2,
        "STRIDE_DOWN": 2, "STRIDE_ACROSS": 1, "PADDING_TOP": 1, "PADDING_LEFT": 0, "DILATION_DOWN": 1, "DILATION_ACROSS": 2, "GROUPS": 2,
        "OUT_HEIGHT": conv.output_size[0], "OUT_WIDTH": conv.output_size[1], "INPUT_ELEMENTS": math.prod(conv.input_shape),
        "FILTER_ELEMENTS": math.prod(conv.filter_shape), "OUTPUT_ELEMENTS": math.prod(conv.output_shape), "THREADS": host().threads,
    }  # fmt: skip
    assert {name: constant(header, name) for name in shapes} == shapes
    assert f'_KEY "{conv}"' in header.read_text()


def test_a_cpu_without_the_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status rather than a signal."""
    monkeypatch.setattr(checks, "_vectors", lambda machine: "0")
    library, tensors = exported(tmp_path, SMALL, "direct/tiled"), exact_tensors(SMALL)
    y = np.empty(SMALL.output_shape, np.float32)
    packed = library.packed(tensors["filter"])
    workspace = np.empty(constant(library.header, "WORKSPACE_BYTES") + 1, np.uint8)
    assert library.call(*map(pointer, (tensors["data"], packed, y, workspace))) == 4


def test_a_library_may_be_closed_and_replaced(tmp_path: Path) -> None:
    """Its threads end with it."""
    from _ctypes import dlclose

    tensors = exact_tensors(EVERYDAY)
    for algorithm in ("direct/tiled", "mcfa/tiled"):
        library = exported(tmp_path, EVERYDAY, algorithm)
        assert_equal(EVERYDAY, library(EVERYDAY, tensors, library.packed(tensors["filter"])), oracle(EVERYDAY, **tensors))
        dlclose(library.library._handle)


def test_four_threads_on_one_library(tmp_path: Path) -> None:
    """ctypes lets go of the interpreter's lock: the calls do run at the same time."""
    library, packed = exported(tmp_path, EVERYDAY, "im2col/tiled"), []
    work = [(tensors := exact_tensors(EVERYDAY, seed), oracle(EVERYDAY, **tensors)) for seed in range(4)]
    packed = [library.packed(tensors["filter"]) for tensors, _ in work]

    def repeat(i: int) -> bool:
        return all(bool((library(EVERYDAY, work[i][0], packed[i]) == work[i][1]).all()) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


# --- from Python


def test_export_of_an_operator(tmp_path: Path) -> None:
    """Of one just built and of one loaded from a file; the problem's key is the name if there is no other."""
    op = im2win.build(SMALL, algorithm="direct/tiled", threads=1)
    path = im2win.load(op.export(tmp_path / "conv.so")).export_c(tmp_path / "new" / "folder")
    assert path.name == "libn1_c8x6x8_k16x1x1.so" and identifier(str(SMALL)) == "n1_c8x6x8_k16x1x1"
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".a", ".h", ".so"]
    library, tensors = Library(path), exact_tensors(SMALL)
    assert constant(library.header, "THREADS") == 1
    assert_equal(SMALL, library(SMALL, tensors, library.packed(tensors["filter"])), oracle(SMALL, **tensors))


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = im2win.build(SMALL, algorithm="direct/tiled")
    for name in ("", "a-b", "a b", 'a"'):
        with pytest.raises(ValueError, match=r"`name` .* must consist of letters, digits and underscores"):
            op.export_c(tmp_path, name)
    with pytest.raises(ValueError, match=r"`name` \(='conv_pack'\) must not end with _pack"):
        op.export_c(tmp_path, "conv_pack")
    (tmp_path / "file").touch()
    with pytest.raises(ArtefactError, match=r"`folder` \(=.*/file'\) must be a folder that can be written"):
        op.export_c(tmp_path / "file", "layer")
    op.manifest = dataclasses.replace(op.manifest, machine="some-other-cpu-8t")
    with pytest.raises(ArtefactError, match=r"built for some-other-cpu-8t, which this machine .* is not"):
        op.export_c(tmp_path, "layer")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="needs a C compiler and objcopy on PATH"):
        exported(tmp_path, SMALL, "direct/tiled")
