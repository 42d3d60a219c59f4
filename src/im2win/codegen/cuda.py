"""Generates and compiles CUDA from a scheduled module: TVM's code generator, the reconstructor, nvcc or nvrtc."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm

from im2win.codegen import nvrtc
from im2win.codegen.canonical_cuda import canonical
from im2win.codegen.cuda_source import Generated, Launches, generate
from im2win.codegen.llvm import Compiled, ToolchainError, digest
from im2win.common.tvm_hooks import registered
from im2win.device.gpu import Gpu
from im2win.reconstruct import Rule, reconstruct
from im2win.schedules.cuda import primitives
from im2win.schedules.cuda.epilogue.requantise import requantisation
from im2win.schedules.cuda.launch_overlap import overlap_functions, overlapping, waiting, with_waits, without_waits
from im2win.schedules.cuda.mainloop.barriers import barrier_functions, with_residents
from im2win.schedules.cuda.mainloop.clusters import cluster_functions, with_clusters
from im2win.schedules.cuda.mma.instructions import warpgroup_products
from im2win.schedules.cuda.mma.load_matrices import matrix_loads
from im2win.schedules.cuda.mma.shared_instructions import shared_products
from im2win.schedules.cuda.passes import CONFIG, PIPELINE

SOURCE = "im2win.source"  # attribute of a module that holds the finished source of its kernels
_POSTPROCESS, _COMPILE = "tvm_callback_cuda_postproc", "tvm_callback_cuda_compile"


def cuda_target(gpu: Gpu) -> Any:
    """TVM's target for a GPU."""
    return tvm.target.Target(
        {
            "kind": "cuda", "arch": gpu.arch, "max_threads_per_block": 1024, "max_shared_memory_per_block": gpu.block_shared,
            "thread_warp_size": 32,
        },
        host="llvm",
    )  # fmt: skip


def _made(module: tvm.IRModule) -> str | None:
    """The finished source of a module's kernels; None if TVM is to generate it."""
    source = (module.attrs or {}).get(SOURCE)
    return None if source is None else str(source)


def kernel_module(functions: Mapping[str, Any]) -> tvm.IRModule:
    """A module to compile, of kernels by name."""
    return tvm.IRModule({name: function.with_attr("global_symbol", name) for name, function in functions.items()})


def overlapping_module(module: tvm.IRModule) -> tvm.IRModule:
    """The module with kernels that are launched with overlap, see `schedules.cuda.launch_overlap`."""
    functions = {variable.name_hint: overlapping(function) for variable, function in module.functions.items()}
    source = _made(module)
    return kernel_module(functions) if source is None else kernel_module(functions).with_attr(SOURCE, waiting(source))


@functools.cache
def device_functions() -> str:
    """The source of the device functions that every generated kernel may call."""
    return (Path(primitives.__file__).parent / "device.hpp").read_text().replace("#pragma once\n", "")


def _called(kernels: str) -> str:
    """The source of further device functions that these kernels call."""
    parts = (warpgroup_products, shared_products, matrix_loads, requantisation, cluster_functions, barrier_functions, overlap_functions)
    return "".join(part(kernels) for part in parts)


@contextlib.contextmanager
def reconstructed(rules: Sequence[Rule] = (), made: str | None = None) -> Iterator[None]:
    """A context in which CUDA that TVM generates gets its device functions and passes through the reconstructor.

    Args:
        rules: text rules to apply.
        made: finished source that replaces what TVM generates; the rules still apply.

    Raises (inside):
        ReconstructError: a rule does not match as often as it states.
    """

    def rewrite(source: str, target: Any) -> str:
        if made is not None:
            return reconstruct(made, rules).source
        head, mark, kernels = source.partition('extern "C"')
        functions = device_functions() + "\n" + _called(kernels)
        return head + functions + with_waits(with_residents(with_clusters(reconstruct(mark + kernels, rules).source)))

    with registered(_POSTPROCESS, lambda before: rewrite):
        yield


def compiler() -> str:
    """The CUDA compiler of this machine: "nvcc" if it is on PATH, else "nvrtc".

    Raises:
        ToolchainError: there is neither.
    """
    if shutil.which("nvcc"):
        return "nvcc"
    if nvrtc.available():
        return "nvrtc"
    raise ToolchainError("compiling CUDA needs nvcc on PATH, or pip install 'im2win[cuda]' for nvrtc; neither was found.")


def generate_source(module: tvm.IRModule, gpu: Gpu, rules: Sequence[Rule] = ()) -> Generated:
    """The CUDA source of kernels as it goes to the compiler, and their launches. Needs neither a GPU nor a compiler."""
    with reconstructed(rules, _made(module)):
        return generate(module, cuda_target(gpu), CONFIG, PIPELINE)


def cubin(source: str, gpu: Gpu) -> bytes:
    """Machine code of a CUDA source. Needs no GPU.

    Raises:
        ToolchainError: there is no CUDA compiler.
        RuntimeError: the source does not compile; the message is the compiler's.
    """
    if compiler() == "nvrtc":
        return nvrtc.cubin(source, gpu.arch)
    with tempfile.TemporaryDirectory(prefix="im2win-nvcc-") as folder:
        code, out = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        code.write_text(source)
        command = ["nvcc", "-O3", "-std=c++17", f"-arch={gpu.arch}", "-cubin", "-w", "-o", str(out), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc: {done.stderr.strip()[:2000]}")
        return out.read_bytes()


def compile_module(module: tvm.IRModule, gpu: Gpu, rules: Sequence[Rule] = ()) -> Compiled:
    """Compiles the kernels of a module for a GPU, with their device functions.

    Raises:
        ToolchainError: there is no CUDA compiler.
        RuntimeError: the source does not compile.
    """
    with reconstructed(rules, _made(module)):
        return compile_source(module, gpu)


def compile_source(module: tvm.IRModule, gpu: Gpu) -> Compiled:
    """Compiles kernels without adding device functions or rules; only registered callbacks change their source.

    Raises:
        ToolchainError: there is no CUDA compiler.
        RuntimeError: the source does not compile.
    """
    compiler()
    sources, watch = list[str](), Launches()

    def compiled(source: str) -> bytes:
        sources.append(source)
        return cubin(source, gpu)

    passes = tvm.transform.PassContext(config=CONFIG, instruments=[watch])
    with registered(_COMPILE, lambda before: compiled), passes:
        executable = tvm.compile(module, cuda_target(gpu), tir_pipeline=PIPELINE)
    return Compiled(executable, 0, fingerprint(watch.generated("\n".join(sources))))


def fingerprint(generated: Generated) -> str:
    """The fingerprint of kernels: their computation (`canonical_cuda`), and their launches in order.

    Launch overlap is no part of it: a record stays valid whether its kernel is launched so or not.
    """
    kernels = {name: str(number) for number, name in enumerate(dict.fromkeys(launch.kernel for launch in generated.launches))}
    launches = (replace(launch, kernel=kernels[launch.kernel]) for launch in generated.launches)
    between = list(generated.workspace.values())
    return digest(canonical(without_waits(generated.source)), *launches, between)
