"""Arm CPUs: kernels are compiled for named machines, their assembly is read, and C libraries of them run in an emulator."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from assembly import loops, stack_vectors
from oracle import oracle
from schedules_dot import dot_tensors

from im2win.builder.build import Kernel, chosen
from im2win.codegen.llvm import ToolchainError, compile_module
from im2win.device import arm
from im2win.device.cpu import FEATURES, Machine
from im2win.export import c_abi
from im2win.export.c_abi import checks, cpu
from im2win.registry.cpu_lowering import lower
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.schedules.cpu_dot.instructions import INSTRUCTIONS
from im2win.spec.conv2d import Conv2d

WRONG_CPU = 4  # IM2WIN_WRONG_CPU
EMULATOR = next(filter(None, map(shutil.which, ("qemu-aarch64", "qemu-aarch64-static"))), None)
COMPILER = f"{arm.TRIPLE}-gcc"


def _has_c_library() -> bool:
    """Whether the cross compiler has a C library to link with, which is another package."""
    command = shutil.which(COMPILER)
    found = subprocess.run([command, "-print-file-name=libc.a"], capture_output=True, text=True, check=False).stdout if command else ""
    return Path(found.strip()).is_absolute()


EMULATED = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and EMULATOR and _has_c_library()),
    reason=f"needs Linux, qemu-aarch64, and {COMPILER} with a C library",
)
# What the emulator is to be; it has no Neoverse V1 and no Cortex-A78.
CPUS = {"neoverse-n1": "neoverse-n1", "cortex-a76": "cortex-a76", "neoverse-v1-sve": "max,sve-max-vq=2"}


# --- what is emitted


def inner_loops(conv: Conv2d, machine: Machine) -> tuple[str, list[list[str]]]:
    """The instruction of a layer's default tile, and the innermost loops that multiply vectors."""
    name, tile = default_tile(conv, "auto", machine, "exact")
    code = str(compile_module(lower(conv, schedule_of(name), tile, machine), machine).executable.mod.inspect_source("asm"))
    found = {"fma": "fmla"}.get(getattr(tile, "instruction", "fma"), getattr(tile, "instruction", ""))
    return found, [loop for loop in loops(code) if sum(line.startswith((f"{found}\t", "sudot\t")) for line in loop) >= 4]


EMITTED = [
    ("neoverse-n1", "n1-c64x28x28-k64x3x3-p1-NHWC", "fmla", "v"), ("cortex-a78", "n1-c64x28x28-k96x3x3-p1", "fmla", "v"),
    ("neoverse-v1-sve", "n1-c64x28x28-k96x3x3-p1-NHWC", "fmla", "z"), ("neoverse-n1", "n1-c64x14x14-k64x3x3-p1-int8-NHWC", "sdot", "v"),
    ("cortex-a76", "n1-c64x28x28-k64x1x1-uint8", "sdot", "v"), ("neoverse-v1", "n1-c64x28x28-k64x3x3-p1-uint8-NHWC", "usdot", "v"),
    ("neoverse-v1", "n1-c64x28x28-k64x3x3-p1-bfloat16", "bfdot", "v"), ("neoverse-n1", "n1-c64x28x28-k64x1x1-bfloat16-NHWC", "fmla", "v"),
    ("neoverse-v1-sve", "n1-c64x28x28-k64x3x3-p1-int8", "sdot", "z"), ("neoverse-v1-sve", "n1-c64x28x28-k64x1x1-uint8-NHWC", "usdot", "z"),
    ("neoverse-v1-sve", "n1-c64x28x28-k64x1x1-bfloat16-NHWC", "bfdot", "z"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "wanted", "registers"), EMITTED, ids=lambda value: value if "-" in value else "")
def test_the_micro_kernel_keeps_its_sums_in_registers(name: str, key: str, wanted: str, registers: str) -> None:
    """The innermost loop multiplies with the machine's instruction, and neither stores a vector to the stack nor loads one from there."""
    found, inner = inner_loops(Conv2d.parse(key), arm.KNOWN[name])
    assert found == wanted and inner
    for loop in inner:
        products = [line for line in loop if re.match(r"([su]*dot|bfdot|fmla|[su]?mull?|[su]?mlal?)2?\t[vz]", line)]
        same = {"usdot": ("usdot", "sudot")}.get(wanted, (wanted,))  # sudot: an element of unsigned bytes
        assert all(line.startswith(tuple(f"{name}\t{registers}" for name in same)) for line in products), products
        elements = [line for line in products if re.search(r"\[\d\]$", line)]
        assert bool(elements) == (wanted != "bfdot" and registers == "v"), products
        assert not stack_vectors(loop), stack_vectors(loop)


# --- what it computes

MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include "layer.h"

static void *get(const char *name, size_t bytes) {{
  FILE *file = fopen(name, "rb");
  void *start = malloc(bytes + 64);
  if (!file || fread(start, 1, bytes, file) != bytes) exit(99);
  fclose(file);
  return start;
}}

int main(void) {{
  void *filters = malloc({packed}), *y = malloc({output}), *workspace = malloc({workspace} + 1);
  int status = im2win_conv_layer_pack(get("filter", {filter}), filters);
  if (!status) status = im2win_conv_layer({arguments}, y, workspace);
  FILE *file = fopen("output", "wb");
  fwrite(y, 1, {output}, file);
  fclose(file);
  return status;
}}
"""


def emulated(conv: Conv2d, machine: Machine, folder: Path, processor: str, tensors: dict[str, np.ndarray]) -> tuple[int, np.ndarray]:
    """The status and the output of the C library of a layer's default tile, in an emulator of a processor."""
    name, tile = default_tile(conv, "auto", machine, "exact")
    _, interface = c_abi.export_kernel(Kernel(conv, name, tile, machine), folder, "layer")
    for key, tensor in tensors.items():
        (folder / key).write_bytes(tensor.tobytes())
    sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    given = [f'get("{key}", {sizes[key]})' if key != "filter" else "filters" for key in conv.arguments[:-1]]
    output = np.empty(conv.output_shape, conv.out_dtype)
    code = MAIN.format(
        packed=math.prod(tile.pack.shape(conv)) * conv.itemsize, output=output.nbytes, workspace=interface.workspace,
        filter=sizes["filter"], arguments=", ".join(given),
    )  # fmt: skip
    (folder / "main.c").write_text(code)
    subprocess.run([COMPILER, "-static", "-pthread", "main.c", "liblayer.a", "-lm", "-o", "main"], cwd=folder, check=True)
    status = run(folder, processor)
    return status, np.frombuffer((folder / "output").read_bytes(), output.dtype).reshape(output.shape)


def run(folder: Path, processor: str) -> int:
    """The status of the program in an emulator."""
    assert EMULATOR
    return subprocess.run([EMULATOR, "-cpu", processor, "./main"], cwd=folder, check=False, timeout=60).returncode


LAYERS = [
    ("neoverse-n1", "n1-c8x9x11-k20x3x3-p1-bias-relu"), ("neoverse-v1-sve", "n1-c8x9x11-k20x3x3-p1-NHWC-bias"),
    ("neoverse-n1", "n1-c64x7x7-k20x3x3-s2-p1-int8-NHWC-bias"),
    ("neoverse-n1", "n1-c6x9x11-k20x3x3-p1-g2-uint8-out.uint8-zero131-outzero4-NHWC-bias-add"),
    ("neoverse-v1", "n1-c7x8x9-k17x3x2-p1-uint8-zero7-bias"), ("neoverse-v1-sve", "n1-c16x8x9-k16x3x3-p1-int8-out.int8-zerom3-bias"),
    ("neoverse-v1", "n1-c16x8x9-k17x3x2-p1-bfloat16-NHWC-bias-add"), ("neoverse-v1-sve", "n1-c8x8x17-k16x1x1-bfloat16"),
]  # fmt: skip
MORE = [
    ("cortex-a78", "n1-c8x9x11-k8x3x3-p1-g8-NHWC"),
    ("neoverse-v1-sve", "n1-c7x8x9-k17x3x2-p1-uint8-zero7-NHWC"),
    ("neoverse-v1", "n1-c32x8x9-k17x3x2-d2-p1-uint8-zero7-NHWC"), ("neoverse-n1", "n1-c7x8x9-k17x3x2-p1-bfloat16-bias-add"),
    ("neoverse-v1", "n1-c7x8x9-k17x3x2-p1-bfloat16-bias"), ("neoverse-v1", "n1-c16x7x9-k16x3x3-p1-g16-int8-NHWC"),
    ("cortex-a76", "n1-c3x19x21-k24x7x7-s2-p3-int8-NHWC-relu"), ("cortex-a76", "n1-c16x9x8-k16x3x3-s2-p1-g16-uint8-zero131"),
    ("neoverse-n1", "n2-c12x6x7-k6x3x3-p1-g2-int8"),
]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("name", "key"), [*LAYERS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)])
def test_libraries_in_an_emulator(name: str, key: str, tmp_path: Path) -> None:
    """Cross-compiled layers give every output of the oracle, to the last bit. A CPU without their instructions refuses the call."""
    conv, machine = Conv2d.parse(key), arm.named(name, 2)
    tensors = dot_tensors(conv)
    status, y = emulated(conv, machine, tmp_path, CPUS.get(name, "max"), tensors)
    expected = oracle(conv, **tensors).astype(conv.out_dtype)
    assert status == 0 and np.array_equal(y.astype(np.float64), expected.astype(np.float64))
    needs_more = conv.dtype in ("int8", "uint8") or machine.isa == arm.SVE or (conv.dtype == "bfloat16" and "bf16" in machine.features)
    if needs_more:
        assert run(tmp_path, "cortex-a72") == WRONG_CPU
    if machine.isa == arm.SVE:
        assert run(tmp_path, "max,sve-max-vq=1") == WRONG_CPU  # vectors of 128 bits


# --- what is refused, and what users name


def test_machines_by_name() -> None:
    assert arm.named("neoverse-n1").threads == 4 and arm.named("cortex-a76", 8).threads == 8
    with pytest.raises(ValueError, match=r"`machine` \(='m1'\) must be one of neoverse-n1, "):
        arm.named("m1")
    with pytest.raises(ValueError, match=r"`threads` \(=0\) must be at least 1"):
        arm.named("neoverse-n1", 0)
    with pytest.raises(ValueError, match=r"`machine` \(='neoverse-n1'\) is a CPU; `target` \(='cuda'\)"):
        chosen("n1-c8x9x11-k20x3x3", "cuda", machine="neoverse-n1")
    for name, machine in arm.KNOWN.items():
        assert {"dotprod"} <= set(machine.features) <= set(FEATURES) and name.startswith(machine.mcpu)
        conv = Conv2d.parse("n1-c16x14x14-k32x3x3-p1-int8")
        assert chosen(conv, machine=name).tile.lanes <= machine.lanes


def test_x86_and_arm_have_no_instruction_in_common() -> None:
    """Of int8 and bfloat16 beyond what every CPU has."""
    x86 = Machine("Some CPU", "sapphirerapids", "avx512f", 2, 16, 32, 48 << 10, 2 << 20, 32 << 20, ("avx512vnni", "avx512bf16"))
    wide = [one for one in INSTRUCTIONS if 1 not in one.lanes]
    own = {name: {one.name for one in wide if not one.missing(machine, 4)} for name, machine in arm.KNOWN.items()}
    assert own["cortex-a76"] == {"sdot"} and own["neoverse-v1"] == {"sdot", "usdot", "bfdot"}
    assert {one.name for one in wide if not one.missing(x86, 4)} == {"vnni", "madd", "dpbf16"}


def test_exports_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cross compiler that is not there, and the instructions that a layer asks its CPU for."""
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    monkeypatch.setattr(arm.platform, "machine", lambda: "x86_64")
    if sys.platform.startswith("linux"):
        with pytest.raises(ToolchainError, match=f"Arm Neoverse N1 needs {COMPILER} and {arm.TRIPLE}-objcopy and {arm.TRIPLE}-ar on PATH"):
            c_abi.export_kernel(chosen("n1-c8x9x11-k20x3x3-int8", machine="neoverse-n1"), tmp_path)
    code = checks.instructions(arm.KNOWN["neoverse-v1-sve"], ["i8mm"])
    assert "(getauxval(16) >> 22 & 1) && (prctl(51) & 0xffff) >= 32 && (getauxval(26) >> 13 & 1)" in code
    assert checks.instructions(arm.KNOWN["neoverse-n1"]) == "static int instructions(void) { return 1; }"
