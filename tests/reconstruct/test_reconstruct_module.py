"""Back into TVM: a reconstructed module has the same functions, other kernels and launches, and compiles and exports like any other."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import emulated
import numpy as np
import pytest
import tvm
import winograd_pair
from paths import SUPPORT
from winograd_pair import NAME, Pair

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.cuda_source import generate
from im2win.codegen.llvm import ToolchainError
from im2win.codegen.rewritten import compile_reconstructed, functions, reconstruct_module, workspace_bytes
from im2win.common.worker_pool import Worker
from im2win.device.gpu import H200
from im2win.emulator import Emulation, Launch
from im2win.reconstruct import ReconstructError
from im2win.reconstruct.rulesets import Settings
from im2win.reconstruct.validate.validators import poisoned
from im2win.registry import cuda_lowering
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.passes import CONFIG, PIPELINE
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d

PRIVATE = Pair(private=True)


def launches_of(module: tvm.IRModule) -> tuple[Launch, ...]:
    """As TVM's host code has them."""
    return generate(module, cuda_codegen.cuda_target(H200), CONFIG, PIPELINE).launches


@pytest.mark.parametrize("rules", [(), ("barriers",), ("pkf-shmem", "barriers"), ("pkf-llc",)], ids="+".join)
def test_the_module_launches_what_the_rules_made(rules: tuple[str, ...]) -> None:
    made = reconstruct_module(winograd_pair.schedule(PRIVATE), H200, rules)
    unit = made.applied[NAME].unit
    assert list(made.applied) == [NAME] == [symbol.name_hint for symbol in made.module.functions]
    for wanted, given in zip(unit.launches, launches_of(made.module), strict=True):
        assert (wanted.grid, wanted.block, wanted.dynamic_bytes) == (given.grid, given.block, given.dynamic_bytes)
        row = re.search(rf"^extern .* {given.kernel}\(([^)]*)\) {{", made.source, re.MULTILINE)
        assert row and [name.split()[-1].removesuffix("_ptr") for name in row[1].split(",")] == list(given.arguments)
    assert made.changed == bool(rules)
    assert workspace_bytes(made) == {"barriers": 32768, "pkf-llc": 32768 + 20}.get("+".join(rules), 32768 if not rules else 0)


def test_its_source_computes_the_same() -> None:
    """Under TVM's names, with its order of parameters, behind TVM's launches."""
    made = reconstruct_module(winograd_pair.schedule(PRIVATE), H200, ["pkf-llc"])
    tensors, spaces = winograd_pair.tensors(PRIVATE), made.applied[NAME].unit.workspace
    held = {name: poisoned(int(np.prod(shape)), dtype) for name, (shape, dtype) in spaces.items()}
    Emulation(made.source, launches_of(made.module))({**tensors, **held}, seed=1, resident=4)
    np.testing.assert_array_equal(tensors["output"], winograd_pair.expected(PRIVATE, tensors))


def test_it_compiles_and_exports(tmp_path: Path) -> None:
    try:
        cuda_codegen.compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    compiled, made = compile_reconstructed(winograd_pair.schedule(PRIVATE), H200, ["pkf-shmem", "barriers"])
    assert compiled.allocated == 0 and compiled.executable.mod.imports[0].inspect_source() == made.source
    compiled.export(tmp_path / "winograd.so")
    library = (tmp_path / "winograd.so").read_bytes()
    assert library.startswith(b"\x7fELF") and b"winograd_kernel" in library
    assert cuda_codegen.cubin(made.source, H200).startswith(b"\x7fELF")


def test_a_rule_that_does_not_fit_leaves_the_kernels_unfused(caplog: pytest.LogCaptureFixture) -> None:
    made = reconstruct_module(winograd_pair.schedule(Pair()), H200, ["pkf-shmem"], Settings(shared=4096))
    assert not made.changed and len(launches_of(made.module)) == 2
    assert "pkf-shmem does not apply, the source stays as it is: V takes 8192 bytes" in caplog.text


def test_our_own_kernels_come_back_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """Two functions in a module, our own pipeline: nothing to fuse within a function, and no barrier too many."""
    conv = Conv2d.parse("n1-c20x5x6-k32x3x3-p1")
    tile = MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc")
    module = cuda_lowering.lower(conv, schedule_of("im2win/stored"), tile, H200, overlap=False)
    before = cuda_codegen.generate_source(module, H200)
    with caplog.at_level(logging.INFO, "im2win.reconstruct"):
        made = reconstruct_module(module, H200, ["barriers", "pkf-shmem"], pipeline=PIPELINE)
    assert not made.changed and caplog.text.count("needed") == 2 and caplog.text.count("no workspace lies between") == 2
    assert [(launch.kernel, launch.grid, launch.block, launch.dynamic_bytes) for launch in launches_of(made.module)] == [
        (launch.kernel, launch.grid, launch.block, launch.dynamic_bytes) for launch in before.launches
    ]
    for launch in before.launches:
        body = re.search(rf"^extern .* {launch.kernel}\([^)]*\) {{\n.*?\n}}", before.source, re.MULTILINE | re.DOTALL)
        assert body and body[0].split("{", 1)[1] in made.source


def test_a_function_that_hands_its_kernels_numbers_stays_with_tvm() -> None:
    conv = Conv2d.parse("n1-c20x10x9-k24x3x3-p1")
    module = cuda_lowering.lower(conv, emulated.ROWS["mcfa/tiled"], MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc"), H200)
    with pytest.raises(ReconstructError, match=r"kernel conv2d_kernel takes 0, which is no tensor of conv2d: numbers and parts of tensors"):
        reconstruct_module(module, H200, ["barriers"], pipeline=PIPELINE)


def test_unknown_rules_are_an_error() -> None:
    with pytest.raises(ReconstructError, match="must be among"):
        reconstruct_module(winograd_pair.schedule(PRIVATE), H200, ["fuse"])


def test_functions_have_their_tensors() -> None:
    [function] = functions(winograd_pair.schedule(PRIVATE), H200)
    assert function.tensors == (
        ("data", (8, 18, 18), "float32"), ("filter", (16, 8, 32), "float32"), ("output", (16, 32, 64), "float32"),
    )  # fmt: skip


def test_a_process_that_builds_reconstructs_too(tmp_path: Path) -> None:
    """Rules are arguments, not a callback that somebody has to have registered: a tuner's worker sees them like everybody else."""
    with Worker("worker_reconstructs", {"PYTHONPATH": ":".join([str(SUPPORT), *filter(None, sys.path)])}, torch=False) as worker:
        found: Any = worker.call(("pkf-shmem", "barriers"), 120)
    assert found == [(NAME, "winograd_kernel", 1, 2)]
