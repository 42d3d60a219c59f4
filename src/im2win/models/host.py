"""The kernels of a model on CPUs: convolutions by im2win's schedules, everything else by `loops`, compiled in parallel and linked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tvm
import tvm_ffi

from im2win.algorithms import algorithm
from im2win.codegen import SYMBOL, Compiled, ToolchainError, any_alignment, compile_module, llvm_target
from im2win.machine import Machine
from im2win.models import loops
from im2win.models.program import Call, Program, Shape
from im2win.problem import Conv2d

_PARTS = 4  # LLVM modules that convolutions are compiled in, side by side
Arguments = list[tuple[Shape, str]]


@dataclass(frozen=True)
class Made:
    """A convolution's kernels: how filters and bias are packed, and how its calls are added to a program.

    call: (program, data, packed filter and bias, residual if any, output).
    """

    pack_filter: Callable[[Any], Any]
    pack_bias: Callable[[Any], Any]
    call: Callable[[Program, str, list[str], list[str], str], None]


class Kernels(Protocol):
    """All kernels of a model on one device."""

    def convolution(self, conv: Conv2d, name: str, tile: Any) -> Made: ...
    def loops(self, name: str, function: Any) -> str: ...
    def arguments(self, kernel: str) -> Arguments: ...
    def link(self, path: Path, driver: Path) -> None: ...


class CpuKernels:
    """Kernels for a CPU; see `Kernels`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._convolutions: dict[str, Any] = {}
        self._rest: dict[str, Any] = {}
        self._originals: dict[str, Any] = {}
        self._names: dict[tuple[Conv2d, str, str], str] = {}

    def convolution(self, conv: Conv2d, name: str, tile: Any) -> Made:
        """The kernel of a convolution with one tile, made once however many layers have it."""
        key = conv, name, str(tile.as_dict())
        if key not in self._names:
            row = algorithm(name)
            symbol = self._names[key] = f"conv_{len(self._names)}"
            self._convolutions[symbol] = row.scheduler.lower(conv, row, tile, self.machine)[SYMBOL]
        symbol, pack = self._names[key], tile.pack

        def call(program: Program, data: str, packed: list[str], residual: list[str], output: str) -> None:
            program.calls.append(Call(symbol, (data, *packed, *residual), (output,)))

        return Made(lambda w: pack.filter(conv, w), lambda bias: pack.bias(conv, bias), call)

    def loops(self, name: str, function: Any) -> str:
        """Any other function, scheduled; its name in the library."""
        symbol = same_name(self._originals, name, function)
        if symbol not in self._rest:
            self._originals[symbol] = function
            self._rest[symbol] = loops.schedule(function, self.machine.threads)
        return symbol

    def arguments(self, kernel: str) -> Arguments:
        """Shape and dtype of every tensor that a kernel takes."""
        function = self._convolutions[kernel] if kernel in self._convolutions else self._rest[kernel]
        return tensors_of(function)

    def link(self, path: Path, driver: Path) -> None:
        """Compiles everything and links it with the driver's object file into the library `path`.

        Raises:
            ToolchainError: no C++ compiler to link with.
        """
        from tvm.support import cc

        if not cc.get_cc():
            raise ToolchainError("linking a model needs a C++ compiler on PATH (g++ or clang++); none was found.")
        with tempfile.TemporaryDirectory(prefix="im2win-objects-") as folder:
            jobs: list[Callable[[Path], None]] = [partial(self._compile, part) for part in _shared_out(self._convolutions, _PARTS)]
            jobs += [partial(self._compile_rest, part) for part in _shared_out(self._rest, 1)]
            objects = [Path(folder) / f"part{number}.o" for number in range(len(jobs))]
            with ThreadPoolExecutor(self.machine.threads) as pool:
                list(pool.map(lambda job, at: job(at), jobs, objects))
            cc.create_shared(str(path), [str(one) for one in (*objects, driver)])

    def _compile(self, functions: dict[str, Any], path: Path) -> None:
        compiled = compile_module(_module(functions), self.machine)
        _object(compiled, path)

    def _compile_rest(self, functions: dict[str, Any], path: Path) -> None:
        module = any_alignment(_module(functions), 1)
        target = tvm.target.Target({**llvm_target(self.machine).export(), **loops.OPTIONS})
        _object(Compiled(tvm.compile(module, target), 0), path)


def same_name(known: dict[str, Any], name: str, function: Any) -> str:
    """The name that a function has among those known, or a new one like `name` that C allows."""
    plain = symbol = "".join(letter if letter.isalnum() else "_" for letter in name)
    number = 2
    while symbol in known and not tvm_ffi.structural_equal(known[symbol], function):
        symbol, number = f"{plain}_{number}", number + 1
    return symbol


def tensors_of(function: Any) -> Arguments:
    """Shape and dtype of every tensor that a function takes."""
    types = (parameter.ty for parameter in function.params)
    return [(tuple(int(extent) for extent in one.shape), str(one.dtype)) for one in types]


def _module(functions: dict[str, Any]) -> tvm.IRModule:
    return tvm.IRModule({symbol: function.with_attr("global_symbol", symbol) for symbol, function in functions.items()})


def _shared_out(functions: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Functions in groups of about the same size; none of them empty."""
    names = list(functions)
    return [{name: functions[name] for name in names[first::count]} for first in range(min(count, len(names)))]


def _object(compiled: Compiled, path: Path) -> None:
    compiled.executable.mod.write_to_file(str(path), "o")
