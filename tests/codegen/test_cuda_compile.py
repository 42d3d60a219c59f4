"""Machine code for sm_90a: kernels of every arithmetic, kind and layout compile, without a GPU."""

from __future__ import annotations

import struct

import pytest
from emulated import Kernel, combined

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen import nvrtc
from im2win.codegen.llvm import ToolchainError
from im2win.device.gpu import H200
from im2win.schedules.cuda.arithmetic import PRODUCTS, SHARED_PRODUCTS
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import LAYOUTS, Conv2d


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    try:
        cuda_codegen.compiler()
    except ToolchainError as error:
        pytest.skip(str(error))


def compiled(conv: Conv2d, kernels: list[Kernel]) -> bytes:
    """All kernels in one piece of machine code."""
    return cuda_codegen.cubin(combined(conv, kernels)[0], H200)


def assert_kernels(code: bytes, names: set[str]) -> None:
    assert code.startswith(b"\x7fELF")
    assert all(name.encode() in code for name in names)


@pytest.mark.sampled(5)
@pytest.mark.pairwise
@pytest.mark.parametrize("half", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", SHARED_PRODUCTS)
def test_gathers_halo_tiles_and_transforms(product: str, layout: str, half: int) -> None:
    """Channels are odd (fetched) and divide (copied), stores wide; the epilogue has all its parts. Halo tiles of two algorithms in turn.

    Each arithmetic has both halves of its kernels, in an ordinary run one of them in each layout.
    """
    dtype = PRODUCTS[product].dtype
    activation = "relu6" if dtype == "int8" else "silu"
    conv = Conv2d(2, 64, 12, 16, 64, 3, padding=1, dtype=dtype, layout=layout, bias=True, residual=True, activation=activation)
    windows = 64 if PRODUCTS[product].unit == "warpgroup" else 32
    kernels = [
        ("implicit_gemm/tiled", MultistageTile(product, 64, 64, 32, windows, 1, 3, "uvc")),
        ({"NCHW": "direct/tiled", "NHWC": "im2win/fused"}[layout], MultistageTile(product, 64, 64, 32, windows, 1, 3, "Cuvc", 1, 4, 16)),
        ("im2win/stored", MultistageTile(product, 64, 64, 32, windows, 2, 3, "uvc")),
        ("mcfa/tiled", MultistageTile(product, 64, 64, 32, windows, 1, 3, "uvc")),
    ]
    squares = dtype in ("float32", "float16")
    if squares:
        kernels.append(("winograd/tiled", MultistageTile(product, 64, 64, 32, windows, 1, 3, "uvc", outputs=4)))
    if dtype != "int8" and PRODUCTS[product].unit == "warpgroup":
        kernels.append(("winograd/tiled", MultistageTile(product, 64, 64, 32, windows, 1, 3, "Cuvc", 1, 4, 8, outputs=2)))
    chosen, names = kernels[half::2], set[str]()
    for i, (name, tile) in enumerate(chosen):
        names.add(f"conv2d_{i}_kernel")
        if name == "im2win/stored":
            names.add(f"transform_{i}_kernel")
        elif name == "mcfa/tiled":
            names |= {f"conv2d_{i}_kernel_1", f"transform_parts_{i}_kernel"}
        elif name == "winograd/tiled" and not tile.rows:
            names.add(f"conv2d_{i}_kernel_2")
    assert_kernels(compiled(conv, chosen), names)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planes(layout: str) -> None:
    conv = Conv2d(1, 3, 32, 32, 64, 7, stride=2, padding=3, layout=layout)
    planes, stored = MultistageTile("fma", 16, 128, 16, 128, 7, 2, "cuv", 1, 8, 16), MultistageTile("fma", 64, 64, 32, 64, 1, 2, "cuv")
    kernels = [("direct/tiled", planes), ("mec/tiled", stored)]
    assert_kernels(compiled(conv, kernels), {"conv2d_0_kernel", "transform_1_kernel"})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_winograds_form_in_halves(layout: str) -> None:
    """Without a residual, sums wait as halves; rows of any width, an odd number of channels, five taps."""
    for conv in (Conv2d(1, 35, 9, 11, 40, 3, dtype="float16", layout=layout), Conv2d(1, 64, 9, 16, 64, 5, dtype="float16", layout=layout)):
        kernels = [("winograd/tiled", MultistageTile(product, 32, 64, 32, 64, 1, 3, "uvc", outputs=2)) for product in ("f16", "wg_f16")]
        assert_kernels(compiled(conv, kernels), {"conv2d_0_kernel_2", "conv2d_1_kernel_2"})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_elements_smaller_than_a_copy(dtype: str) -> None:
    conv = Conv2d(1, 35, 9, 9, 22, 3, padding=1, dtype=dtype, layout="NHWC")
    product = {"float16": "f16", "int8": "s8"}[dtype]
    kernels = [
        ("implicit_gemm/tiled", MultistageTile(product, 16, 64, 16, 32, 1, 3, "uvc")),
        ("direct/tiled", MultistageTile(product, 16, 64, 16, 32, 1, 3, "Cuvc", 1, 7, 9)),
        ("im2col/tiled", MultistageTile(product, 16, 64, 16, 32, 1, 3, "uvc")),
    ]
    assert_kernels(compiled(conv, kernels), {"conv2d_0_kernel", "conv2d_1_kernel", "transform_2_kernel"})


def test_source_that_does_not_compile() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        cuda_codegen.cubin("nonsense;", H200)


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC as a package: pip install 'im2win[cuda]'")
def test_without_a_toolkit() -> None:
    """The same sources compile with NVRTC, halves and warpgroups among them."""
    conv = Conv2d(2, 64, 12, 16, 64, 3, padding=1, dtype="float16", layout="NHWC")
    kernels = [("direct/tiled", MultistageTile("wg_f16", 64, 64, 64, 64, 1, 3, "Cuvc", 1, 4, 16))]
    assert_kernels(nvrtc.cubin(combined(conv, kernels)[0], H200.arch), {"conv2d_0_kernel"})
    with pytest.raises(RuntimeError, match="nonsense"):
        nvrtc.cubin("nonsense;", H200.arch)


def _instructions(code: bytes) -> dict[str, bytes]:
    """The instructions of each kernel in a piece of machine code: the sections `.text.NAME` of an ELF file of 64 bits."""
    (start,), (size, count, names) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HHH", code, 58)
    rows = [struct.unpack_from("<IIQQQQ", code, start + size * place) for place in range(count)]
    text = rows[names][4]
    found = {code[text + row[0] : code.index(b"\0", text + row[0])].decode(): code[row[4] : row[4] + row[5]] for row in rows}
    return {name.removeprefix(".text."): one for name, one in found.items() if name.startswith(".text.")}


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC as a package: pip install 'im2win[cuda]'")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "product"), [("float16", "wg_f16"), ("bfloat16", "bf16"), ("float32", "tf32x3"), ("int8", "s8")])
def test_short_headers_change_no_instruction(dtype: str, product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both headers give the same machine code.

    NVRTC's optimiser is not deterministic: one source, compiled 25 times with the same headers, gives a second order of instructions once
    or twice (float32 of these). So what is compared is the codes that each header has given, and a pair that differs is compiled again.
    """
    conv = Conv2d(1, 64, 12, 16, 64, 3, padding=1, dtype=dtype, layout="NHWC", bias=True)
    warps = (64, 64) if product.startswith("wg") else (32, 32)
    source = combined(conv, [("implicit_gemm/tiled", MultistageTile(product, 64, 64, *warps, 1, 3, "uvc"))])[0]
    assert nvrtc._TRAITS in source, "else nothing is gained"
    tries = list[int]()
    compiled_with = nvrtc._compiled
    monkeypatch.setattr(nvrtc, "_compiled", lambda *given: tries.append(len(given[2])) or compiled_with(*given))
    short = [_instructions(nvrtc.cubin(source, H200.arch))]
    assert tries == [1] and short[0], "compiled at once"
    whole = [_instructions(compiled_with(source, H200.arch, {}))]
    while not any(one in whole for one in short) and len(whole) < 4:
        short.append(_instructions(nvrtc.cubin(source, H200.arch)))
        whole.append(_instructions(compiled_with(source, H200.arch, {})))
    assert any(one in whole for one in short)


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC as a package: pip install 'im2win[cuda]'")
def test_traits_that_short_headers_lack() -> None:
    code = f"#include <{nvrtc._TRAITS}>\n__global__ void k(int* x) {{ *x = cuda::std::is_trivially_copyable<int>::value; }}"
    assert_kernels(nvrtc.cubin(code, H200.arch), {"k"})


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC as a package: pip install 'im2win[cuda]'")
def test_short_headers_say_what_nvidias_say() -> None:
    """Each trait of each kind of type, as assertions that hold with either header."""
    integers = ["bool", "char", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned", "long", "unsigned long long"]
    floats, others = ["float", "double", "const float"], ["int*", "void", "dim3"]
    unsigned = ["bool", "unsigned char", "unsigned short", "unsigned", "unsigned long long"]
    held = {
        "is_integral": [*integers, "const int", "volatile long"], "is_floating_point": floats, "is_unsigned": unsigned,
        "is_signed": [*(one for one in integers if one not in unsigned), *floats],
    }  # fmt: skip
    every = [*integers, *floats, *others, "const int", "volatile long"]
    lines = [
        f"static_assert(cuda::std::{trait}<{one}>::value == {str(one in names).lower()});"
        for trait, names in held.items() for one in every
        if trait not in ("is_signed", "is_unsigned") or one not in ("const int", "volatile long")
    ]  # fmt: skip
    lines += [
        "static_assert(cuda::std::is_same<int, int>::value && !cuda::std::is_same_v<int, const int>);",
        "static_assert(cuda::std::is_same_v<cuda::std::conditional<true, int, float>::type, int>);",
        "static_assert(cuda::std::is_same_v<cuda::std::conditional<false, int, float>::type, float>);",
        "static_assert(cuda::std::is_same_v<cuda::std::enable_if<true, int>::type, int>);",
    ]
    source = "\n".join([f"#include <{nvrtc._TRAITS}>", *lines, "__global__ void k() {}"])
    for headers in ({nvrtc._TRAITS: nvrtc._traits()}, {}):
        assert_kernels(nvrtc._compiled(source, H200.arch, headers), {"k"})
