"""Builds an operator: selects the best known tile for the problem, or the analytic model's, then compiles and loads it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm

from im2win import __version__
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import Compiled, TileError, compile_module
from im2win.device import arm
from im2win.device.cpu import Machine
from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.records.lookup import choose
from im2win.registry import cpu_lowering, cuda_lowering
from im2win.registry.backends import Device, backend_for, device_for
from im2win.registry.interface import Tile
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import candidates, schedule_of
from im2win.runtime.cuda import CudaOp
from im2win.runtime.manifest import Manifest
from im2win.runtime.op import Op
from im2win.spec import methods
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


def build_tile(
    conv: Conv2d, name: str, tile: Any, device: Device, *, tuned: bool = False, overlap: bool | None = None
) -> Op:
    """Compiles one algorithm with one tile and loads it.

    Args:
        name: algorithm and schedule in one word.
        tuned: whether a tuning record chose the tile.
        overlap: on a GPU, whether kernels begin before the kernel before them in the stream has completed; None: where the analytic model
            expects a gain (`registry.cuda_lowering.overlaps`).

    Raises:
        TileError: the tile is not legal for the problem, or `overlap` is not for the device.
        ToolchainError: there is no linker, or no CUDA compiler.
    """
    if isinstance(device, Gpu):
        return _build_cuda(conv, name, tile, device, tuned, overlap)
    if overlap:
        raise TileError(f"`overlap` (={overlap}) is for kernels on a GPU, not on {device.name}.")
    row = schedule_of(name)
    compiled = compile_module(cpu_lowering.lower(conv, row, tile, device), device)
    compiled = replace(compiled, allocated=compiled.allocated + row.scheduler.held_bytes(conv, tile))
    return load_compiled(compiled, conv, name, tile.as_dict(), tile.pack, device, tuned=tuned)


def _build_cuda(conv: Conv2d, name: str, tile: Any, gpu: Gpu, tuned: bool, overlap: bool | None) -> Op:
    row = schedule_of(name)
    compiled = cuda_codegen.compile_module(cuda_lowering.lower(conv, row, tile, gpu, overlap), gpu)
    pack, made = row.on_gpu.pack(conv, tile), row.on_gpu.workspace_bytes(conv, tile)
    manifest = cuda_manifest(conv, name, tile.as_dict(), pack, gpu, threads=tile.threads, made=made, tuned=tuned)
    return _in_library(compiled, lambda path: CudaOp(manifest, path))


def cuda_manifest(
    conv: Conv2d, name: str, tile: Mapping[str, Any], pack: Any, gpu: Gpu, *, threads: int, made: int = 0, tuned: bool = False
) -> Manifest:
    """The manifest of a library of CUDA kernels.

    Args:
        name, tile: what the kernels were generated from.
        pack: how the filters are packed (`CudaPack` or `FilterPack`).
        threads: of a thread block.
        made: bytes of the workspace that a transform kernel fills before the product.
    """
    algorithm, schedule = methods.split(name)
    return Manifest(
        conv=conv, algorithm=algorithm, schedule=schedule, tile=dict(tile), pack=pack, target="cuda", machine=gpu.name, isa=gpu.arch,
        threads=threads, tuned=tuned, extra_bytes=made, tvm=tvm.__version__, im2win=__version__, made=made // conv.itemsize,
    )  # fmt: skip


def load_compiled(
    compiled: Compiled, conv: Conv2d, name: str, tile: Mapping[str, Any], pack: Pack, machine: Machine, *, tuned: bool = False
) -> Op:
    """Loads a compiled CPU kernel as an operator. Its library is a temporary file that lives as long as the operator.

    Raises:
        ToolchainError: there is no linker.
    """
    algorithm, schedule = methods.split(name)
    manifest = Manifest(
        conv=conv, algorithm=algorithm, schedule=schedule, tile=dict(tile), pack=pack, target="cpu", machine=machine.name,
        isa=machine.isa, threads=machine.threads, tuned=tuned, extra_bytes=compiled.allocated, tvm=tvm.__version__, im2win=__version__,
    )  # fmt: skip
    return _in_library(compiled, lambda path: Op(manifest, path))


def _in_library(compiled: Compiled, load: Callable[[Path], Op]) -> Op:
    """Exports a compiled kernel to a library in a temporary folder, which is removed with the operator, and loads it."""
    folder = Path(tempfile.mkdtemp(prefix="im2win-"))
    try:
        compiled.export(folder / "conv.so")
        op = load(folder / "conv.so")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(op, shutil.rmtree, folder, ignore_errors=True)
    return op


@dataclass(frozen=True)
class Kernel:
    """What to build: a kernel for a problem on a device, by algorithm and tile; `tuned` if a record of this layer chose them."""

    conv: Conv2d
    algorithm: str
    tile: Any
    device: Device
    tuned: bool = False


def build(
    conv: Conv2d | str,
    target: str = "cpu",
    *,
    logs: Any = None,
    algorithm: str = "auto",
    tile: Tile | Mapping[str, Any] | None = None,
    threads: int | None = None,
    accuracy: Accuracy = "float32",
) -> Op:
    """Builds an operator for a problem. It uses the tuning record that applies, or else the analytic model's tile. It never tunes.

    Args:
        conv: the problem, or its key.
        target: "cpu" or "cuda".
        logs: folders of tuning records (a path, or several), searched before the user's own (`IM2WIN_LOGS`) and those of the package.
        algorithm: a name of the registry, or "auto" for the fastest known one.
        tile: build exactly this tile, given as the schedule's tile or as its plain values. It requires a named `algorithm`.
        threads: CPUs to schedule for; all that the process may use by default.
        accuracy: the rounding that kernels may use. "exact": sums of products in IEEE float32. "float32": also Winograd's algorithm, and on
            a GPU sums of TF32 products, where their errors stay within the tolerance of float32 sums. "tf32": also plain TF32, on a GPU.
            "winograd": also Winograd tiles transformed in float16 and int8 (docs/winograd.md states their errors).

    Raises:
        NoGpuError: target "cuda" without a usable GPU.
        ValueError: unknown target or algorithm, unsupported problem, illegal tile; the message names argument, value and rule.
    """
    one = chosen(conv, target, logs=logs, algorithm=algorithm, tile=tile, threads=threads, accuracy=accuracy)
    return build_tile(one.conv, one.algorithm, one.tile, one.device, tuned=one.tuned)


def chosen(
    conv: Conv2d | str,
    target: str = "cpu",
    *,
    logs: Any = None,
    algorithm: str = "auto",
    tile: Tile | Mapping[str, Any] | None = None,
    threads: int | None = None,
    accuracy: Accuracy = "float32",
    machine: str | None = None,
) -> Kernel:
    """The kernel that `build` compiles for these arguments; with `machine` for an Arm CPU of that name (`device.arm`), not for this one.

    Raises:
        ValueError: unknown `machine`, or one with another target than "cpu". Others as for `build`.
    """
    conv = Conv2d.parse(conv) if isinstance(conv, str) else conv
    if machine is not None and target != "cpu":
        raise ValueError(f"`machine` (={machine!r}) is a CPU; `target` (={target!r}) must then be cpu.")
    device = arm.named(machine, threads) if machine is not None else device_for(target, threads)
    if tile is not None:
        if algorithm == "auto":
            raise ValueError("`tile` needs a named `algorithm`: the same numbers mean different kernels.")
        row = candidates(algorithm, conv, target, accuracy)[0]
        if not isinstance(tile, Mapping) and not hasattr(tile, "as_dict"):
            raise ValueError(f"`tile` (={tile!r}) must be a tile of `algorithm` {algorithm}, or a mapping of its plain values.")
        return Kernel(conv, row.key, backend_for(device).tile(row, tile if isinstance(tile, Mapping) else tile.as_dict()), device)
    name, best, tier = looked_up(conv, device, logs, algorithm, accuracy)
    return Kernel(conv, name, best, device, tier == "exact")


def looked_up(
    conv: Conv2d, device: Device, logs: Any = None, algorithm: str = "auto", accuracy: Accuracy = "float32"
) -> tuple[str, Any, str]:
    """Algorithm and tile for a problem on a device, and the tier of the look-up that they come from ("default": the analytic model's tile).

    Raises:
        ValueError: unknown algorithm, or no algorithm supports the problem.
    """
    rows = candidates(algorithm, conv, "cuda" if isinstance(device, Gpu) else "cpu", accuracy)
    found = choose(conv, device, [row.key for row in rows], logs, accuracy)
    if found is not None:
        return found.algorithm, found.tile, found.tier
    name, tile = default_tile(conv, algorithm, device, accuracy)
    return name, tile, "default"
