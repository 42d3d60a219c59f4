"""Building an operator: the best tile that is known for the problem, or the model's, compiled and loaded."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from im2win import __version__
from im2win.algorithms import Algorithm, algorithm, candidates
from im2win.codegen import compile_library, lower
from im2win.lookup import choose
from im2win.machine import Machine
from im2win.problem import Conv2d
from im2win.ranking import default_tile
from im2win.runtime import Manifest, Op
from im2win.schedules.legality import scratch_bytes
from im2win.schedules.tile import Tile

TARGETS = ("cpu",)


def check_target(target: str) -> None:
    """Raises ValueError for a target that no schedule is for."""
    if target not in TARGETS:
        raise ValueError(f"`target` (={target!r}) must be one of {', '.join(TARGETS)}.")


def extra_bytes(conv: Conv2d, row: Algorithm, tile: Tile, machine: Machine) -> int:
    """Bytes that a call allocates beside input, packed filter and output: the stored transform, or each thread's strip, and the way out."""
    plan = row.plan(conv)
    steps = conv.batch * (conv.output_size[0] // tile.strip) * (tile.pack.blocks(conv) // tile.pass_blocks)
    staged = row.strip_elements(conv, tile.strip) * conv.itemsize if plan.where == "strip" else 0
    private = staged + scratch_bytes(conv, tile, matrix=plan.matrix)
    return row.transform_bytes(conv) + min(machine.threads, steps) * private


def build_tile(conv: Conv2d, name: str, tile: Tile, machine: Machine, *, tuned: bool = False) -> Op:
    """Compiles one algorithm with one tile.

    Raises:
        TileError: the tile is not legal for the problem.
        ToolchainError: there is no linker.
    """
    row = algorithm(name)
    module = lower(conv, row, tile, machine)
    manifest = Manifest(
        conv=conv, algorithm=name, tile=tile.as_dict(), pack=tile.pack, target="cpu", machine=machine.name, isa=machine.isa,
        threads=machine.threads, tuned=tuned, extra_bytes=extra_bytes(conv, row, tile, machine), tvm=tvm.__version__, im2win=__version__,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="im2win-"))
    try:
        compile_library(module, machine, folder / "conv.so")
        op = Op(manifest, folder / "conv.so")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(op, shutil.rmtree, folder, ignore_errors=True)  # the file lives as long as its operator
    return op


def build(
    conv: Conv2d | str,
    target: str = "cpu",
    *,
    logs: Any = None,
    algorithm: str = "auto",
    tile: Tile | Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> Op:
    """Builds an operator for a problem: with its tuning record if one applies, else with the model's tile. Never tunes.

    Args:
        conv: the problem, or its key.
        target: "cpu".
        logs: a folder of tuning records looked up before those that ship with the package; None for these only.
        algorithm: a name of the registry, or "auto" for the fastest known.
        tile: build exactly this (then `algorithm` must be named).
        threads: CPUs to schedule for; all that the process may use by default.

    Raises:
        ValueError: unknown target or algorithm, unsupported problem, illegal tile; the message names argument, value and rule.
    """
    conv = Conv2d.parse(conv) if isinstance(conv, str) else conv
    check_target(target)
    machine = Machine.host(threads)
    if tile is not None:
        if algorithm == "auto":
            raise ValueError("`tile` needs a named `algorithm`: the same numbers mean different kernels.")
        chosen = tile if isinstance(tile, Tile) else Tile.from_dict(tile)
        return build_tile(conv, candidates(algorithm, conv)[0].name, chosen, machine)
    rows = candidates(algorithm, conv)
    found = choose(conv, machine, [row.name for row in rows], logs)
    if found is not None:
        return build_tile(conv, found.algorithm, found.tile, machine, tuned=found.exact)
    name, chosen = default_tile(conv, algorithm, machine)
    return build_tile(conv, name, chosen, machine)
