"""CUDA for C and C++: the exported source itself, launches and packing, runs on the emulator and compiles with nvcc."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised
from compiled_c import COMPILER, constant, empty, pointer, run
from emulated import ROWS, Kernel, expected, generated, sampled, typed
from emulated_c import Library, as_noted
from oracle import Array, Tensors, exact_tensors, normal_tensors

from im2win.builder.build import cuda_manifest
from im2win.codegen import pool
from im2win.device.gpu import H200
from im2win.emulator import _compile
from im2win.export import c_abi
from im2win.export.c_abi import cuda
from im2win.export.c_abi.header import Interface
from im2win.numerics.winograd_int8 import SCALES
from im2win.packing.cpu_blocked import FilterPack
from im2win.packing.mma_fragments import FORMS, CudaPack
from im2win.packing.split_k import SplitPack
from im2win.packing.wgmma_smem import ChunkPack
from im2win.packing.window_rows import WindowRowPack
from im2win.packing.winograd import WinogradPack
from im2win.packing.winograd_int8 import QuantisedPack
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.runtime.manifest import ArtefactError
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.schedules.studies.winograd_tc.tile import TensorCoreTile
from im2win.spec.conv2d import Conv2d

pytestmark = pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="needs a C++ compiler on PATH")

STRIDED = Conv2d.parse("n3-c64x14x14-k64x1x1-s2-float16-bias-relu")
FULL = Conv2d.parse("n2-c8x12x14-k20x3x3-p1-bias-add-relu")
NHWC = FULL.with_(layout="NHWC", dtype="float16", activation="relu6")
GROUPS = Conv2d.parse("n1-c16x9x11-k24x3x3-s2-p1-g2-float16-bias")
WHOLE = Conv2d.parse("n2-c16x8x8-k24x3x3-p1-int8-NHWC-add")
PLAIN = Conv2d.parse("n1-c16x8x8-k16x3x3-p1-float16")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of MCFA so small that there are several."""
    monkeypatch.setitem(SCHEDULES, "mcfa/tiled", ROWS["mcfa/tiled"])


def exported(folder: Path, conv: Conv2d, kernel: Kernel, name: str = "layer") -> Path:
    """The source of a layer."""
    algorithm, tile = kernel
    return c_abi.cuda.export(conv, algorithm, tile, H200, folder, name)[0]


class Device:
    """A layer's tensors in memory as CUDA aligns it."""

    def __init__(self, library: Library, conv: Conv2d, tensors: Tensors) -> None:
        self.library, self.conv = library, conv
        self.tensors = {name: empty(array.shape, array.dtype, 256) for name, array in tensors.items() if name != "filter"}
        for name, array in self.tensors.items():
            array[...] = tensors[name]
        self.packed = empty(constant(library.header, "PACKED_ELEMENTS"), conv.dtype, 256)
        assert library.pack(pointer(np.ascontiguousarray(tensors["filter"])), pointer(self.packed)) == 0
        self.workspace = empty(constant(library.header, "WORKSPACE_BYTES") + 1, np.uint8, 256)[1:]
        self.y = empty(conv.output_shape, conv.out_dtype, 256)
        self.y[...] = 77

    def call(self, **changes: Any) -> int:
        """The status of a call, with some arguments changed."""
        given = {"x": self.tensors["data"], "packed_w": self.packed, **{k: v for k, v in self.tensors.items() if k != "data"}}
        given |= {"y": self.y, "workspace": self.workspace if self.workspace.size else None}
        return int(self.library.call(*(one if isinstance(one, int) else pointer(one) for one in (given | changes).values()), None))


WIDE = Conv2d.parse("n1-c64x8x16-k64x3x3-p1-float16-NHWC-bias")

STEM = Conv2d.parse("n2-c3x11x12-k64x7x7-s2-p3-float16-bias-relu")
ODD = Conv2d.parse("n2-c64x7x7-k64x3x3-p1-float16-bias-add")
REQUANTISED = Conv2d.parse("n1-c64x8x16-k64x3x3-p1-int8-out.int8-NHWC-bias-relu")
FLOAT8 = Conv2d.parse("n1-c64x4x8-k64x3x3-p1-float8_e4m3fn-out.float8_e4m3fn-NHWC-bias-add")
SUMS = Conv2d.parse("n1-c36x5x6-k18x3x3-p1-int8-NHWC-bias-relu")

CASES = [
    (FULL, "direct/tiled", "fma"), (WIDE, "im2win/fused", "f16"), (FULL, "mcfa/tiled", "tf32x3"), (NHWC, "im2win/stored", "f16"),
    (NHWC, "im2col/tiled", "f16"),
    (WIDE, "direct/tiled", "wg_f16"), (GROUPS, "implicit_gemm/tiled", "f16"), (GROUPS, "mec/tiled", "f16"), (WHOLE, "mcfa/tiled", "s8"),
    (WHOLE, "implicit_gemm/tiled", "s8"), (PLAIN, "winograd/tiled", MultistageTile("f16", 16, 64, 16, 32, 1, 3, "uvc", outputs=2)),
    (WIDE, "winograd/tiled", MultistageTile("wg_f16", 64, 64, 32, 64, 1, 3, "Cuvc", 1, 4, 8, outputs=2)),
    (WIDE, "direct/persistent", PersistentTile("wg_f16", 64, 4, 8, 1, 2, 2)),
    (WIDE.with_(layout="NCHW"), "direct/persistent", PersistentTile("wg_f16", 64, 4, 8, 2, 2, 1)),
    (WIDE.with_(dtype="int8", bias=False), "direct/persistent", PersistentTile("wg_s8", 64, 4, 8, 1, 2, 2)),
    (WIDE, "direct/warp_specialized", WarpSpecializedTile("wg_f16", 64, 4, 8, 1, 2, 1, taps=3, pingpong=2)),
    (ODD, "direct/warp_specialized", WarpSpecializedTile("wg_f16", 64, 7, 7, 2, 2, 1, taps=3, tma_boxes="rearranged")),
    (WIDE.with_(layout="NCHW"), "direct/warp_specialized", WarpSpecializedTile("wg_f16", 64, 4, 8, 1, 2, 1, tma_boxes="rearranged")),
    (STRIDED, "direct/warp_specialized", WarpSpecializedTile("wg_f16", 64, 1, 49, 1, 2, 1, images=2, tma_boxes="copied")),
    (STRIDED.with_(width=16), "direct/warp_specialized", WarpSpecializedTile("wg_f16", 64, 2, 8, 1, 2, 1, tma_boxes="rearranged")),
    (STRIDED, "direct/warp_specialized", WarpSpecializedTile("wg_f16", 64, 1, 49, 1, 2, 1, images=2, tma_boxes="channels_last")),
    (STEM, "direct/warp_specialized", WarpSpecializedTile("wg_f16", 64, 3, 6, 1, 2, 1, taps=7, tma_boxes="window_rows")),
    (REQUANTISED.with_(out_channels=128), "direct/warp_specialized", WarpSpecializedTile("wg_s8", 64, 8, 8, 1, 3, 1, 2, taps=9)),
    (FLOAT8, "direct/warp_specialized", WarpSpecializedTile("wg_e4m3", 64, 4, 8, 1, 2, 1, taps=3)),
    (WIDE, "implicit_gemm/split_k", MultistageTile("f16", 64, 64, 32, 32, 1, 2, "uvc", split=2)),
    (REQUANTISED, "direct/persistent", PersistentTile("wg_s8", 64, 4, 8, 1, 2, 2)),
    (REQUANTISED.with_(residual=True, out_dtype="float16"), "implicit_gemm/tiled", "s8"),
    (PLAIN, "winograd/tensor_cores", TensorCoreTile(2, 16, 16, 16, "16x16x16", "sync_free", "shmem")),
]  # fmt: skip
"""Every algorithm, layout and element type, every kind of arithmetic unit: tiles drawn from the tuner's space, or named."""


@pytest.mark.usefixtures("unrestored")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("conv, algorithm, of", CASES, ids=[f"{name}-{getattr(of, 'product', of)}" for _, name, of in CASES])
def test_exact(conv: Conv2d, algorithm: str, of: Any, tmp_path: Path) -> None:
    """The source that users compile, with its own launches and packing; launches are those that TVM generated for the kernels."""
    kernel = sampled(conv, algorithm, of)[0] if isinstance(of, str) else (algorithm, of)
    library = Library(exported(tmp_path, conv, kernel))
    tensors = typed(conv, exact_tensors(conv))
    device = Device(library, conv, tensors)
    right = schedule_of(kernel[0]).on_gpu.pack(conv, kernel[1]).filter(conv, tensors["filter"])
    np.testing.assert_array_equal(device.packed, right.ravel())
    assert device.call() == 0, library.failure
    assert (device.y == expected(conv, tensors)).all()
    made = [launch for launch in generated(conv, *kernel).launches if not launch.kernel.startswith("transform_parts")]
    assert library.launches == [as_noted(one) for one in sorted(made, key=lambda one: not one.kernel.startswith("transform"))]


QUANTISED = [
    TensorCoreTile(2, 16, 16, 16, "16x16x16", "sync_free", "shmem", product="s8"),
]


@pytest.mark.parametrize("tile", QUANTISED, ids=lambda tile: tile.fusion)
def test_quantised_winograd(tile: TensorCoreTile, tmp_path: Path) -> None:
    """Its filters are packed with their scales, to the last bit."""
    tensors = quantised.random_tensors(SUMS, 0)
    device = Device(Library(exported(tmp_path, SUMS, ("winograd/tensor_cores", tile))), SUMS, tensors)
    np.testing.assert_array_equal(device.packed, tile.pack(SUMS).filter(SUMS, tensors["filter"]).ravel())
    assert device.call() == 0, device.library.failure
    np.testing.assert_array_equal(device.y, quantised.expected(SUMS, tensors))


def test_status_codes(tmp_path: Path) -> None:
    library = Library(exported(tmp_path, FULL, sampled(FULL, "im2col/tiled", "tf32")[0]))
    device = Device(library, FULL, typed(FULL, exact_tensors(FULL)))
    for name in ("x", "packed_w", "bias", "residual", "y", "workspace"):
        assert device.call(**{name: None}) == 1, name
    assert device.call(x=device.tensors["data"].ctypes.data + 4) == 2, "copies take 16 bytes at once"
    assert device.call(y=device.tensors["residual"]) == 3
    assert library.launches == []
    assert library.pack(None, pointer(device.packed)) == 1
    assert library.pack(pointer(device.packed), pointer(device.packed)) == 3
    assert device.call() == 0 and len(library.launches) == 2


def test_shared_memory_is_asked_for(tmp_path: Path) -> None:
    """Where a kernel takes more than every kernel gets, here made so little that all do. Without asking, the launch fails."""
    kernel = sampled(WIDE, "direct/tiled", "wg_f16")[0]
    path = exported(tmp_path, WIDE, kernel)
    tensors = typed(WIDE, exact_tensors(WIDE))
    refused = Device(Library(path), WIDE, tensors)
    refused.library.granted.value = 1 << 10
    assert refused.call() == 7
    text = path.read_text()
    assert text.count("asked_shared = 48 << 10;") == 1
    asking = path.with_name("asking.cu")
    asking.with_suffix(".h").write_text(path.with_suffix(".h").read_text().replace("conv_layer", "conv_asking"))
    text = text.replace("asked_shared = 48 << 10;", "asked_shared = 1 << 10;")
    asking.write_text(text.replace("conv_layer", "conv_asking").replace("layer.h", "asking.h"))
    device = Device(Library(asking), WIDE, tensors)
    device.library.granted.value = 1 << 10
    assert device.call() == 0
    assert device.library.granted.value == max(launch.dynamic_bytes for launch in generated(WIDE, *kernel).launches)


# --- packing


def packs() -> list[tuple[Conv2d, Any]]:
    """Every form, order and number of parts, in all element types, with channels and groups that fill no block or step."""
    problems = [Conv2d.parse(f"n1-c10x9x9-k{k}x3x2-g2-{dtype}") for k, dtype in ((18, "float32"), (34, "float16"), (6, "int8"))]
    found: list[tuple[Conv2d, Any]] = [
        (conv, CudaPack(form, block, order, slabs, run))
        for conv in problems
        for form, block, run in zip(FORMS, (24, 32, 32, 32), (1, 1, 2, 4), strict=True)
        for order, slabs in (("cuv", 1), ("uvc", 2), ("Cuvc", 3))
    ]
    single = Conv2d.parse("n1-c5x9x9-k18x3x3")
    found += [(single, CudaPack(form, 32, "uvc", 2, 2, parts)) for form in FORMS[2:] for parts in (1, 2)]
    found += [(single, FilterPack(8, order)) for order in ("cuv", "cvu")]
    square = [Conv2d.parse(f"n1-c10x9x9-k18x3x3-g2-{dtype}") for dtype in ("float32", "float16")]
    found += [(conv, CudaPack("products", 16, "uvc", 1, 2, parts, 4)) for conv, parts in ((square[0], 2), (square[1], 0))]
    found += [(conv, CudaPack("columns", 16, "Cuvc", 1, 2, 0, 2)) for conv in square]
    whole = [Conv2d.parse(f"n1-c80x9x9-k18x3x2-{dtype}") for dtype in ("float16", "int8")]
    grouped = [Conv2d.parse(f"n1-c{c}x9x9-k{k}x3x2-g{g}-{dtype}") for c, k, g in ((128, 128, 32), (48, 96, 3), (128, 256, 2))
               for dtype in ("float16", "int8")]
    found += [(conv, ChunkPack(64, slabs, run)) for conv in (*whole, *grouped) for slabs, run in ((1, 1), (2, 2))]
    found += [(conv, ChunkPack(64, 2, 1, phases)) for conv in (whole[0], grouped[0]) for phases in (2, 4, 8)]
    found += [(Conv2d.parse(f"n1-c{c}x19x19-k70x{kernel}"), WindowRowPack(64, slabs, run)) for c, kernel, slabs, run in (
        (3, "7x7-s2-float16", 1, 1), (3, "11x9-s4-bfloat16", 2, 2), (5, "2x3-float16", 2, 1),
    )]  # fmt: skip
    found += [(conv, SplitPack(2, form, 32, "uvc", 1, run)) for conv in whole for form, run in zip(FORMS, (1, 1, 2, 4), strict=True)]
    one = Conv2d.parse("n1-c10x9x9-k18x3x3-int8")
    found += [(one, QuantisedPack(2, 16, 16, scales)) for scales in SCALES[:2]]
    return found + [(conv, WinogradPack(2, 16, "bijck", 16)) for conv in square] + [(square[0], WinogradPack(6, 8, "ijbkc", 3))]


def test_packing(tmp_path: Path) -> None:
    """As Python packs, up to the last digit of what Winograd's transform rounds; all of them in one source."""
    texts = ["#include <cmath>", (pool.SOURCES / "im2win.h").read_text(), (cuda.SOURCES / "pack.hpp").read_text()]
    for i, (conv, pack) in enumerate(packs()):
        interface = Interface(conv, f"n{i}", "", int(np.prod(pack.shape(conv))), 0)
        texts += [f"namespace n{i} {{", *cuda._packing(interface, pack, f'extern "C" {interface.prototypes()[1]}'), "}"]
    (tmp_path / "packs.cpp").write_text("\n".join(texts))
    _compile("packing", tmp_path / "packs.so", "-O1", "-Wall", tmp_path / "packs.cpp")
    library = ctypes.CDLL(str(tmp_path / "packs.so"))
    for i, (conv, pack) in enumerate(packs()):
        w = _filters(conv)
        right = pack.filter(conv, w)
        packed = np.full(right.shape, 99, right.dtype)
        assert library[f"im2win_conv_n{i}_pack"](pointer(w), pointer(packed)) == 0
        rounded = getattr(pack, "outputs", 0) > 0
        tolerance = {"rtol": 2.0**-10 if conv.dtype == "float16" else 3e-7, "atol": 1e-7} if rounded else {"rtol": 0, "atol": 0}
        np.testing.assert_allclose(packed.astype(np.float64), right.astype(np.float64), **tolerance, err_msg=f"{conv} {pack}")


def _filters(conv: Conv2d) -> Array:
    """Filters that are no small integers, where their type has others."""
    if conv.dtype == "int8":
        return np.random.default_rng(0).integers(-128, 128, conv.filter_shape).astype(np.int8)
    return normal_tensors(conv)["filter"].astype(conv.dtype)


def test_halves(tmp_path: Path) -> None:
    """Every half is read as what it is; numbers near the middle of two, denormal, too large or none are rounded as numpy does."""
    text = """
    extern "C" double value(unsigned short bits) { return im2win_packing::value_of(static_cast<uint16_t>(bits)); }
    extern "C" int rounded(double value) { uint16_t bits; return im2win_packing::store(value, &bits), bits; }
    """
    sources = ["#include <cmath>", (pool.SOURCES / "im2win.h").read_text(), (cuda.SOURCES / "pack.hpp").read_text(), text]
    (tmp_path / "halves.cpp").write_text("\n".join(sources))
    _compile("halves", tmp_path / "halves.so", "-O1", tmp_path / "halves.cpp")
    library = ctypes.CDLL(str(tmp_path / "halves.so"))
    library.value.restype, library.value.argtypes, library.rounded.argtypes = ctypes.c_double, [ctypes.c_ushort], [ctypes.c_double]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal([library.value(bits) for bits in range(1 << 16)], halves.astype(np.float64))
    draw = random.Random(0)
    finite = [float(half) for half in halves if np.isfinite(half)]
    middle = [(a + float(np.nextafter(np.float16(a), np.float16(np.inf)))) / 2 for a in draw.sample(finite, 3000)]
    values = np.array([*middle, *(one * (1 + 1e-9) for one in middle), 65519.9, 65520.0, -1e9, np.inf, -np.inf, 0.0, -0.0, 1e-9, 2.0**-25])
    with np.errstate(over="ignore"):
        right = values.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal([library.rounded(value) for value in values], right)
    assert np.isnan(library.value(library.rounded(float("nan"))))


# --- CUDA's own compiler


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc") or not COMPILER, reason="needs nvcc and a C compiler on PATH")
def test_two_layers_in_one_program(tmp_path: Path) -> None:
    """Compiled as the source says, called from C, linked with CUDA's runtime."""
    exported(tmp_path, NHWC, sampled(NHWC, "implicit_gemm/tiled", "f16")[0], "first")
    exported(tmp_path, PLAIN, sampled(PLAIN, "im2win/stored", "wg_f16")[0], "second")
    for name in ("first", "second"):
        line = (tmp_path / f"{name}.cu").read_text().splitlines()[1]
        run(tmp_path, *line.removeprefix("// ").split(), "-Werror", "all-warnings")
    calls = "return im2win_conv_first_pack(NULL, NULL) + im2win_conv_second_pack(NULL, NULL) - 2 * IM2WIN_NULL_POINTER;"
    (tmp_path / "main.c").write_text(f'#include <stddef.h>\n#include "first.h"\n#include "second.h"\nint main(void) {{ {calls} }}\n')
    run(tmp_path, "nvcc", "-c", "main.c", "-o", "main.o", "-Xcompiler", "-Wall,-Wextra,-Werror")
    run(tmp_path, "nvcc", "main.o", "first.o", "second.o", "-o", "program")
    run(tmp_path, "./program")


# --- from the command line


def test_command_line(tmp_path: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, of which only the name is asked."""
    monkeypatch.setattr("im2win.registry.backends.device_gpu", lambda: H200)
    words = ("build", "papers12", "--layers", "conv9", "--batch", "4", "--target", "cuda", "--c-abi", "--out", tmp_path)
    done = command(*words)
    assert done.status == 0, done.err
    assert "conv9.cu" in done.out and sorted(path.name for path in tmp_path.iterdir()) == ["conv9.cu", "conv9.h"]
    header = tmp_path / "conv9.h"
    assert constant(header, "BATCH") == 4 and "cudaStream_t stream" in header.read_text()


def test_export_of_an_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator on a GPU exports is what its manifest describes, on a device of that name only."""
    monkeypatch.setattr("im2win.registry.backends.device_gpu", lambda: H200)
    kernel = sampled(PLAIN, "im2col/tiled", "f16")[0]
    algorithm, tile = kernel
    pack = schedule_of(algorithm).on_gpu.pack(PLAIN, tile)
    manifest = cuda_manifest(PLAIN, algorithm, tile.as_dict(), pack, H200, threads=tile.threads, made=1)
    path = c_abi.export_manifest(manifest, tmp_path / "of_manifest", "layer")
    assert path.read_text() == exported(tmp_path, PLAIN, kernel).read_text()
    with pytest.raises(ArtefactError, match=r"built for nvidia-other, which this machine \(nvidia-h200\) is not"):
        c_abi.export_manifest(dataclasses.replace(manifest, machine="nvidia-other"), tmp_path, "layer")
