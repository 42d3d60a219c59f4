"""Every row of the table of activations: its formula, keys, and what CPU and CUDA kernels make of it."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import numpy as np
import pytest
import requantised
import tvm
from emulated import Emulated, in_turn, sampled, typed
from ops import default, run
from oracle import activated, assert_close, exact_tensors, normal_tensors, oracle
from tvm import te
from tvm.s_tir import Schedule

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import ToolchainError, llvm_target
from im2win.compute.arithmetic import TensorExpressions
from im2win.device.cpu import Machine
from im2win.device.gpu import H200
from im2win.numerics.tolerance import tolerance
from im2win.registry import cuda_lowering
from im2win.registry.schedules import schedule_of
from im2win.spec.activations import ACTIVATIONS, apply, checked, found, reference
from im2win.spec.conv2d import Conv2d, ConvError

EPS = 2.0**-23
WORDS = [*map(checked, ACTIVATIONS), *(f"{row.name}{row.parameter.below / 4}" for row in ACTIVATIONS.values() if row.parameter)]
LARGEST = float(np.finfo(np.float32).max)


@functools.cache
def points() -> Any:
    """float32 of every magnitude, dense near zero, and both ends."""
    sizes = np.logspace(-30, 38.5, 1 << 13)
    every = [np.linspace(-100, 100, 1 << 14), np.linspace(-12, 12, 1 << 14), sizes, -sizes, [LARGEST, -LARGEST, 0.0, -0.0]]
    joined = np.concatenate(every)
    return joined[: len(joined) // 16 * 16].astype(np.float32)


# --- the table


@pytest.mark.parametrize("word", WORDS)
def test_formulas_are_the_oracles(word: str) -> None:
    x = points().astype(np.float64)
    y, right = reference(word, x), activated(word, x)
    assert np.isfinite(y).all() and np.max(np.abs(y - right) / np.maximum(np.abs(x), 1)) <= 1e-14


@pytest.mark.parametrize("word", WORDS)
def test_facts(word: str) -> None:
    """Bounds, slopes and derivatives are the formula's; what keeps integers does."""
    named = found(word)
    assert named is not None
    row, parameters = named
    x = np.linspace(-20, 20, 40001)
    y = reference(word, x)
    slopes = np.gradient(y, x)
    if row.bound is not None:
        assert y.max() <= row.bound and np.max(np.abs(slopes)) <= row.slope * 1.001
        assert reference(word, np.array([1e30]))[0] == row.bound
    else:
        assert np.max(np.abs(slopes)) <= 1.6, "errors do not grow much"
    if row.integers:
        assert (reference(word, np.arange(-300.0, 300)) % 1 == 0).all()
    if row.derivative is not None:
        wrong = np.abs(row.derivative(y, *parameters) - slopes) > 1e-3
        assert wrong.sum() <= 4, "two beside each kink"


@pytest.mark.parametrize("word", WORDS)
def test_keys(word: str) -> None:
    conv = Conv2d.parse("n1-c4x8x8-k4x3x3-bias").with_(activation=word)
    assert Conv2d.parse(str(conv)) == conv and conv.activation == checked(word)
    assert word == "none" or str(conv) == f"n1-c4x8x8-k4x3x3-bias-{checked(word)}"
    assert set(str(conv)) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-")


def test_parameters() -> None:
    conv = Conv2d(1, 4, 8, 8, 4, 3, activation="leaky_relu")
    assert conv.activation == "leaky_relu0.01" == ACTIVATIONS["leaky_relu"].key()
    assert conv.with_(activation="leaky_relu0.10").activation == "leaky_relu0.1"
    assert ACTIVATIONS["leaky_relu"].key(float(np.float32(0.1))) == "leaky_relu0.1"
    assert ACTIVATIONS["leaky_relu"].key(1e-5) == "leaky_relu0.00001" and ACTIVATIONS["relu"].key(0.1) is None
    rule = "must be leaky_relu with a slope of at least 0.000001 and below 1, as in leaky_relu0.01."
    for wrong in ("leaky_relu1", "leaky_relu0", "leaky_relu7.5"):
        with pytest.raises(ConvError) as caught:
            Conv2d.parse(f"n1-c4x8x8-k4x3x3-{wrong}")
        assert f"`activation` (='{wrong}') {rule}" in str(caught.value)
    for unknown in ("leaky_relu-1", "relu0.1", "gelu_", "leaky_relu1e-3", ""):
        with pytest.raises(ConvError, match="must be one of none, relu, "):
            Conv2d(1, 4, 8, 8, 4, 3, activation=unknown)


# --- CPU


def _elementwise(word: str) -> Any:
    x = te.placeholder(points().shape, "float32", name="x")
    y = te.compute(x.shape, lambda i: apply(word, TensorExpressions(), x[i]), name="y")
    schedule = Schedule(te.create_prim_func([x, y]))
    _, lanes = schedule.split(schedule.get_loops(schedule.get_sblock("y"))[0], [None, 16])
    schedule.vectorize(lanes)
    return tvm.compile(schedule.mod, llvm_target(Machine.host(1)))


@pytest.mark.parametrize("word", WORDS)
def test_cpu_accuracy(word: str) -> None:
    """Within 4 eps of the argument, or of 1 where that is less; finite for all that is finite. NaN is not hidden. No call."""
    compiled, x = _elementwise(word), points().copy()
    out = tvm.runtime.tensor(np.zeros_like(x))
    compiled(tvm.runtime.tensor(x), out)
    right = reference(word, x.astype(np.float64))
    errors = np.abs(out.numpy() - right)
    assert (errors <= 4 * EPS * np.maximum(np.abs(x.astype(np.float64)), 1)).all()
    if word in ("sigmoid", "tanh"):
        relative = (np.abs(x) < 85) & (np.abs(right) > 1e-30)  # sigmoid and tanh keep their accuracy far out and beside zero
        assert (errors[relative] <= 4 * EPS * np.abs(right[relative])).all()
    x[:] = np.nan
    compiled(tvm.runtime.tensor(x), out)
    assert np.isnan(out.numpy()).all() or word in ("relu", "relu6")
    code = compiled.mod.inspect_source("ll")
    called = set(re.findall(r"call [^@\n]*float[^@\n]*@([\w.]+)", code))
    assert "<16 x float>" in code or word == "none"
    assert all(name.startswith("llvm.") for name in called)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("word", WORDS)
def test_cpu_kernels(word: str) -> None:
    for key, algorithm in (("n1-c8x9x11-k17x3x3-p1-bias", "direct"), ("n1-c8x9x11-k17x3x3-p1-NHWC-bias-add", "winograd")):
        conv = Conv2d.parse(key).with_(activation=word)
        tensors = normal_tensors(conv)
        assert_close(conv, run(default(conv, algorithm), tensors), oracle(conv, **tensors), tolerance(conv))


# --- CUDA


@pytest.mark.sampled(4)
@pytest.mark.parametrize("word", WORDS)
def test_cuda_kernels(word: str) -> None:
    """Computed in float32, then rounded: some units in the last place of the output's type."""
    for key in ("n1-c12x7x9-k18x3x3-p1-bias-add", "n1-c16x7x8-k16x3x3-p1-float16-NHWC-bias"):
        conv = Conv2d.parse(key).with_(activation=word)
        tensors = typed(conv, {name: array / 8 if name == "data" else array for name, array in exact_tensors(conv).items()})
        kernels = random.Random(word).sample(in_turn(conv), 2)
        right = oracle(conv, **tensors)
        for kernel, y in zip(kernels, Emulated(conv, kernels)(tensors), strict=True):
            allowed = 8 * np.finfo(y.dtype).eps if y.dtype == np.float16 else 16 * EPS
            assert np.max(np.abs(y - right)) <= allowed * max(np.max(np.abs(right)), 1), kernel


@pytest.mark.parametrize("word", [word for word in WORDS if word != "none"])
def test_requantised(word: str) -> None:
    named = found(word)
    assert named is not None
    row = named[0]
    conv = Conv2d.parse("n1-c16x7x8-k16x3x3-p1-int8-out.float16-NHWC-bias").with_(activation=word)
    given = requantised.tensors(conv)
    given["scale"] /= 64
    right = requantised.right(conv, given).astype(np.float64)
    kernels = sampled(conv, "implicit_gemm/tiled", "s8")
    for y in Emulated(conv, kernels)(given):
        assert np.abs(y - right).max() <= tolerance(conv) * np.abs(right).max()
    sums = conv.with_(out_dtype="int32")
    reason = None if row.integers else f"int8 sums are integers, which have no {conv.activation}"
    assert schedule_of("direct").supports(sums, "cuda") == reason
    if not row.int8_outputs:
        with pytest.raises(ConvError, match="must be none or relu for `out_dtype` int8"):
            conv.with_(out_dtype="int8")


FAMILIES = {
    "direct/persistent": "n2-c64x14x14-k64x3x3-p1-float16-NHWC-bias-add",
    "direct/warp_specialized": "n2-c64x14x14-k64x3x3-p1-float16-NHWC-bias-add",
    "implicit_gemm/split_k": "n2-c64x8x8-k64x3x3-p1-float16-NHWC-bias-add",
    "winograd/tiled": "n2-c16x9x10-k24x3x3-p1-bias-add",
    "winograd/tensor_cores": "n2-c16x12x12-k16x3x3-p1-float16-NHWC-bias-add",
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_families(name: str, word: str) -> None:
    """Where a family refuses an activation it says why; else its kernels are generated."""
    conv = Conv2d.parse(FAMILIES[name]).with_(activation=word)
    row = schedule_of(name)
    reason = row.supports(conv, "cuda", "winograd")
    if reason is not None:
        assert (named := found(word)) is not None and named[0].bound is not None and f"{word} cuts off outputs" in reason
        return
    tile = _tile(name)
    assert cuda_codegen.generate_source(cuda_lowering.lower(conv, row, tile, H200), H200).launches


@functools.cache
def _tile(name: str) -> Any:
    from im2win.registry.backends import backend_for

    return backend_for(H200, "winograd").ranked(Conv2d.parse(FAMILIES[name]), schedule_of(name))[0][1]


@pytest.mark.slow
def test_machine_code() -> None:
    try:
        cuda_codegen.compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    base = Conv2d.parse("n1-c16x7x8-k16x3x3-p1-float16-NHWC-bias")
    kernel = sampled(base, "implicit_gemm/tiled", "f16")[0][1]
    for word in WORDS:
        module = cuda_lowering.lower(base.with_(activation=word), schedule_of("implicit_gemm"), kernel, H200)
        assert cuda_codegen.cubin(cuda_codegen.generate_source(module, H200).source, H200)
