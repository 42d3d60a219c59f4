"""Compiles a scheduled module to a shared library for a CPU: LLVM, linker."""

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
from tvm_ffi.serialization import from_json_graph_str

from im2win.codegen import pool
from im2win.codegen.workspace import Allocations
from im2win.device.arm import target_attributes
from im2win.device.cpu import Machine
from im2win.schedules.cpu.loop_peeling import CONFIG, mark_tails
from im2win.schedules.cpu.registers import LAST_PASS, PIPELINE
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

DIGITS = 16  # hexadecimal digits of a fingerprint


class TileError(ValueError):
    """A tile that is not legal for a problem. The message lists the rules that it breaks."""


class ToolchainError(RuntimeError):
    """A compiler or linker that this machine lacks."""


@dataclass(frozen=True)
class Compiled:
    """TVM's executable, the bytes that a call allocates beside its arguments, and the kernel's fingerprint (`digest`)."""

    executable: Any
    allocated: int
    fingerprint: str

    def export(self, path: Path) -> None:
        """Links the shared library `path`, with the pool that runs its parallel loops.

        Raises:
            ToolchainError: there is no C++ compiler to link with.
        """
        if not cc.get_cc():
            raise ToolchainError("linking a shared library needs a C++ compiler on PATH (g++ or clang++); none was found.")
        launcher = pool.launcher()
        self.executable.export_library(str(path), addons=[str(launcher)] if launcher else None)


def llvm_target(machine: Machine, options: Sequence[str] = ()) -> Any:
    """TVM's target for a machine; `options` are passed to LLVM."""
    extra = target_attributes(machine)
    flags = [*extra.pop("cl-opt", ()), *options]
    return tvm.target.Target(
        {"kind": "llvm", "mcpu": machine.mcpu, "num-cores": machine.threads, **extra, **({"cl-opt": flags} if flags else {})}
    )


def kernel_module(conv: Conv2d, scheduled: Any) -> tvm.IRModule:
    """A module to compile from a schedule: the kernel is named, its remainder loops are marked, and its tensors may have any alignment."""
    module = tvm.IRModule({SYMBOL: scheduled.mod["main"].with_attr("global_symbol", SYMBOL)})
    return any_alignment(mark_tails(module), conv.itemsize)


def any_alignment(module: tvm.IRModule, alignment: int) -> tvm.IRModule:
    """Allows the kernel's arguments to start at any element.

    TVM assumes 64-byte alignment and would use aligned loads, but numpy aligns to 16 bytes.

    TVM's buffer types are immutable and have no setter, so this edits the types of the function's parameters in the module's JSON form,
    read as it is: `tvm.ir.load_json` looks first for what older versions of TVM wrote, which takes longer than lowering the module.
    """
    graph = json.loads(tvm.ir.save_json(module))
    nodes = graph["nodes"]
    for function in (node for node in nodes if node["type"] == "tirx.PrimFunc"):
        for parameter in nodes[function["data"]["params"]]["data"]:
            buffer = nodes[nodes[parameter]["data"]["ty"]]
            buffer["data"]["data_alignment"] = alignment
    return from_json_graph_str(json.dumps(graph))


def compile_module(module: tvm.IRModule, machine: Machine, options: Sequence[str] = ()) -> Compiled:
    """Compiles a module for a machine; `options` are passed to LLVM."""
    watch, lowered = Allocations(machine.threads), _Lowered()
    with tvm.transform.PassContext(config=CONFIG, instruments=[watch, lowered]):
        executable = tvm.compile(module, llvm_target(machine, options), tir_pipeline=PIPELINE)
    return Compiled(executable, watch.bytes, lowered.fingerprint)


def digest(*parts: object) -> str:
    """A fingerprint: hexadecimal digits of a hash over the texts of `parts`."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:DIGITS]


@pass_instrument
class _Lowered:
    """A pass instrument that takes the fingerprint of the lowered module, which does not depend on the CPU."""

    fingerprint = ""

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        if info.name == LAST_PASS:
            functions = {name: function.without_attr("target") for name, function in module.functions.items()}
            self.fingerprint = digest(structural_hash(tvm.IRModule(functions), map_free_vars=True))


def fingerprint(module: tvm.IRModule) -> str:
    """The fingerprint of a scheduled module without compiling it. It is the same on every CPU."""
    lowered, any_cpu = _Lowered(), tvm.target.Target("llvm")
    lowering, _, _ = tvm.tirx.get_tir_pipeline(PIPELINE)
    with tvm.transform.PassContext(config=CONFIG, instruments=[lowered]):
        lowering(tvm.tirx.transform.BindTarget(any_cpu.with_host(any_cpu))(module))
    return lowered.fingerprint
