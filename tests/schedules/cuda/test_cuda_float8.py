"""float8_e4m3fn layers: exact on the emulator, the conversions and the precision of sums, what computes them, and machine code."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from emulated import Emulated, differences, expected, goes_wrong, typed
from oracle import Tensors, exact_tensors, oracle
from requantised import tensors
from warp_specialized import ROW, made, tile

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import ToolchainError
from im2win.device.gpu import H200
from im2win.emulator import Emulation, Launch
from im2win.numerics.reference import converted, error, reference, typed_tensors
from im2win.numerics.tolerance import tolerance
from im2win.registry import cuda_lowering
from im2win.registry.schedules import SCHEDULES, candidates
from im2win.runtime.cuda import Kernels
from im2win.runtime.tensors import kernel_view, torch_tensor, torch_values
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.legality.warp_specialized import violations
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d, ConvError
from im2win.spec.symbols import SYMBOL

DTYPE, E4M3 = "float8_e4m3fn", "wg_e4m3"
EVERY_BYTE = np.arange(256, dtype=np.uint8)
EXACT = {
    "pixels of all images in one row": ("n3-c64x5x6-k64x1x1-OUT.float16-NHWC", tile(64, 1, 1, 64, product=E4M3)),
    "float32, a bias, a residual": (
        "n2-c80x5x6-k70x3x3-p1-OUT.float32-NHWC-bias-add-relu", tile(64, 1, 5, 6, slabs=2, taps=3, product=E4M3),
    ),
    "bfloat16, warpgroups together": (
        "n2-c64x7x7-k128x3x3-p1-OUT.bfloat16-NHWC-bias", tile(128, 1, 7, 7, taps=9, groups=2, product=E4M3),
    ),
    "float8, warpgroups in turn": (
        "n3-c32x6x5-k64x3x3-s2-p1-OUT.float8_e4m3fn-NHWC-bias-relu", tile(64, 1, 3, 3, taps=3, pingpong=2, product=E4M3),
    ),
    "float8, a residual": ("n2-c48x5x6-k66x1x1-OUT.float8_e4m3fn-NHWC-bias-add", tile(64, 1, 1, 32, product=E4M3)),
    "float8, an odd number of channels": ("n1-c16x4x5-k67x3x3-p1-OUT.float8_e4m3fn-NHWC", tile(64, 1, 4, 5, taps=9, product=E4M3)),
    "two share pixels": ("n2-c128x5x5-k128x3x3-p1-OUT.float16-NHWC", tile(64, 1, 5, 5, slabs=2, cluster=2, product=E4M3)),
    "four share filters": ("n4-c64x4x4-k64x1x1-OUT.float16-NHWC", tile(64, 1, 1, 16, cluster=4, shared="filters", product=E4M3)),
    "two share sums": (
        "n1-c256x4x4-k64x3x3-p1-OUT.float8_e4m3fn-NHWC-bias", tile(64, 1, 4, 4, taps=3, cluster=2, shared="accumulators", product=E4M3),
    ),
    "what a tap reads": ("n2-c64x5x5-k64x3x3-p1-OUT.bfloat16-NHWC-relu", tile(64, 1, 5, 5, product=E4M3, tma_boxes="taps")),
    "groups": ("n2-c64x5x5-k64x3x3-p1-g2-OUT.float16-NHWC", tile(64, 1, 5, 5, taps=3, product=E4M3)),
}  # fmt: skip


def problem(key: str) -> Conv2d:
    return Conv2d.parse(key.replace("OUT", f"{DTYPE}-out"))


ORDINARY = ("float32, a bias, a residual", "float8, warpgroups in turn", "two share sums", "two share pixels")  # the others are slow tests


@pytest.mark.parametrize("name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.slow) for name in EXACT])
def test_outputs_are_exact(name: str) -> None:
    """Sums of small integers are exact in 13 bits of fraction, and so is everything behind them, rounded as the oracle rounds."""
    key, one = EXACT[name]
    conv = problem(key)
    given, kernel = tensors(conv), made(conv, one)
    right = oracle(conv, **given).astype(conv.out_dtype)
    assert (right == expected(conv, given)).all(), "the reference is the oracle"
    wrong = differences(conv, [kernel], Emulated(conv, [kernel])(given, seed=len(name)), right)
    assert not wrong, "\n".join(wrong)


def test_chains_make_sums_more_precise() -> None:
    """Random tensors, a long sum: errors are far within the tolerance, and several times as large where accumulators take all of it."""
    conv = problem("n1-c2048x2x2-k64x2x2-OUT.float32-NHWC")
    one = tile(64, 1, 1, 1, slabs=2, taps=4, product=E4M3)
    given, kernel = typed_tensors(conv, 3), made(conv, one)
    right = reference(conv, given["data"], given["filter"], scale=given["scale"])

    def unchained(source: str) -> str:
        body = re.sub(r"wgmma_first_e4m3(<[\d, ]+>)\(\(&\(products_ptr", r"wgmma_shared_e4m3\1((&(sums_ptr", source)
        body = re.sub(r"(wgmma_shared_e4m3<[\d, ]+>\(\(&\()products_ptr", r"\1sums_ptr", body)
        return re.sub(r"im2win::take_over<\d+>\([^;]*;", "", body)

    chained, single = (error(Emulated(conv, [kernel], edit)(given)[0], right) for edit in (str, unchained))
    assert chained <= tolerance(conv) / 4 and single > 4 * chained, (chained, single, tolerance(conv))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["take_over", "end_products"])
def test_nothing_can_be_left_out(name: str) -> None:
    """Neither the first sums that take over products, nor the wait before them."""
    conv, one = problem("n1-c64x4x4-k64x3x3-p1-OUT.float16-NHWC"), tile(64, 1, 4, 4, slabs=1, taps=3, product=E4M3)

    def without(source: str) -> str:
        return re.sub(rf"im2win::{name}\b(?:<\d+>)?\(", "[](auto...) {}(", source, count=1)

    assert goes_wrong(conv, made(conv, one), without, range(4), [tensors(conv)])


def test_conversions() -> None:
    """Every float8 to float32 and back, ties, saturation, and NaN, as ml_dtypes rounds."""
    source = f"""{cuda_codegen.device_functions()}{cuda_codegen._called("im2win::multiplied(")}
extern "C" __global__ void decode(signed char* bytes, float* values) {{ values[threadIdx.x] = im2win::float8_value(bytes[threadIdx.x]); }}
extern "C" __global__ void encode(float* values, signed char* bytes) {{
  im2win::store_float8<4>(bytes + 4 * threadIdx.x, values + 4 * threadIdx.x);
}}"""
    numbers = np.concatenate([np.geomspace(2.0**-12, 600, 1500), np.arange(0, 480, 0.25), 2.0**-10 * np.arange(64), [np.inf]])
    numbers = np.concatenate([numbers, -numbers, [np.nan] * (-2 * len(numbers) % 4 + 4)]).astype(np.float32)
    count = len(numbers) // 4
    assert 4 * count == len(numbers)
    values, encoded = np.zeros(256, np.float32), np.zeros(len(numbers), np.int8)
    launches = [Launch("decode", ("all", "values"), (1, 1, 1), (256, 1, 1))]
    launches += [Launch("encode", ("numbers", "encoded"), (1, 1, 1), (1, 1, 1))]
    blocks = [Emulation(source, launches)]
    blocks[0]({"all": EVERY_BYTE.view(np.int8), "values": values, "numbers": numbers[:4], "encoded": encoded[:4]})
    np.testing.assert_array_equal(values, EVERY_BYTE.view(DTYPE).astype(np.float32))
    one = Emulation(source, [Launch("encode", ("numbers", "encoded"), (1, 1, 1), (32, 1, 1))])
    for start in range(0, len(numbers) - 127, 128):
        one({"numbers": numbers[start : start + 128], "encoded": encoded[start : start + 128]})
    done = len(numbers) // 128 * 128
    np.testing.assert_array_equal(encoded[:done].view(DTYPE).astype(np.float32), converted(numbers[:done], DTYPE).astype(np.float32))


def test_the_problem() -> None:
    conv = Conv2d(2, 64, 8, 8, 32, 3, dtype=DTYPE, layout="NHWC", bias=True)
    assert str(conv) == "n2-c64x8x8-k32x3x3-float8_e4m3fn-out.float16-NHWC-bias" and Conv2d.parse(str(conv)) == conv
    assert conv.requantised and conv.arguments == ("data", "filter", "bias", "scale", "output")
    assert conv.dtypes == {"data": DTYPE, "filter": DTYPE, "bias": "float32", "scale": "float32", "output": "float16"}
    assert conv.bytes_moved == 2 * 64 * 64 + 32 * 64 * 9 + 2 * 2 * 36 * 32
    with pytest.raises(ConvError, match="must be none or relu for `out_dtype` float8_e4m3fn"):
        conv.with_(out_dtype=DTYPE, activation="silu")
    with pytest.raises(ConvError, match=r"`out_dtype` \(='int8'\) must be one of float16, bfloat16, float32, float8_e4m3fn"):
        conv.with_(out_dtype="int8")
    with pytest.raises(ConvError, match="`zero_point`"):
        conv.with_(zero_point=1)


def test_what_computes_it() -> None:
    conv = problem("n2-c64x8x8-k64x3x3-p1-OUT.float16-NHWC")
    assert [row.key for row in candidates("auto", conv, "cuda")] == ["direct/warp_specialized"]
    for row in SCHEDULES.values():
        refused = row.supports(conv, "cuda")
        assert row is ROW or (refused is not None and (refused == "no CUDA schedule" or refused.endswith(f"not {DTYPE}"))), refused
        refused = row.supports(conv, "cpu")
        assert refused is not None and (refused == "no CPU schedule" or refused.endswith(f"not {DTYPE}")), refused
    assert ROW.supports(conv.with_(layout="NCHW"), "cuda") is not None
    found = ROW.on_gpu.space(problem("n2-c64x2x3-k64x1x1-OUT.float16-NHWC"), H200, "float32")
    assert found and {one.product for one in found} == {E4M3}
    older = replace(H200, arch="sm_80")
    assert any("compute capability 9.0" in line for line in violations(conv, tile(64, 1, 8, 8, product=E4M3), older))


def test_sums_that_take_over_need_registers() -> None:
    conv = problem("n2-c128x32x32-k64x1x1-OUT.float16-NHWC")
    wide = tile(64, 1, 1, 256, product=E4M3)
    assert MULTIPLIERS[DTYPE].chain == 4
    assert any(line.startswith("the 304 registers of a thread") for line in violations(conv, wide, H200))
    assert not violations(conv, tile(64, 1, 1, 160, pingpong=2, product=E4M3), H200)


def test_the_reference_is_the_oracles() -> None:
    for out in ("float16", "bfloat16", "float32", DTYPE):
        conv = problem(f"n2-c8x5x6-k6x3x3-s2-p1-OUT.{out}-NHWC-bias-add-relu")
        given: Tensors = typed_tensors(conv, 1)
        y = reference(conv, given["data"], given["filter"], given["bias"], given["residual"], given["scale"])
        np.testing.assert_array_equal(y, oracle(conv, **given))
        exact = typed(conv, exact_tensors(conv))
        y = reference(conv, exact["data"], exact["filter"], exact["bias"], exact["residual"], exact["scale"])
        np.testing.assert_array_equal(y, oracle(conv, **exact))
    assert abs(y).max() <= 448


@pytest.mark.parametrize("out", ["bfloat16", DTYPE])
def test_the_device_s_reference_is_the_oracles(out: str) -> None:
    pytest.importorskip("torch")
    from im2win.tuner.runners.cuda import device_tensors
    from im2win.tuner.runners.cuda import reference as on_device

    conv = problem(f"n2-c8x5x6-k6x3x3-s2-p1-OUT.{out}-NHWC-bias-add-relu")
    given = device_tensors(conv, 2, "cpu")
    assert {name: str(one.dtype) for name, one in given.items()} == {name: f"torch.{conv.dtypes[name]}" for name in given}
    y, _ = on_device(conv, given)
    np.testing.assert_array_equal(y.numpy(), oracle(conv, **typed_tensors(conv, 2)))


def test_tensors_between_numpy_and_pytorch_keep_their_bits() -> None:
    torch = pytest.importorskip("torch")
    values = EVERY_BYTE.view(DTYPE)
    tensor = torch_tensor(values)
    assert tensor.dtype is torch.float8_e4m3fn and (torch_values(tensor).view(np.uint8) == EVERY_BYTE).all()
    assert kernel_view(tensor).dtype is torch.int8 and kernel_view(tensor).data_ptr() == tensor.data_ptr()
    assert kernel_view(torch.ones(2)).dtype is torch.float32
    given = []
    kernels = Kernels({SYMBOL: lambda *tensors: given.extend(tensors)}, made=False, viewed=True)
    kernels(tensor, None, torch.ones(2), tensor)
    assert [one.dtype for one in given] == [torch.int8, torch.float32, torch.int8]


COMPILED: dict[str, tuple[str, WarpSpecializedTile]] = {
    "float16": (
        "n32-c128x28x28-k128x3x3-p1-OUT.float16-NHWC-bias-relu",
        tile(128, 1, 4, 28, slabs=2, taps=3, filter_stages=3, groups=2, product=E4M3),
    ),
    "float8": ("n32-c256x14x14-k256x1x1-OUT.float8_e4m3fn-NHWC-add", tile(64, 1, 1, 128, slabs=2, stages=3, pingpong=2, product=E4M3)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["float8", pytest.param("float16", marks=pytest.mark.slow)])
def test_machine_code(name: str) -> None:
    try:
        cuda_codegen.compiler()
    except ToolchainError as failed:
        pytest.skip(str(failed))
    key, one = COMPILED[name]
    conv = problem(key)
    assert not violations(conv, one, H200)
    source = cuda_codegen.generate_source(cuda_lowering.lower(conv, ROW, one, H200), H200).source
    assert cuda_codegen.cubin(source, H200).startswith(b"\x7fELF")
