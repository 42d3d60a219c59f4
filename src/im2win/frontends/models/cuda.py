"""A model's kernels on a GPU: convolutions by im2win's CUDA schedules, everything else by TVM's dlight schedules, in one library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm

from im2win.builder.build import looked_up
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import ToolchainError
from im2win.common.progress import Reporter
from im2win.common.quantities import counted
from im2win.common.tvm_hooks import registered
from im2win.device.gpu import Gpu
from im2win.frontends.models import gpu_loops, half, kernels
from im2win.frontends.models.host import Chosen, Made, same_name
from im2win.frontends.models.parts import Pool
from im2win.frontends.models.program import Arguments, Call, Program, Shape, tensors_of
from im2win.registry import cuda_lowering
from im2win.registry.backends import backend_for
from im2win.registry.ranking import first_of
from im2win.registry.schedules import candidates, schedule_of
from im2win.runtime.model import ALIGNMENT
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL, TRANSFORM


class CudaKernels:
    """Kernels for a GPU; see `host.Kernels`. Compiling them needs no GPU."""

    alignment = ALIGNMENT  # kernels use vector loads
    resizes = integers = vectors_of_bytes = False
    arithmetic = half.GPU

    def __init__(self, gpu: Gpu, reporter: Reporter | None = None) -> None:
        self.gpu, self._reporter = gpu, reporter or Reporter("")
        self.convolutions: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self._originals: dict[str, Any] = {}
        self._names: dict[tuple[Conv2d, str, str], str] = {}

    def choose(self, convs: Sequence[Conv2d], logs: Any, accuracy: Accuracy) -> dict[Conv2d, Chosen]:
        """Looks up algorithms and tiles of convolutions."""
        distinct, found = list(dict.fromkeys(convs)), dict[Conv2d, Chosen]()
        for conv in distinct:
            self._reporter.step(len(found), f"choosing algorithm and tile of {conv}", total=len(distinct))
            found[conv] = self._joinable(conv, Chosen(*looked_up(conv, self.gpu, logs, accuracy=accuracy)), accuracy)
        self._reporter.step(len(found))
        return found

    def _joinable(self, conv: Conv2d, chosen: Chosen, accuracy: Accuracy) -> Chosen:
        """The choice, or the default among kernels that the reconstructor does not rewrite: its source cannot be joined with others."""
        if schedule_of(chosen.algorithm).on_gpu.reconstruction(chosen.tile) is None:
            return chosen
        backend, spaces = backend_for(self.gpu, accuracy), dict[str, list[tuple[float, Any]]]()
        for row in candidates("auto", conv, "cuda", accuracy):
            best = backend.ranked(conv, row)[:1]
            spaces[row.key] = [pair for pair in best if row.on_gpu.reconstruction(pair[1]) is None]
        first = first_of(conv, spaces, backend)
        return chosen if first is None else Chosen(first[1], first[2], "default")

    def convolution(self, conv: Conv2d, chosen: Chosen) -> Made:
        """The kernels of a convolution with one tile: the product, and the transform before it if the algorithm has one."""
        tile, row = chosen.tile, schedule_of(chosen.algorithm)
        key = conv, chosen.algorithm, str(tile.as_dict())
        if key not in self._names:
            symbol = self._names[key] = f"conv_{len(self._names)}"
            functions = cuda_lowering.lower(conv, row, tile, self.gpu)
            wanted = {SYMBOL: symbol, TRANSFORM: f"{symbol}_transform"}
            for variable, function in functions.functions.items():
                if variable.name_hint in wanted:
                    self.convolutions[wanted[variable.name_hint]] = function
        symbol = self._names[key]
        pack, scratch = row.on_gpu.pack(conv, tile), row.on_gpu.workspace_bytes(conv, tile) // conv.itemsize

        def call(program: Program, data: str, packed: list[str], residual: list[str], output: str) -> None:
            if not scratch:
                program.calls.append(Call(symbol, (data, *packed, *residual), (output,)))
                return
            windows = f"{output}/windows"
            program.declare(windows, (scratch,), conv.dtype)
            if f"{symbol}_transform" in self.convolutions:
                program.calls.append(Call(f"{symbol}_transform", (data,), (windows,)))
                program.calls.append(Call(symbol, (windows, *packed, *residual), (output,)))
            else:  # the product runs the transform itself, a part at a time
                program.calls.append(Call(symbol, (data, windows, *packed, *residual), (output,)))

        return Made(lambda w: pack.filter(conv, w), lambda bias: bias, call)

    def lowered(self, module: Any) -> Any:
        """The module: all its operators have TVM's loops."""
        return module

    def pool(self, shape: Shape, output: Shape, one: Pool) -> Any:
        """The function that computes a pooling."""
        return kernels.pool(shape, output, one)

    def loops(self, name: str, function: Any) -> str:
        """Schedules any other function. Returns its name in the library."""
        symbol = same_name(self._originals, name, function)
        if symbol not in self.rest:
            self._originals[symbol] = function
            self.rest[symbol] = gpu_loops.schedule(function, cuda_codegen.cuda_target(self.gpu))
        return symbol

    def arguments(self, kernel: str) -> Arguments:
        """Shape and dtype of every tensor that a kernel takes."""
        return tensors_of(self.convolutions[kernel] if kernel in self.convolutions else self.rest[kernel])

    def link(self, path: Path, driver: Path) -> None:
        """Compiles all kernels and links them with the driver's object file into the library `path`.

        Raises:
            ToolchainError: there is no C++ compiler to link with, or no CUDA compiler.
        """
        from tvm.support import cc

        if not cc.get_cc():
            raise ToolchainError("linking a model needs a C++ compiler on PATH (g++ or clang++); none was found.")
        made = []
        kernels = counted(len(self.convolutions) + len(self.rest), "kernel")
        self._reporter.step(note=f"compiling {kernels}")
        if self.convolutions:
            made.append(cuda_codegen.compile_module(cuda_codegen.kernel_module(self.convolutions), self.gpu).executable.mod)
        if self.rest:
            made.append(self._compile_rest())
        first, *others = made
        for other in others:
            first.import_module(other)
        first.export_library(str(path), addons=[str(driver)])

    def _compile_rest(self) -> Any:
        cuda_codegen.compiler()
        compiled = registered("tvm_callback_cuda_compile", lambda before: lambda source: cuda_codegen.cubin(source, self.gpu))
        with compiled:
            return tvm.compile(cuda_codegen.kernel_module(self.rest), cuda_codegen.cuda_target(self.gpu)).mod
