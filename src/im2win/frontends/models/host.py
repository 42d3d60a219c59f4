"""A model's kernels on CPUs: convolutions by im2win's schedules, everything else by `loops`, compiled in parallel and linked."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import relax
from tvm.support import cc

from im2win.codegen import pool
from im2win.codegen.llvm import ToolchainError, any_alignment, llvm_target
from im2win.common.progress import Reporter
from im2win.common.quantities import counted
from im2win.compute.dot_product import cast
from im2win.device.cpu import Machine
from im2win.frontends.models import elementary, half, loops, pooling, rows, transposes
from im2win.frontends.models.convolutions import build_all
from im2win.frontends.models.kept_kernels import Built, Job, symbol_of
from im2win.frontends.models.parts import Pool
from im2win.frontends.models.products import with_products
from im2win.frontends.models.program import Arguments, Call, Program, Shape, tensors_of
from im2win.records.folders import Logs, named_folders
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class Made:
    """A convolution's kernels: how filters and bias are packed, and how its calls are added to a program.

    Attributes:
        call: ``call(program, data, packed filter and bias, residual if any, output)`` adds the calls.
    """

    pack_filter: Callable[[Any], Any]
    pack_bias: Callable[[Any], Any]
    call: Callable[[Program, str, list[str], list[str], str], None]


@dataclass(frozen=True)
class Chosen:
    """Algorithm and tile of a convolution, and the tier of the look-up that they come from."""

    algorithm: str
    tile: Any
    tier: str


class Kernels(Protocol):
    """All kernels of a model on one device.

    `choose` looks up algorithm and tile of convolutions, `convolution` and `loops` compile or schedule functions, `arguments` gives the
    shape and dtype of a kernel's tensors, and `link` writes the library. `lowered` replaces operators of a Relax module whose loops are not
    TVM's.

    Attributes:
        alignment: bytes to which their tensors must be aligned.
        resizes: whether `resizing.resize` runs on the device.
        integers: whether quantised models compute with integers; without it there are no tables.
        arithmetic: how the device computes with float16 and bfloat16.
        vectors_of_bytes: whether tables of bytes are looked up a vector at a time.
    """

    alignment: int
    resizes: bool
    integers: bool
    arithmetic: half.Arithmetic

    @property
    def vectors_of_bytes(self) -> bool: ...
    def choose(self, convs: Sequence[Conv2d], logs: Logs, accuracy: Accuracy) -> dict[Conv2d, Chosen]: ...
    def convolution(self, conv: Conv2d, chosen: Chosen) -> Made: ...
    def lowered(self, module: Any) -> Any: ...
    def pool(self, shape: Shape, output: Shape, one: Pool) -> Any: ...
    def loops(self, name: str, function: Any) -> str: ...
    def arguments(self, kernel: str) -> Arguments: ...
    def link(self, path: Path, driver: Path) -> None: ...


class CpuKernels:
    """Kernels for a CPU; see `Kernels`."""

    alignment, resizes, integers = 1, True, True
    arithmetic = half.Arithmetic(cast, compares=False)

    def __init__(self, machine: Machine, reporter: Reporter | None = None) -> None:
        self.machine, self._reporter = machine, reporter or Reporter("")
        self._built: dict[Conv2d, Built] = {}
        self._rest: dict[str, Any] = {}
        self._originals: dict[str, Any] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="im2win-objects-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def choose(self, convs: Sequence[Conv2d], logs: Logs, accuracy: Accuracy) -> dict[Conv2d, Chosen]:
        """Looks up and compiles convolutions that are not compiled yet."""
        folders = named_folders(logs)
        new = [conv for conv in dict.fromkeys(convs) if conv not in self._built]
        jobs = []
        for number, conv in enumerate(new, len(self._built)):
            path = self._folder / f"conv{number}.o"
            jobs.append(Job(conv, symbol_of(conv), self.machine, folders, accuracy, path))
        self._built |= dict(zip(new, build_all(jobs, self.machine.threads, self._reporter), strict=True))
        return {conv: Chosen(one.algorithm, one.tile, one.tier) for conv, one in self._built.items()}

    def convolution(self, conv: Conv2d, chosen: Chosen) -> Made:
        """The kernel of a convolution. Layers with the same problem share it."""
        symbol, pack = self._built[conv].symbol, chosen.tile.pack

        def call(program: Program, data: str, packed: list[str], residual: list[str], output: str) -> None:
            program.calls.append(Call(symbol, (data, *packed, *residual), (output,)))

        return Made(lambda w: pack.filter(conv, w), lambda bias: pack.bias(conv, bias), call)

    def lowered(self, module: Any) -> Any:
        """A Relax module in which operators that have loops of this package are replaced by them."""
        legalizations = {**elementary.LEGALIZATIONS, **rows.LEGALIZATIONS, **transposes.legalizations(self.machine)}
        return relax.transform.LegalizeOps(legalizations)(with_products(module, self.machine))

    def pool(self, shape: Shape, output: Shape, one: Pool) -> Any:
        """The function that computes a pooling."""
        return pooling.pool(shape, output, one)

    @property
    def vectors_of_bytes(self) -> bool:
        """Whether the CPU has AVX512-VBMI."""
        return bool(tvm.target.codegen.target_has_features("avx512vbmi", llvm_target(self.machine)))

    def loops(self, name: str, function: Any) -> str:
        """Schedules any other function. Returns its name in the library."""
        symbol = same_name(self._originals, name, function)
        if symbol not in self._rest:
            self._originals[symbol] = function
            self._rest[symbol] = loops.schedule(function, self.machine.threads)
        return symbol

    def arguments(self, kernel: str) -> Arguments:
        """Shape and dtype of every tensor that a kernel takes."""
        if kernel in self._rest:
            return tensors_of(self._rest[kernel])
        return next(built.arguments for built in self._built.values() if built.symbol == kernel)

    def link(self, path: Path, driver: Path) -> None:
        """Compiles what is not compiled yet and links everything with the driver's object file into the library `path`.

        Raises:
            ToolchainError: there is no C++ compiler to link with.
        """
        if not cc.get_cc():
            raise ToolchainError("linking a model needs a C++ compiler on PATH (g++ or clang++); none was found.")
        groups = _shared_out(self._rest, self.machine.threads)
        self._reporter.step(note=f"compiling {counted(len(self._rest), 'other function')}")
        objects = [self._folder / f"rest{number}.o" for number in range(len(groups))]
        with ThreadPoolExecutor(self.machine.threads) as threads:
            list(threads.map(self._compile, groups, objects))
        objects += [driver, *filter(None, [pool.launcher()])]
        cc.create_shared(str(path), [str(one) for one in (*(built.path for built in self._built.values()), *objects)])

    def _compile(self, functions: dict[str, Any], path: Path) -> None:
        module = tvm.IRModule({symbol: function.with_attr("global_symbol", symbol) for symbol, function in functions.items()})
        target = tvm.target.Target({**llvm_target(self.machine).export(), **loops.OPTIONS})
        tvm.compile(any_alignment(module, 1), target).mod.write_to_file(str(path), "o")


def same_name(known: dict[str, Any], name: str, function: Any) -> str:
    """The name of an equal function among the known ones, or a new valid C identifier that resembles `name`."""
    plain = symbol = "".join(letter if letter.isalnum() else "_" for letter in name)
    number = 2
    while symbol in known and not tvm_ffi.structural_equal(known[symbol], function):
        symbol, number = f"{plain}_{number}", number + 1
    return symbol


def _shared_out(functions: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Splits functions into non-empty groups of about the same size."""
    names = list(functions)
    return [{name: functions[name] for name in names[first::count]} for first in range(min(count, len(names)))]
