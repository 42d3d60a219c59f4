"""The ceilings of products in narrow types: the program is the machine's fastest instruction and little else, and it counts right."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm

from im2win.bench import product_peak
from im2win.bench.ceilings import Ceilings, ProductPeak
from im2win.bench.peers.subject import Tensors
from im2win.codegen.llvm import llvm_target
from im2win.device.cpu import Machine
from im2win.spec.conv2d import Conv2d

EVERYTHING = ("avx512vnni", "avx512bf16", "amx-int8", "amx-bf16")
SERVER = Machine("Some CPU", "sapphirerapids", "avx512f", 1, 16, 32, 48 << 10, 2 << 20, 32 << 20, EVERYTHING)
OLDER = replace(SERVER, mcpu="znver4", features=EVERYTHING[:2])
DESKTOP = Machine("Some CPU", "alderlake", "avx2", 1, 8, 16, 32 << 10, 1 << 20, 32 << 20, ("avxvnni",))
OLD = replace(DESKTOP, mcpu="haswell", features=())
ANY = Conv2d(1, 1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("machine", "dtype", "name", "operations", "mnemonic"),
    [
        (SERVER, "int8", "amx", 6 * 2 * 16 * 16 * 64, "tdpbssd"),
        (SERVER, "bfloat16", "amx", 6 * 2 * 16 * 16 * 32, "tdpbf16ps"),
        (OLDER, "uint8", "vnni", 12 * 2 * 64, "vpdpbusd"),
        (OLDER, "bfloat16", "dpbf16", 12 * 2 * 32, "vdpbf16ps"),
        (DESKTOP, "int8", "vnni", 12 * 2 * 32, "vpdpbusd"),
        (OLD, "int8", "madd", 12 * 2 * 16, "vpmaddwd"),
    ],
)
def test_the_loop_is_the_fastest_instruction(machine: Machine, dtype: str, name: str, operations: int, mnemonic: str) -> None:
    one = product_peak.fastest(dtype, machine)
    assert one is not None and one.name == name
    assert product_peak.operations(one, machine) == operations
    library = tvm.compile(product_peak.module(dtype, one, machine, 1000), llvm_target(machine))
    loops = re.split(r"^\.L\w+:", library.mod.inspect_source("asm"), flags=re.MULTILINE)
    chains = product_peak.TILE_CHAINS if one.tiles else product_peak.CHAINS
    loop = max(loops, key=lambda text: len(re.findall(rf"\t{mnemonic}\s", text)))
    multiplied = re.findall(rf"\t{mnemonic}\s", loop)
    assert len(multiplied) % chains == 0 and multiplied
    assert "(%rsp)" not in loop and "(%rbp)" not in loop  # sums stay in registers


@pytest.mark.parametrize(("machine", "dtype"), [(OLD, "bfloat16"), (SERVER, "float32"), (replace(OLD, isa="asimd", lanes=4), "int8")])
def test_types_without_an_instruction_have_the_ceiling_of_multiply_adds(machine: Machine, dtype: str) -> None:
    assert product_peak.fastest(dtype, machine) is None


def test_every_sum_is_added_to_in_every_step() -> None:
    machine = Machine.host(1)
    one = product_peak.fastest("int8", machine)
    if one is None:
        pytest.skip("this CPU multiplies int8 in no instruction of the table")
    steps = 50
    kernel = tvm.compile(product_peak.module("int8", one, machine, steps), llvm_target(machine))
    first = np.full(product_peak.SUM_WORDS, one.name == "madd", np.int32)  # where a factor is the sum
    factors, sums = (tvm.runtime.tensor(array) for array in (np.ones(128, np.uint8), first))
    kernel(factors, sums)
    if one.name == "madd":
        assert sums.numpy()[:8].all() and not (sums.numpy()[:8] == 1).any()
        return
    used = product_peak.TILE_CHAINS * 256 if one.tiles else product_peak.CHAINS * product_peak.lanes_of(one, machine)
    assert set(sums.numpy()[:used]) == {steps * (64 if one.tiles else 4)}


def test_the_subject_runs() -> None:
    if product_peak.fastest("uint8", Machine.host(1)) is None:
        pytest.skip("this CPU multiplies uint8 in no instruction of the table")
    trial = ProductPeak("uint8").prepare(ANY, Tensors.random(ANY, 0), 1)
    trial.call()
    assert trial.read().any()


def test_the_ceiling_of_a_type() -> None:
    limits = Ceilings(100.0, 10.0, {"s8_gflops": 400.0})
    assert [limits.gflops(dtype) for dtype in ("float32", "bfloat16", "int8", "uint8")] == [100.0, 100.0, 400.0, 400.0]
    assert limits.by_name == {"fma_gflops": 100.0, "copy_gbs": 10.0, "s8_gflops": 400.0}
    conv = Conv2d.parse("n1-c64x28x28-k64x3x3-p1-int8")
    assert limits.floor_ms(conv) == pytest.approx(max(conv.flops / 400e6, conv.bytes_moved / 10e6))
