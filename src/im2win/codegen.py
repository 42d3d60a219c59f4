"""From a problem, an algorithm and a tile to a shared library: definition, schedule, LLVM, linker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tvm
from tvm.support import cc

from im2win.algorithms import Algorithm
from im2win.machine import Machine
from im2win.problem import Conv2d
from im2win.schedules.cpu import schedule
from im2win.schedules.legality import problems
from im2win.schedules.tails import CONFIG, mark_tails
from im2win.schedules.tile import Tile

SYMBOL = "conv2d"


class TileError(ValueError):
    """A tile that is not legal for a problem; the message lists the rules it breaks."""


class ToolchainError(RuntimeError):
    """No linker on this machine."""


def llvm_target(machine: Machine) -> Any:
    """TVM's target for a machine."""
    return tvm.target.Target({"kind": "llvm", "mcpu": machine.mcpu, "num-cores": machine.threads})


def lower(conv: Conv2d, algorithm: Algorithm, tile: Tile, machine: Machine) -> tvm.IRModule:
    """The scheduled module, one function `conv2d` over the tensors of `conv.arguments`.

    Raises:
        TileError: the tile is not legal.
    """
    plan = algorithm.plan(conv)
    broken = problems(conv, tile, machine, matrix=plan.matrix)
    if broken:
        raise TileError(f"{algorithm.name} on {conv}: " + "; ".join(broken) + ".")
    sch = schedule(conv, algorithm.define(conv, tile.pack, tile.strip), tile, plan)
    module = tvm.IRModule({SYMBOL: sch.mod["main"].with_attr("global_symbol", SYMBOL)})
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


def compile_library(module: tvm.IRModule, machine: Machine, path: Path) -> None:
    """Compiles and links a lowered module into the shared library `path`.

    Raises:
        ToolchainError: no C++ compiler to link with.
    """
    if not cc.get_cc():
        raise ToolchainError("linking a shared library needs a C++ compiler on PATH (g++ or clang++); none was found.")
    with tvm.transform.PassContext(config=CONFIG):
        executable = tvm.compile(module, llvm_target(machine))
    executable.export_library(str(path))

