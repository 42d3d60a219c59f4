"""Compiles Winograd kernels for tensor cores: TVM generates them, then the reconstructor applies the tile's rules or refuses."""

from __future__ import annotations

import tvm

from im2win.codegen import rewritten as cuda_reconstruct
from im2win.codegen.cuda import SOURCE, kernel_module
from im2win.codegen.rewritten import Function
from im2win.device.gpu import Gpu
from im2win.reconstruct.parse.unit import Kernel, Unit
from im2win.reconstruct.rulesets import Applied, Settings, rewrite
from im2win.reconstruct.text_rules import ReconstructError
from im2win.schedules.studies.winograd_tc import kernel
from im2win.schedules.studies.winograd_tc.passes import PIPELINE
from im2win.schedules.studies.winograd_tc.tile import TensorCoreTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL, TRANSFORM_PARTS

MADE = "data"  # the kernel's argument that holds the workspaces between its launches, see `runtime.cuda.Kernels`


def lower(conv: Conv2d, tile: TensorCoreTile, gpu: Gpu) -> tvm.IRModule:
    """The reconstructed kernels of a legal tile; their source is the module's attribute `codegen.cuda.SOURCE`.

    Raises:
        ReconstructError: a rule of the tile does not match what TVM generated; the message is the rule's reason.
    """
    scheduled = kernel_module(kernel.functions(conv, tile, SYMBOL, TRANSFORM_PARTS))
    made, applied = list[Function](), dict[str, Applied]()
    for function in cuda_reconstruct.functions(scheduled, gpu, PIPELINE):
        done = applied[function.name] = _rewritten(function.unit, tile, gpu) if function.name == SYMBOL else Applied(function.unit)
        made.append(Function(function.name, function.tensors, done.unit))
    rebuilt = cuda_reconstruct.rebuilt(made, gpu, applied, MADE)
    return rebuilt.module.with_attr(SOURCE, rebuilt.source)


def _rewritten(unit: Unit, tile: TensorCoreTile, gpu: Gpu) -> Applied:
    """The convolution after the tile's rules.

    Barriers are removed before kernels are fused, since those that fusion adds are always needed.

    Raises:
        ReconstructError: see `lower`; also if a block barrier remains in a kernel that is to need none.
    """
    applied = Applied(unit)
    for name in tile.rules:
        done = rewrite(applied.unit, [name], Settings(shared=gpu.block_shared, wave=tile.wave), must=True)
        if name == "barriers" and (left := [kernel for kernel in done.unit.kernels.values() if _waits(kernel)]):
            raise ReconstructError(f"barriers: kernel {left[0].name} still waits for all its warps: {'; '.join(done.notes)}")
        applied = Applied(done.unit, applied.matches + done.matches, applied.notes + done.notes)
    return applied


def _waits(kernel: Kernel) -> bool:
    """Whether a kernel has a barrier of a whole thread block."""
    return any(barrier.scope == "block" for barrier in kernel.barriers)
