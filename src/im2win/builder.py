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
from im2win.algorithms import algorithm, candidates
from im2win.codegen import Compiled, compile_module, lower
from im2win.lookup import choose
from im2win.machine import Machine
from im2win.packing import FilterPack
from im2win.problem import Conv2d
from im2win.ranking import default_tile
from im2win.runtime import Manifest, Op
from im2win.schedules.tile import Tile

TARGETS = ("cpu",)


def check_target(target: str) -> None:
    """Raises ValueError for a target that no schedule is for."""
    if target not in TARGETS:
        raise ValueError(f"`target` (={target!r}) must be one of {', '.join(TARGETS)}.")


def build_tile(conv: Conv2d, name: str, tile: Tile, machine: Machine, *, tuned: bool = False) -> Op:
    """Compiles one algorithm with one tile.

    Raises:
        TileError: the tile is not legal for the problem.
        ToolchainError: there is no linker.
    """
    compiled = compile_module(lower(conv, algorithm(name), tile, machine), machine)
    return load_compiled(compiled, conv, name, tile.as_dict(), tile.pack, machine, tuned=tuned)


def load_compiled(
    compiled: Compiled, conv: Conv2d, name: str, tile: Mapping[str, Any], pack: FilterPack, machine: Machine, *, tuned: bool = False
) -> Op:
    """An operator from a compiled kernel, in a library of its own that lives as long as the operator.

    Raises:
        ToolchainError: there is no linker.
    """
    manifest = Manifest(
        conv=conv, algorithm=name, tile=dict(tile), pack=pack, target="cpu", machine=machine.name, isa=machine.isa,
        threads=machine.threads, tuned=tuned, extra_bytes=compiled.allocated, tvm=tvm.__version__, im2win=__version__,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="im2win-"))
    try:
        compiled.export(folder / "conv.so")
        op = Op(manifest, folder / "conv.so")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(op, shutil.rmtree, folder, ignore_errors=True)
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
