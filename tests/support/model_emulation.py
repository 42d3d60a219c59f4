"""Whole models for a GPU, their plan run kernel by kernel on the emulator, which several test files share."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.cuda_source import generate
from im2win.device.gpu import H200
from im2win.emulator import Emulation
from im2win.frontends.models.assembly import Assembly
from im2win.frontends.models.cuda import CudaKernels
from im2win.frontends.models.driver import Step
from im2win.frontends.models.precision import NARROW, chosen, widened, with_ports
from im2win.frontends.models.source import at_batch, read


def emulate(kernels: CudaKernels, step: Step, tensors: list[np.ndarray]) -> None:
    """Runs one step of a model on the emulator."""
    own = step.kernel in kernels.convolutions
    function = kernels.convolutions[step.kernel] if own else kernels.rest[step.kernel]
    module = cuda_codegen.kernel_module({step.kernel: function})
    made = cuda_codegen.generate_source(module, H200) if own else generate(module, cuda_codegen.cuda_target(H200))
    named = {parameter.name: tensor.reshape(-1) for parameter, tensor in zip(function.params, tensors, strict=True)}
    named |= {name: np.full(shape, 0, dtype) for name, (shape, dtype) in made.workspace.items()}
    source = re.sub(r"(__shfl\w*_sync\([^;]*), 32\)", r"\1)", made.source)  # the width of a warp, which the emulator has anyway
    source = source.replace("__activemask()", "0xffffffffu")
    emulation = Emulation(source, made.launches)
    for name in emulation.names:  # sums in parts lie in the workspace, which is the function's "data"
        named.setdefault(name, named.get(name.removesuffix("_ptr"), named.get("data")))
    emulation({name: named[name] for name in emulation.names}, seed=1)


def run(model: Any, feeds: dict[str, np.ndarray], dtype: str | None = None) -> tuple[list[np.ndarray], Assembly]:
    """The outputs of a model as its driver would compute them."""
    label, whole = read(model)
    precision, ports = chosen(whole, dtype), dict[str, str]()
    if precision in NARROW:
        whole, ports = widened(whole)
    source = with_ports(at_batch(whole, label, None), ports)
    kernels = CudaKernels(H200)
    assembly = Assembly(label, None, "exact", kernels, precision)
    assembly.add(source, 1)
    stored = [np.pad(one.reshape(-1).view(np.uint8), (0, -one.nbytes % 64)) for one in assembly.weights.arrays]
    weights = np.concatenate([*stored, np.zeros(1, np.uint8)])
    workspace = np.full(assembly.buckets[0].workspace, 0xFF, np.uint8)  # NaN
    results = [np.full(one.shape, np.nan if np.dtype(one.dtype).kind in "fV" else -1, one.dtype) for one in source.outputs]
    bases = [weights, workspace, *(feeds[one.name].reshape(-1).view(np.uint8) for one in source.inputs)]
    bases += [one.reshape(-1).view(np.uint8) for one in results]
    [(_, steps)] = assembly.runs.values()
    for step in steps:
        tensors = []
        for one in step.arguments:
            assert one.place.offset % 64 == 0, "kernels load vectors"
            size = int(np.prod(one.shape)) * np.dtype(one.dtype).itemsize
            tensors.append(bases[one.place.base][one.place.offset : one.place.offset + size].view(one.dtype).reshape(one.shape))
        emulate(kernels, step, tensors)
    return results, assembly
