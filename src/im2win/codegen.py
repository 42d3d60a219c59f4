"""From a problem, an algorithm and a tile to a shared library: definition, schedule, LLVM, linker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.support import cc

from im2win.algorithms import Algorithm
from im2win.allocation import Allocations
from im2win.machine import Machine
from im2win.problem import Conv2d
from im2win.schedules.cpu import schedule
from im2win.schedules.legality import problems
from im2win.schedules.registers import PIPELINE
from im2win.schedules.tails import CONFIG, mark_tails
from im2win.schedules.tile import Tile

SYMBOL = "conv2d"


class TileError(ValueError):
    """A tile that is not legal for a problem; the message lists the rules it breaks."""


class ToolchainError(RuntimeError):
    """No linker on this machine."""


@dataclass(frozen=True)
class Compiled:
    """TVM's executable, and the bytes that a call of it allocates beside its arguments."""

    executable: Any
    allocated: int

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


def lower(conv: Conv2d, algorithm: Algorithm, tile: Tile, machine: Machine) -> tvm.IRModule:
    """The scheduled module, one function `conv2d` over the tensors of `conv.arguments`.

    Raises:
        TileError: the tile is not legal.
    """
    plan = algorithm.plan(conv)
    broken = problems(conv, tile, machine, matrix=plan.matrix)
    if broken:
        raise TileError(f"{algorithm.name} on {conv}: " + "; ".join(broken) + ".")
    return kernel_module(conv, schedule(conv, algorithm.define(conv, tile.pack, tile.strip), tile, plan))


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
    watch = Allocations(machine.threads)
    with tvm.transform.PassContext(config=CONFIG, instruments=[watch]):
        executable = tvm.compile(module, llvm_target(machine, options), tir_pipeline=PIPELINE)
    return Compiled(executable, watch.bytes)
