"""Emulates CUDA on a CPU: compiles what TVM generates with the host's C++ compiler against emulator.hpp, and runs it.

It serves tests and the validators of rewritten kernels. It is slow, runs one thread at a time, and is strict. A kernel that lacks a barrier
gives another result for some seed. A kernel that reads uninitialised shared memory gives NaN. A write outside the tensors is an error.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEADERS = Path(__file__).parent
GUARD = 4096  # bytes of the guard zones before and behind every tensor
LIMIT_S = 120.0  # seconds for a launch
KERNEL_OPTIONS = ("-Og",)  # the precompiled header is valid for these options only

_INCLUDE = re.compile(r"^\s*#include\s*<(?:cuda|mma|cooperative_groups)[^>]*>\s*$", re.MULTILINE)
_SHARED = re.compile(r"__shared__\s+alignas\((\d+)\)")
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:(?:alignas|__align__)\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")


class EmulationError(RuntimeError):
    """A kernel that does not compile, or breaks a rule of CUDA while it runs. The message says which and where."""


@dataclass(frozen=True)
class TensorMap:
    """A kernel's TMA descriptor: how the hardware copies boxes of a tensor of four axes to shared memory, the innermost axis first.

    Attributes:
        tensor: name of the tensor.
        sizes: in elements.
        strides: in bytes; the innermost one is the size of an element.
        box: extents of a box in the tensor, of which every `steps`-th element is copied.
        swizzle: bytes of the rows in which 16-byte pieces are permuted, or 0.
        offset: bytes from the tensor's address to its first element.
    """

    tensor: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int
    offset: int = 0

    def expression(self, base: str) -> str:
        """The argument in C++, for the emulator; `base` is the tensor's address."""
        sizes, strides, box, steps = (f"{{{', '.join(map(str, one))}}}" for one in (self.sizes, self.strides, self.box, self.steps))
        place = f"static_cast<char*>({base}) + {self.offset}"
        return f"CUtensorMap{{{place}, {self.strides[0]}, {sizes}, {strides}, {box}, {steps}, {self.swizzle}}}"


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: name of the kernel.
        arguments: tensors by name, numbers and tensor maps.
        grid, block: extents (x, y, z).
        dynamic_bytes: of dynamic shared memory.
        cluster: thread blocks of a cluster, neighbours along x.
        overlap: whether the kernel may begin before the one before it has completed (`schedules.cuda.launch_overlap`). The emulator runs
            one launch after the other.
    """

    kernel: str
    arguments: tuple[str | int | TensorMap, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_bytes: int = 0
    cluster: int = 1
    overlap: bool = field(default=False, repr=False)  # no part of fingerprints, which are of this text


def translate(source: str) -> str:
    """CUDA source as C++ for the emulator.

    The emulator can initialise its shared arrays, dynamic shared memory is a pointer, and system headers are removed.
    """
    text = _INCLUDE.sub("", source)
    text = _DYNAMIC.sub(r"\1* \2 = reinterpret_cast<\1*>(emulator::dynamic_shared_memory());", text)
    return _SHARED.sub(r"alignas(\1) __shared__", text)


def _compile(what: str, library: Path, *arguments: str | Path) -> None:
    """Compiles a shared library."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise EmulationError("emulating CUDA needs a C++ compiler on PATH (g++ or clang++); none was found.")
    command = [compiler, "-std=c++17", "-w", "-fPIC", "-shared", *map(str, arguments), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{what} does not compile: {done.stderr.strip()[:2000]}")


@functools.cache
def _runtime() -> Path:
    """The library that runs blocks and threads, with the precompiled header beside it.

    It is compiled once in each process, since it takes longer than most kernels.
    """
    folder = Path(tempfile.mkdtemp(prefix="im2win-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _compile("the emulator", folder / "emulator.so", "-O2", HEADERS / "emulator.cpp")
    if shutil.which("g++"):
        _compile("the emulator's header", folder / "emulator.hpp.gch", *KERNEL_OPTIONS, "-x", "c++-header", HEADERS / "emulator.hpp")
    return folder / "emulator.so"


class Emulation:
    """Compiled CUDA and its launches: ``emulation({"data": x, "filter": w, "out": y}, seed=1)``.

    Args:
        source: CUDA C++.
        launches: in order; their arguments name the tensors.

    Raises:
        EmulationError: the source does not compile, or there is no C++ compiler.
    """

    def __init__(self, source: str, launches: Sequence[Launch]) -> None:
        self.launches = tuple(launches)
        given = [one.tensor if isinstance(one, TensorMap) else one for launch in launches for one in launch.arguments]
        self.names = list(dict.fromkeys(one for one in given if isinstance(one, str)))
        folder = Path(tempfile.mkdtemp(prefix="im2win-emulation-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        code, library = folder / "kernel.cpp", folder / "kernel.so"
        code.write_text(f'#include "emulator.hpp"\n#line 1 "kernel.cu"\n{translate(source)}\n{self._entry()}')
        _compile("the CUDA source", library, *KERNEL_OPTIONS, f"-I{_runtime().parent}", f"-I{HEADERS}", code, _runtime())
        self._run = ctypes.CDLL(str(library)).im2win_emulate
        self._run.restype = ctypes.c_char_p

    def _entry(self) -> str:
        """The function that runs all launches on an array of pointers."""
        calls = []
        for launch in self.launches:
            values = ", ".join(map(self._argument, launch.arguments))
            grid, block = (f"dim3{{{x}, {y}, {z}}}" for x, y, z in (launch.grid, launch.block))
            call = f"[&] {{ emulator::call({launch.kernel}, {{{values}}}); }}"
            what = f'"{launch.kernel}", {{{grid}, {block}, {launch.dynamic_bytes}, {launch.cluster}}}, seed, resident, {call}'
            calls.append(f"  if (const char* failure = emulator::launch({what})) return failure;")
        head = ["", 'extern "C" const char* im2win_emulate(void** t, unsigned seed, unsigned resident, double limit_s) {']
        head.append("  emulator::set_limit(limit_s);")
        return "\n".join([*head, *calls, "  return nullptr;", "}", ""])

    def _argument(self, one: str | int | TensorMap) -> str:
        if isinstance(one, TensorMap):
            return one.expression(self._argument(one.tensor))
        return str(one) if isinstance(one, int) else f"t[{self.names.index(one)}]"

    def __call__(
        self, tensors: Mapping[str, npt.NDArray[Any]], seed: int = 0, resident: int = 1, limit_s: float = LIMIT_S
    ) -> None:
        """Runs all launches on contiguous arrays, which they may write.

        Args:
            seed: of the order of blocks, warps and threads.
            resident: blocks that run interleaved, rather than one after the other.
            limit_s: seconds of processor time for a launch, on Linux. Memory of a thread that never ended is not freed.

        Raises:
            EmulationError: a deadlock, barriers in divergent code, a write outside the tensors, or no end within the limit.
        """
        buffers = {name: _Guarded(tensors[name]) for name in self.names}
        pointers = (ctypes.c_void_p * len(self.names))(*(buffers[name].address for name in self.names))
        failure = self._run(pointers, ctypes.c_uint(seed), ctypes.c_uint(resident), ctypes.c_double(limit_s))
        if failure:
            raise EmulationError(failure.decode())
        for name, buffer in buffers.items():
            if not buffer.intact():
                raise EmulationError(f"a kernel wrote outside `{name}` {tensors[name].shape}.")
            tensors[name][...] = buffer.array


class _Guarded:
    """A copy of an array between two guard zones with a known pattern."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._raw = np.full(array.nbytes + 2 * GUARD + 256, 0xA5, np.uint8)
        self._start = GUARD + -(self._raw.ctypes.data + GUARD) % 256
        self._end = self._start + array.nbytes
        self.array = self._raw[self._start : self._end].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        self.address = self._raw.ctypes.data + self._start

    def intact(self) -> bool:
        return bool((self._raw[: self._start] == 0xA5).all() and (self._raw[self._end :] == 0xA5).all())
