"""int8 sums as outputs of another type: the problem, exact kernels of every family on the emulator, and whoever binds and checks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requantised
from emulated import Emulated, Kernel, Made, cuda_algorithms, differences, everywhere, expected, generated, in_turn
from recorded import beside_default, fill

from im2win.bench.peers import cudnn
from im2win.cli.commands import workload
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import ToolchainError
from im2win.device.gpu import H200
from im2win.numerics.tolerance import tolerance
from im2win.packing.mma_fragments import CudaPack
from im2win.packing.split_k import parts_problem
from im2win.records import record as records
from im2win.records.log import Log
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.runtime.cuda import CudaLayer
from im2win.runtime.tensors import ArgumentError
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.schedules.cuda.epilogue.store import run_length
from im2win.schedules.cuda.kernels.multistage import operand_of
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.spec.conv2d import LAYOUTS, Conv2d, ConvError

PLAIN = Conv2d.parse("n2-c20x9x10-k24x3x3-p1-int8")


def check(conv: Conv2d, kernels: Sequence[Kernel | Made]) -> None:
    """Runs kernels in the order of two seeds, on outputs that are poisoned with two values, and compares with the oracle."""
    assert kernels, f"{conv}: no kernel"
    given = requantised.tensors(conv)
    right, emulated = requantised.right(conv, given), Emulated(conv, kernels)
    if conv.out_dtype == "int8":
        assert {-128 if conv.activation == "none" else 0, 127} <= set(right.ravel().tolist()), "both ends are reached"
    for seed in range(2):
        wrong = differences(conv, kernels, emulated(given, seed), right)
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


# --- the problem


KEYS = ("n1-c4x8x8-k4x3x3-int8-out.int8-NHWC-bias-add-relu", "n1-c4x8x8-k4x3x3-int8-out.float16", "n1-c4x8x8-k4x3x3-int8")


@pytest.mark.parametrize("key", KEYS)
def test_keys(key: str) -> None:
    conv = Conv2d.parse(key)
    assert str(conv) == key and records.parse_key(key) == conv
    assert conv.requantised == ("out." in key) == ("scale" in conv.arguments) and conv.types in key


def test_types_and_bytes() -> None:
    conv = Conv2d(1, 4, 8, 8, 6, 3, dtype="int8", bias=True, residual=True, out_dtype="float16")
    assert conv.arguments == ("data", "filter", "bias", "scale", "residual", "output")
    added = {"bias": "int32", "scale": "float32", "residual": "float16"}
    assert conv.dtypes == {"data": "int8", "filter": "int8", **added, "output": "float16"}
    assert (conv.out_itemsize, conv.output_bytes, conv.bytes_moved) == (2, 2 * 216, 256 + 216 + 2 * 2 * 216)
    assert conv.with_(out_dtype="int32").bytes_moved == 256 + 216 + 2 * 4 * 216
    assert Conv2d(1, 4, 8, 8, 6, 3, dtype="int8").dtypes["output"] == "int32" and Conv2d(1, 4, 8, 8, 6, 3).out_dtype == "float32"
    assert Conv2d(1, 4, 8, 8, 6, 3, dtype="int8", out_dtype="int32") == Conv2d(1, 4, 8, 8, 6, 3, dtype="int8")
    assert conv.with_(batch=2).out_dtype == "float16" and conv.with_(dtype="float32").out_dtype == "float32"
    assert Conv2d(1, 4, 8, 8, 6, 3).with_(dtype="int8").out_dtype == "int32"


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"dtype": "int8", "out_dtype": "tf32"},
            "`out_dtype` (='tf32') must be one of int32, int8, float16, bfloat16, float32, uint8 for `dtype` int8",
        ),
        ({"dtype": "float16", "out_dtype": "int8"}, "`out_dtype` (='int8') must be float16 for `dtype` float16"),
        ({"out_dtype": "int32"}, "`out_dtype` (='int32') must be float32 for `dtype` float32"),
        ({"dtype": "int8", "out_dtype": "int8", "activation": "silu"}, "`activation` (='silu') must be none or relu for `out_dtype` int8"),
    ],
)
def test_what_there_is_not(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvError) as caught:
        Conv2d(1, 4, 8, 8, 6, 3, **fields)
    assert message in str(caught.value)


def test_who_computes_it() -> None:
    conv = PLAIN.with_(out_dtype="float16", activation="silu")
    assert schedule_of("direct/tiled").supports(conv, "cuda") is None
    assert "float32, not int8" in str(schedule_of("direct/tiled").supports(conv))
    refused = schedule_of("winograd/tensor_cores").supports(PLAIN.with_(out_dtype="float16"), "cuda", "winograd")
    assert "int32 outputs, not float16" in str(refused)
    assert parts_problem(conv.with_(in_channels=64), 2).out_dtype == "int32"
    assert tolerance(PLAIN.with_(out_dtype="int8")) == 0 < tolerance(conv) < 2e-3


# --- kernels

EPILOGUES = {
    ("int8", "NCHW"): "bias-relu", ("int8", "NHWC"): "add", ("float16", "NCHW"): "relu", ("float16", "NHWC"): "bias-add-relu6",
    ("float32", "NCHW"): "bias-add", ("float32", "NHWC"): "",
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("out, layout", EPILOGUES)
def test_every_algorithm(out: str, layout: str) -> None:
    """Neither windows nor channels divide; of every algorithm a tile of either unit, in turn."""
    conv = Conv2d.parse("-".join(filter(None, (str(PLAIN), f"out.{out}", layout if layout == "NHWC" else "", EPILOGUES[out, layout]))))
    kernels = everywhere(conv) if out == "int8" else in_turn(conv)
    assert {name for name, _ in kernels} == set(cuda_algorithms(conv)) and len(cuda_algorithms(conv)) == 7
    check(conv, kernels)


def _tile(product: str, warp: tuple[int, int]) -> MultistageTile:
    stages = 3 if PRODUCTS[product].unit == "warpgroup" else 2
    return MultistageTile(product, warp[0], 2 * warp[1], *warp, 1, stages, "uvc")


# (key, products and warps, the outputs of a store)
RUNS = (
    (
        "n1-c8x5x7-k128x3x3-p1-int8-out.int8-NHWC-bias",
        (("s8", (128, 16), 16), ("s8", (64, 16), 8), ("s8", (32, 16), 4), ("wg_s8", (64, 64), 16)),
    ),
    ("n1-c8x5x7-k76x3x3-p1-g2-int8-out.int8-NHWC-add", (("s8", (48, 16), 2), ("wg_s8", (16, 64), 2))),
    ("n1-c8x5x7-k65x3x3-p1-int8-out.int8-NHWC", (("s8", (32, 16), 1), ("wg_s8", (16, 64), 1))),
    ("n1-c8x8x8-k16x3x3-p1-int8-out.int8-bias", (("s8", (16, 64), 16), ("s8", (16, 32), 8), ("wg_s8", (16, 128), 4))),
    ("n1-c8x5x8-k16x3x3-p1-int8-out.int8-add-relu", (("s8", (16, 32), 8), ("s8", (16, 16), 4))),
    ("n1-c8x5x7-k128x3x3-p1-int8-out.float16-NHWC", (("s8", (128, 16), 8),)),
)  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key, rows", RUNS, ids=[row[0] for row in RUNS])
def test_stores_of_every_length(key: str, rows: Sequence[tuple[str, tuple[int, int], int]]) -> None:
    conv = Conv2d.parse(key)
    kernels = [("implicit_gemm/tiled", _tile(product, warp)) for product, warp, _ in rows]
    for (_, made), (_, _, run) in zip(kernels, rows, strict=True):
        assert run_length(conv, made, operand_of(made).run(conv, made)) == run, made
    check(conv, kernels)


PERSISTENT = (
    ("n2-c64x9x11-k64x3x3-p1-int8-out.int8-NHWC-bias-relu", ((64, 3, 5), (64, 2, 11))),  # lanes exchange channels
    ("n1-c64x9x11-k100x3x3-p1-int8-out.int8-NHWC", ((128, 3, 5), (64, 3, 11))),  # channels left over
    ("n1-c64x9x11-k70x3x3-p1-int8-out.int8-NHWC-bias", ((128, 3, 5),)),  # two at a time
    ("n1-c64x9x11-k33x3x3-p1-int8-out.int8-NHWC-bias-add", ((64, 3, 5),)),  # one
    ("n1-c64x9x11-k64x3x3-p1-int8-out.float16-NHWC-bias-add-relu6", ((64, 3, 5),)),
    ("n1-c64x9x11-k64x3x3-s2-p1-int8-out.float32-NHWC-add", ((64, 3, 5),)),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key, shapes", PERSISTENT, ids=[row[0] for row in PERSISTENT])
def test_blocks_that_stay(key: str, shapes: Sequence[tuple[int, int, int]]) -> None:
    check(Conv2d.parse(key), [("direct/persistent", PersistentTile("wg_s8", *shape, 1, 2, 2)) for shape in shapes])


def test_blocks_that_stay_store_words() -> None:
    conv = Conv2d.parse(PERSISTENT[0][0])
    source = generated(conv, "direct/persistent", PersistentTile("wg_s8", 64, 3, 5, 1, 2, 2)).source
    assert "im2win::store_word" in source and "im2win::exchanged<4>" in source
    plain = generated(conv.with_(out_dtype=None), "direct/persistent", PersistentTile("wg_s8", 64, 3, 5, 1, 2, 2)).source
    assert "__fmul_rn" in source and "__fmul_rn" not in plain


SPLIT = (
    "n1-c128x9x11-k72x3x3-p1-int8-out.int8-NHWC-bias", "n1-c128x9x12-k36x3x3-p1-int8-out.int8-bias-add-relu",
    "n1-c128x9x11-k37x1x1-int8-out.int8", "n1-c128x5x7-k72x3x3-p1-int8-out.float16-NHWC-add", "n1-c128x8x8-k24x1x1-int8-out.float32-relu",
)  # fmt: skip


@pytest.mark.parametrize("key", SPLIT)
def test_sums_in_parts(key: str) -> None:
    check(Conv2d.parse(key), [("implicit_gemm/split_k", MultistageTile("s8", 32, 64, 32, 32, 1, 2, "uvc", split=2))])


def test_roundings() -> None:
    """Sums that float32 does not hold, ties of every int8, and what is far beyond it: each operation is rounded by itself."""
    rng = np.random.default_rng(0)
    for out in ("int8", "float16", "float32"):
        conv = Conv2d(1, 16, 16, 16, 48, 1, dtype="int8", layout="NHWC", bias=True, residual=True, out_dtype=out)
        given = requantised.tensors(conv)
        given["data"][...] = 0
        given["data"][..., 0] = np.arange(-128, 128).reshape(16, 16)
        given["filter"][...] = 1
        given["bias"][:] = np.concatenate([np.zeros(16), rng.integers(-(2**30), 2**30, 16), rng.integers(-(2**25), 2**25, 16)])
        given["scale"][16:] = 2.0 ** rng.integers(-30, -18, 32) * rng.standard_normal(32)
        given["scale"][:8] = [0.5, -0.5, 1, 1.5, -2.5, 1e30, -1e30, 0]
        kernels = [("implicit_gemm/tiled", _tile("s8", (48, 16)))]
        right = requantised.right(conv, given)
        assert (expected(conv, given) == right).all(), "the reference that the tuner checks with agrees"
        assert not differences(conv, kernels, Emulated(conv, kernels)(given), right)


def test_silu() -> None:
    conv = Conv2d.parse("n1-c16x7x8-k16x3x3-p1-int8-out.float16-NHWC-bias-silu")
    given = requantised.tensors(conv)
    given["scale"] /= 64
    right = requantised.right(conv, given).astype(np.float64)
    kernels = in_turn(conv)[:2]
    for y in Emulated(conv, kernels)(given):
        assert np.abs(y - right).max() <= tolerance(conv) * np.abs(right).max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_machine_code(layout: str) -> None:
    try:
        cuda_codegen.compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    conv = Conv2d.parse("n2-c64x12x16-k64x3x3-p1-int8-out.int8-bias-add-relu").with_(layout=layout)
    made = [generated(conv, "implicit_gemm/tiled", _tile("wg_s8", (64, 64)))]
    if layout == "NHWC":
        made.append(generated(conv.with_(residual=False), "direct/persistent", PersistentTile("wg_s8", 64, 4, 16, 1, 2, 2)))
    for one in made:
        assert cuda_codegen.cubin(one.source, H200).startswith(b"\x7fELF")


# --- whoever calls, checks and compares them


def _layer(conv: Conv2d) -> CudaLayer:
    """A layer without its GPU."""
    layer = object.__new__(CudaLayer)
    layer._conv = conv
    layer.op = SimpleNamespace(manifest=SimpleNamespace(pack=CudaPack("products", 64, "uvc", 1)))  # type: ignore[assignment]
    return layer


def test_what_is_bound() -> None:
    conv = PLAIN.with_(bias=True, out_dtype="int8")
    given = requantised.tensors(conv)
    w, bias, scale = given["filter"], given["bias"], given["scale"]
    packed = _layer(conv)._pack(w, bias, scale)
    assert [array.dtype.name for array in packed] == ["int8", "int32", "float32"]
    odd = scale.copy()
    odd[3] = np.nan
    for message, call in {
        r"`scale` must be given: the problem is .*out\.int8": lambda: _layer(conv)._pack(w, bias, None),
        "`bias` must be given": lambda: _layer(conv)._pack(w, None, scale),
        "`scale` must be left out": lambda: _layer(conv.with_(out_dtype=None))._pack(w, bias, scale),
        r"`scale` has shape \(23,\); it must be \(24,\)": lambda: _layer(conv)._pack(w, bias, scale[1:]),
        "`scale` has dtype float64; it must be float32": lambda: _layer(conv)._pack(w, bias, scale.astype(np.float64)),
        r"`scale` \(=nan at 3\) must be finite": lambda: _layer(conv)._pack(w, bias, odd),
        "`bias` has dtype float32; it must be int32": lambda: _layer(conv)._pack(w, bias.astype(np.float32), scale),
    }.items():
        with pytest.raises(ArgumentError, match=message):
            call()


@pytest.mark.parametrize("out, layout", EPILOGUES)
def test_the_device_s_reference_is_the_oracle_s(out: str, layout: str) -> None:
    torch = pytest.importorskip("torch")
    from im2win.tuner.runners.cuda import reference

    epilogue = EPILOGUES[out, layout]
    conv = Conv2d.parse("-".join(filter(None, (str(PLAIN), f"out.{out}", layout if layout == "NHWC" else "", epilogue))))
    given = requantised.tensors(conv)
    found, _ = reference(conv, {name: torch.from_numpy(array) for name, array in given.items()})
    assert found.dtype == torch.float64 and (found.numpy() == requantised.right(conv, given)).all()


def test_an_output_that_is_not_written_is_found() -> None:
    """Whatever value it should have: no output is both poisons."""
    torch = pytest.importorskip("torch")
    from im2win.tuner.runners import check
    from im2win.tuner.runners import cuda as cuda_runner

    class Bench(cuda_runner.Bench):
        device = "cpu"

        def wait(self) -> None:
            """Nothing runs elsewhere."""

    bench = Bench(Conv2d(1, 1, 1, 256, 1, 1, dtype="int8", out_dtype="int8"), 0)
    right = torch.arange(-128, 128, dtype=torch.int8).reshape(bench.output.shape)
    bench.expected = right.double()
    assert len(set(bench.poisons)) == 2 and check.verify(bench, lambda: bench.output.copy_(right), 0.0) == ("", 0.0)
    for missing in range(256):
        found = check.verify(bench, _without(bench, right, missing), 0.0)
        assert found[0].startswith("error"), missing


def _without(bench: Any, right: Any, missing: int) -> Callable[[], None]:
    def write() -> None:
        before = bench.output[..., missing].clone()
        bench.output.copy_(right)
        bench.output[..., missing] = before

    return write


def test_records_of_the_same_sums_are_hints(tmp_path: Path) -> None:
    """Nothing is known of int8 outputs: the tuner begins with what was best with int32 ones, and an untuned layer takes it."""
    from im2win.records.lookup import choose
    from im2win.tuner.session import Session

    plain = Conv2d.parse("n4-c64x28x28-k64x3x3-p1-int8-NHWC")
    backend = backend_for(H200)
    ranked = backend.ranked(plain, schedule_of("implicit_gemm/tiled"))
    best = ranked[len(ranked) // 2][1]
    log = Log(tmp_path)
    fill(log, *beside_default(_record(plain, best), H200, ["implicit_gemm/tiled"]))
    conv = plain.with_(out_dtype="int8")
    found = choose(conv, H200, ["implicit_gemm/tiled"], tmp_path)
    assert found is not None and found.tile == best and not found.exact
    session = Session(conv, ["implicit_gemm/tiled"], H200, log, 8, 0, None, "float32")
    assert best in [choice.tile for choice in session.next_batch()]


def _record(conv: Conv2d, tile: MultistageTile) -> records.Record:
    import tvm

    from im2win import __version__
    from im2win.registry.sources import code_digest

    return records.Record(
        conv=str(conv), algorithm="implicit_gemm", schedule="tiled", tile=tile.as_dict(), outcome="ok", message="", samples_s=(1e-4,) * 3,
        error=0.0, tolerance=0.0, extra_bytes=0, device=backend_for(H200).name, threads=1, target="cuda", tvm=tvm.__version__,
        im2win=__version__, fingerprint="0" * 16, generator=code_digest("cuda", "implicit_gemm/tiled"), seed=0, trial=0,
        date="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def test_cudnn_writes_int8() -> None:
    conv = Conv2d.parse("n1-c8x7x9-k4x3x3-int8-NHWC")
    types = {out: cudnn.arguments(conv.with_(out_dtype=out), cudnn.Math.TENSOR_OP).y[1] for out in ("int32", "int8", "float16", "float32")}
    assert types == {"int32": 0, "int8": 3, "float16": 0, "float32": 0}


def test_c_header() -> None:
    from im2win.export.c_abi.header import Interface

    conv = PLAIN.with_(bias=True, residual=True, out_dtype="int8", activation="relu")
    text = " ".join(Interface(conv, "layer", "by hand", 1, 0).header().split())
    arguments = "const int8_t *x, const int8_t *packed_w, const int32_t *bias, const float *scale, const int8_t *residual, int8_t *y"
    assert f"int im2win_conv_layer({arguments}, void *workspace, cudaStream_t stream);" in text
    assert "y = relu((conv(x, w) + bias) * scale + residual), sums in int32" in text and "bias [24], scale [24]" in text
    half = " ".join(Interface(PLAIN.with_(out_dtype="float16"), "layer", "by hand", 1, 0).header().split())
    assert "const float *scale, uint16_t *y" in half and "float16 as its bits" in half


def test_command_line(command: Callable[..., Any]) -> None:
    [layer], _ = workload.read("winograd64", 16, "map224", "int8", "NHWC", out_dtype="int8")
    assert str(layer.conv) == "n16-c64x224x224-k64x3x3-p1-int8-out.int8-NHWC"
    assert command("layers", "winograd64", "--dtype", "int8", "--out-dtype", "int8", "--layout", "NHWC").status == 0
    refused = command("layers", "winograd64", "--out-dtype", "int8")
    assert refused.status and "must be float32 for `dtype` float32" in " ".join(refused.err.split())


def test_models_count_the_bytes_of_outputs() -> None:
    """A layer whose output is most of its traffic is estimated to be faster with smaller outputs."""
    whole = Conv2d.parse("n16-c64x224x224-k64x1x1-int8-NHWC")
    for name in ("implicit_gemm/tiled", "direct/persistent"):
        backend, row = backend_for(H200), schedule_of(name)
        tile = backend.ranked(whole, row)[0][1]
        costs = [backend.cost(whole.with_(out_dtype=out), row, tile) for out in ("int32", "float16", "int8")]
        assert costs == sorted(costs, reverse=True) and costs[0] > 1.5 * costs[-1]
