"""Compiles kernels in two steps: TVM generates them, then the reconstructor applies the rules of a tile, or refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tvm

from im2win.codegen import rewritten as cuda_reconstruct
from im2win.codegen.cuda import SOURCE, kernel_module
from im2win.codegen.rewritten import Function
from im2win.compute import nest
from im2win.device.gpu import Gpu
from im2win.reconstruct.parse.unit import Kernel, Unit
from im2win.reconstruct.rules.bounds import Multiprocessor
from im2win.reconstruct.rulesets import Applied, Settings, rewrite
from im2win.reconstruct.text_rules import ReconstructError
from im2win.schedules.cuda.families.base import Reconstruction
from im2win.spec.symbols import SYMBOL, TRANSFORM_PARTS

INPUT = "input"
MADE = "data"  # the kernel's argument that holds the workspaces between its launches, see `runtime.cuda.Kernels`


def lower(functions: Mapping[str, Any], reconstruction: Reconstruction, gpu: Gpu) -> tvm.IRModule:
    """The kernels after reconstruction; their source is the module's attribute `codegen.cuda.SOURCE`.

    Args:
        functions: kernels by name, as the schedule makes them; the rules apply to the convolution, `SYMBOL`.

    Raises:
        ReconstructError: a rule does not match what TVM generated; the message is the rule's reason.
    """
    made, applied = list[Function](), dict[str, Applied]()
    for function in map(_called, cuda_reconstruct.functions(kernel_module(functions), gpu, reconstruction.pipeline)):
        done = _rewritten(function.unit, reconstruction, gpu) if function.name == SYMBOL else Applied(function.unit)
        applied[function.name] = done
        made.append(Function(function.name, function.tensors, done.unit))
    rebuilt = cuda_reconstruct.rebuilt(made, gpu, applied, MADE)
    return rebuilt.module.with_attr(SOURCE, rebuilt.source)


def _renamed(function: Function, names: Mapping[str, str]) -> Function:
    """The function with other names for some of its tensors."""
    source = re.sub(rf"\b({'|'.join(names)})_ptr\b", lambda match: f"{names[match[1]]}_ptr", function.unit.source)
    launches = tuple(
        replace(launch, arguments=tuple(names.get(one, one) if isinstance(one, str) else one for one in launch.arguments))
        for launch in function.unit.launches
    )
    tensors = tuple((names.get(name, name), shape, dtype) for name, shape, dtype in function.tensors)
    return Function(function.name, tensors, Unit(source, launches, function.unit.workspace))


def _called(function: Function) -> Function:
    """A function over a definition's tensors as callers know it.

    Its output is "output". A flat tensor `MADE` behind its input, which then is `INPUT`, holds the tensors between its launches, if any.
    Functions that have this form already stay as they are. The tensor that a transform alone writes is as flat as `MADE`.
    """
    workspace = function.unit.workspace
    name, shape, dtype = function.tensors[-1]
    if function.name == TRANSFORM_PARTS and len(shape) > 1:
        flat = cuda_reconstruct.placed_bytes([(shape, dtype)]) // cuda_reconstruct.bytes_of((), dtype)
        return replace(function, tensors=(*function.tensors[:-1], (name, (flat,), dtype)))
    if function.tensors[-1][0] == nest.OUT:
        function = _renamed(function, {nest.OUT: "output"})
    if not workspace or function.tensors[0][0] != MADE:
        return function
    function = _renamed(function, {MADE: INPUT})
    first, *others = function.tensors
    elements = cuda_reconstruct.placed_bytes(workspace.values()) // cuda_reconstruct.bytes_of((), first[2])
    return replace(function, tensors=(first, (MADE, (elements,), first[2]), *others))


def _rewritten(unit: Unit, reconstruction: Reconstruction, gpu: Gpu) -> Applied:
    """What the rules make of the convolution.

    Barriers are removed before kernels are fused, since those that fusion adds are always needed.

    Raises:
        ReconstructError: see `lower`; also if a block barrier remains in a kernel that is to need none.
    """
    applied, sizes = Applied(unit), Multiprocessor(gpu.registers, gpu.shared, gpu.threads)
    settings = Settings(shared=gpu.block_shared, wave=reconstruction.wave, sizes=sizes)
    for name in reconstruction.rules:
        done = rewrite(applied.unit, [name], settings, must=reconstruction.must)
        if name == "barriers" and (left := [kernel for kernel in done.unit.kernels.values() if _waits(kernel)]):
            raise ReconstructError(f"barriers: kernel {left[0].name} still waits for all its warps: {'; '.join(done.notes)}")
        applied = Applied(done.unit, applied.matches + done.matches, applied.notes + done.notes)
    return applied


def _waits(kernel: Kernel) -> bool:
    """Whether a kernel has a barrier of a whole thread block."""
    return any(barrier.scope == "block" for barrier in kernel.barriers)
