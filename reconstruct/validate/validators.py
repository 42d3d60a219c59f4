"""Validators test that a rewritten source computes the same: on the emulator with shuffled thread orders, and with racecheck on a GPU.

A validator can only object. A race that no tested order shows may still exist, so a validator never justifies a rewrite.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from im2win.emulator import Emulation, EmulationError
from im2win.reconstruct.parse.expressions import size_of
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.text_rules import ReconstructError
from im2win.reconstruct.trace.events import Access
from im2win.reconstruct.trace.trace import Trace, grid_blocks

Tensors = Mapping[str, npt.NDArray[Any]]
_NUMPY = {"float": "float32", "half": "float16", "nv_bfloat16": "bfloat16", "double": "float64", "int": "int32", "uint": "uint32",
          "signed char": "int8", "uchar": "uint8", "int64_t": "int64", "short": "int16", "ushort": "uint16"}  # fmt: skip


class Validator(Protocol):
    """Tests a rewritten source; `name` appears in messages."""

    name: str

    def objection(self, unit: Unit) -> str | None:
        """The first error found; None if there is none."""


def tensor_types(unit: Unit) -> dict[str, str]:
    """The C element type of every tensor argument, by tensor name.

    Raises:
        ReconstructError: two kernels give one tensor different element types.
    """
    found: dict[str, str] = {}
    for launch in unit.launches:
        kernel = unit.kernel(launch.kernel)
        for tensor, parameter in zip(launch.arguments, kernel.parameters, strict=True):
            if not isinstance(tensor, str):
                continue
            if found.setdefault(tensor, parameter.element) != parameter.element:
                raise ReconstructError(f"tensor {tensor} is of {found[tensor]} and of {parameter.element}.")
    return found


def tensor_sizes(unit: Unit) -> dict[str, int]:
    """The number of elements of every tensor argument, from the largest address that a launch accesses.

    Raises:
        NotShown: an address depends on data.
    """
    sizes = dict.fromkeys(tensor_types(unit), 0)
    for launch in unit.launches:
        kernel = unit.kernel(launch.kernel)
        given = {parameter.name: one for one, parameter in zip(launch.arguments, kernel.parameters, strict=True)}
        tensors = {name: one for name, one in given.items() if isinstance(one, str)}
        numbers = {name: np.asarray(one) for name, one in given.items() if isinstance(one, int)}
        for _, blocks in grid_blocks(kernel):
            for event in Trace(kernel, set(tensors), blocks, numbers):
                if isinstance(event, Access):
                    start, mask = np.broadcast_arrays(event.start, np.True_ if event.mask is None else event.mask)
                    end = int(start[mask].max(initial=-event.width)) + event.width
                    size = size_of(tensor_types(unit)[tensors[event.buffer]]) or 1
                    sizes[tensors[event.buffer]] = max(sizes[tensors[event.buffer]], -(-end // size))
    return sizes | {name: int(np.prod(shape)) for name, (shape, _) in unit.workspace.items()}


def tensors_for(unit: Unit, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Test data for every tensor argument: integers from -4 to 4, so that sums do not depend on their order; workspaces are poisoned.

    Raises:
        NotShown: a size is not known.
        ReconstructError: numpy has no such element type.
    """
    draw, found = np.random.default_rng(seed), dict[str, npt.NDArray[Any]]()
    types = tensor_types(unit)
    for name, size in tensor_sizes(unit).items():
        dtype = _NUMPY.get(types.get(name, ""))
        if dtype is None:
            raise ReconstructError(f"tensor {name} is of {types.get(name)}, which no array is made of.")
        found[name] = poisoned(size, dtype) if name in unit.workspace else draw.integers(-4, 5, size).astype(dtype)
    return found


def poisoned(size: int, dtype: str) -> npt.NDArray[Any]:
    """An array of NaN, or of 111 for integer types, so that a read before the first write shows."""
    return np.full(size, np.nan if "float" in dtype else 111, dtype)


class EmulatorValidator:
    """Runs a source on the emulator in several orders of blocks, warps and threads, and compares all bits with the original's results.

    Args:
        unit: the original.
        tensors: every tensor argument except workspaces, by name; None for those of `tensors_for`.
        seeds: one for each order.
        resident: blocks that run concurrently.
    """

    name = "emulator"

    def __init__(self, unit: Unit, tensors: Tensors | None = None, seeds: Sequence[int] = range(8), resident: int = 3) -> None:
        self.seeds, self.resident = tuple(seeds), resident
        self.tensors = dict(tensors_for(unit) if tensors is None else tensors)
        self.expected = self._run(unit, Emulation(unit.source, unit.launches), 0)

    def _run(self, unit: Unit, emulation: Emulation, seed: int) -> dict[str, npt.NDArray[Any]]:
        arrays = {name: array.copy() for name, array in self.tensors.items() if name not in unit.workspace}
        spaces = {name: poisoned(int(np.prod(shape)), dtype) for name, (shape, dtype) in unit.workspace.items()}
        emulation({**arrays, **spaces}, seed, self.resident)
        return arrays

    def objection(self, unit: Unit) -> str | None:
        """The first order in which a tensor differs, or the first violation of a rule of CUDA."""
        try:
            emulation = Emulation(unit.source, unit.launches)
            for seed in self.seeds:
                for name, array in self._run(unit, emulation, seed).items():
                    if name in self.expected and array.tobytes() != self.expected[name].tobytes():
                        return f"with order {seed} of its threads, {name} comes out differently"
        except EmulationError as error:
            return str(error)
        return None


# --- racecheck

_MAIN = """
#include <cstdio>
#include <cstdlib>
#include <vector>
static void check(cudaError_t status) {{
  if (status != cudaSuccess) {{ std::fprintf(stderr, "%s\\n", cudaGetErrorString(status)); std::exit(3); }}
}}
int main() {{
{body}
  check(cudaDeviceSynchronize());
  return 0;
}}
"""


def harness(unit: Unit, sizes: Mapping[str, int]) -> str:
    """A CUDA C++ program whose `main` runs a unit's launches once, on zeroed tensors; `sizes` are in elements."""
    lines = []
    for name, element in tensor_types(unit).items():
        lines.append(f"{element}* t_{name}; check(cudaMalloc(&t_{name}, {max(sizes[name], 1)} * sizeof({element})));")
        lines.append(f"check(cudaMemset(t_{name}, 0, {max(sizes[name], 1)} * sizeof({element})));")
    for launch in unit.launches:
        grid, block = (", ".join(map(str, extents)) for extents in (launch.grid, launch.block))
        attribute = "cudaFuncAttributeMaxDynamicSharedMemorySize"
        lines.append(f"check(cudaFuncSetAttribute({launch.kernel}, {attribute}, {launch.dynamic_bytes}));")
        arguments = ", ".join(str(one) if isinstance(one, int) else f"t_{one}" for one in launch.arguments)
        lines.append(f"{launch.kernel}<<<dim3({grid}), dim3({block}), {launch.dynamic_bytes}>>>({arguments}); check(cudaGetLastError());")
    return unit.source + _MAIN.format(body="\n".join("  " + line for line in lines))


class RacecheckValidator:
    """Runs racecheck of NVIDIA's compute-sanitizer, which reports data races in shared memory.

    Args:
        arch: the architecture to compile for, such as "sm_90a".
        sizes: elements of every tensor argument; None for those of `tensor_sizes`.
    """

    name = "racecheck"

    def __init__(self, arch: str, sizes: Mapping[str, int] | None = None) -> None:
        self.arch, self.sizes = arch, sizes

    @staticmethod
    def missing() -> str | None:
        """What this machine lacks to run racecheck; None if nothing."""
        if shutil.which("nvcc") is None:
            return "nvcc is not on PATH"
        if shutil.which("compute-sanitizer") is None:
            return "compute-sanitizer is not on PATH"
        return None if Path("/dev/nvidiactl").exists() else "there is no GPU"

    def build(self, unit: Unit, folder: Path) -> Path:
        """Compiles the program for racecheck. No GPU is needed.

        Raises:
            ReconstructError: the program does not compile.
        """
        code, program = folder / "harness.cu", folder / "harness"
        code.write_text(harness(unit, tensor_sizes(unit) if self.sizes is None else self.sizes))
        command = ["nvcc", "-std=c++17", "-lineinfo", f"-arch={self.arch}", "-o", str(program), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ReconstructError(f"nvcc: {done.stderr.strip()[:2000]}")
        return program

    def objection(self, unit: Unit) -> str | None:
        """The first hazard that racecheck reports.

        Raises:
            ReconstructError: racecheck cannot run on this machine, or the source does not compile.
        """
        missing = self.missing()
        if missing:
            raise ReconstructError(f"racecheck cannot run: {missing}.")
        with tempfile.TemporaryDirectory(prefix="im2win-racecheck-") as folder:
            program = self.build(unit, Path(folder))
            command = ["compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "all", "--error-exitcode", "9", str(program)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return None
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "hazard" in line.lower() or "error" in line.lower()]
        return lines[0].strip(" =") if lines else f"exit status {done.returncode}"
