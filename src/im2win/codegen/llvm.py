"""From a scheduled module to a shared library for a CPU: LLVM, linker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.ir.instrument import pass_instrument
from tvm.support import cc
from tvm_ffi import structural_hash

from im2win.codegen.workspace import Allocations
from im2win.device.cpu import Machine
from im2win.schedules.cpu.loop_peeling import CONFIG, mark_tails
from im2win.schedules.cpu.registers import LAST_PASS, PIPELINE
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

DIGITS = 16  # of a fingerprint


class TileError(ValueError):
    """A tile that is not legal for a problem; the message lists the rules it breaks."""


class ToolchainError(RuntimeError):
    """No linker on this machine."""


@dataclass(frozen=True)
class Compiled:
    """TVM's executable, the bytes that a call of it allocates beside its arguments, and the fingerprint of its code (`digest`)."""

    executable: Any
    allocated: int
    fingerprint: str

    def export(self, path: Path) -> None:
        """Links the shared library `path`.

        Raises:
            ToolchainError: no C++ compiler to link with.
        """
        if not cc.get_cc():
            raise ToolchainError("linking a shared library needs a C++ compiler on PATH (g++ or clang++); none was found.")
        self.executable.export_library(str(path))


def llvm_target(machine: Machine, options: Sequence[str] = ()) -> Any:
    """TVM's target for a machine; `options` are LLVM's own."""
    extra = {"cl-opt": list(options)} if options else {}
    return tvm.target.Target({"kind": "llvm", "mcpu": machine.mcpu, "num-cores": machine.threads, **extra})


def kernel_module(conv: Conv2d, scheduled: Any) -> tvm.IRModule:
    """A schedule as a module to compile: its name, its tails marked, its tensors at any alignment."""
    module = tvm.IRModule({SYMBOL: scheduled.mod["main"].with_attr("global_symbol", SYMBOL)})
    return any_alignment(mark_tails(module), conv.itemsize)


def any_alignment(module: tvm.IRModule, alignment: int) -> tvm.IRModule:
    """Lets the kernel's arguments lie at any element: numpy aligns to 16 bytes, TVM assumes 64 and would use aligned loads.

    Buffer types are immutable and TVM offers no setter, so this edits the module's JSON form: the types of the function's parameters.
    """
    graph = json.loads(tvm.ir.save_json(module))
    nodes = graph["nodes"]
    for function in (node for node in nodes if node["type"] == "tirx.PrimFunc"):
        for parameter in nodes[function["data"]["params"]]["data"]:
            buffer = nodes[nodes[parameter]["data"]["ty"]]
            buffer["data"]["data_alignment"] = alignment
    return tvm.ir.load_json(json.dumps(graph))


def compile_module(module: tvm.IRModule, machine: Machine, options: Sequence[str] = ()) -> Compiled:
    """Compiles a module for a machine; `options` go to LLVM."""
    watch, lowered = Allocations(machine.threads), _Lowered()
    with tvm.transform.PassContext(config=CONFIG, instruments=[watch, lowered]):
        executable = tvm.compile(module, llvm_target(machine, options), tir_pipeline=PIPELINE)
    return Compiled(executable, watch.bytes, lowered.fingerprint)


def digest(*parts: object) -> str:
    """A fingerprint: hexadecimal digits of the texts of `parts`."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:DIGITS]


@pass_instrument
class _Lowered:
    """Takes the fingerprint of a module when it has been lowered to what LLVM compiles, whatever CPU that is for."""

    fingerprint = ""

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        if info.name == LAST_PASS:
            functions = {name: function.without_attr("target") for name, function in module.functions.items()}
            self.fingerprint = digest(structural_hash(tvm.IRModule(functions), map_free_vars=True))


def fingerprint(module: tvm.IRModule) -> str:
    """The fingerprint that compiling a scheduled module would give, without compiling: the same on every CPU."""
    lowered, any_cpu = _Lowered(), tvm.target.Target("llvm")
    lowering, _, _ = tvm.tirx.get_tir_pipeline(PIPELINE)
    with tvm.transform.PassContext(config=CONFIG, instruments=[lowered]):
        lowering(tvm.tirx.transform.BindTarget(any_cpu.with_host(any_cpu))(module))
    return lowered.fingerprint
