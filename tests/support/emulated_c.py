"""Exported CUDA on the CPU: the source that users compile, launches and all, against the emulator in place of CUDA's runtime."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from im2win.emulator import HEADERS, Launch, _compile, _runtime, translate

# What NAME.cu uses of CUDA's runtime. Launches are run where they are asked for, and noted.
RUNTIME = """
#include "emulator.hpp"
using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
static std::vector<unsigned> noted;
extern "C" unsigned im2win_granted;
unsigned im2win_granted = 48 << 10;
static const char* failure = nullptr;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) { return im2win_granted = unsigned(bytes), cudaSuccess; }
template <typename... Types, size_t... Places>
void run(void (*kernel)(Types...), void** arguments, std::index_sequence<Places...>) {
  kernel(*static_cast<std::remove_cv_t<Types>*>(arguments[Places])...);
}
template <typename... Types>
cudaError_t cudaLaunchKernel(void (*kernel)(Types...), dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  noted.insert(noted.end(), {grid.x, grid.y, grid.z, block.x, block.y, block.z, unsigned(shared)});
  if (shared > im2win_granted) return cudaErrorLaunchFailure;
  const auto body = [&] { run(kernel, arguments, std::index_sequence_for<Types...>()); };
  failure = emulator::launch("kernel", {grid, block, shared, CLUSTER}, 0, 1, body);
  return failure ? cudaErrorLaunchFailure : cudaSuccess;
}
extern "C" const unsigned* im2win_noted(unsigned* count) { return *count = unsigned(noted.size()), noted.data(); }
extern "C" const char* im2win_failure() { return failure; }
"""
NOTED = 7  # numbers of a launch


class Library:
    """An exported NAME.cu, compiled; functions by their names."""

    def __init__(self, source: Path) -> None:
        name = source.stem
        self.header = source.with_suffix(".h")
        text = source.read_text().replace(f'#include "{name}.h"', self.header.read_text())
        code, library = source.with_suffix(".cpp"), source.with_suffix(".so")
        clusters = set(re.findall(r"__cluster_dims__\((\d+), 1, 1\)", text)) or {"1"}  # of the only kernel, as the hardware reads it
        code.write_text(f"#define CLUSTER {clusters.pop()}\n{RUNTIME}{translate(text)}")
        _compile("the CUDA source", library, "-Og", f"-I{HEADERS}", code, _runtime())
        self._library = ctypes.CDLL(str(library))
        self.call, self.pack = self._library[f"im2win_conv_{name}"], self._library[f"im2win_conv_{name}_pack"]
        self.granted = ctypes.c_uint.in_dll(self._library, "im2win_granted")  # bytes of dynamic shared memory that a launch may take
        self._library.im2win_failure.restype = ctypes.c_char_p
        self._library.im2win_noted.restype = ctypes.POINTER(ctypes.c_uint)

    @property
    def failure(self) -> str:
        """What went wrong in a kernel; empty if nothing."""
        found = self._library.im2win_failure()
        return found.decode() if found else ""

    @property
    def launches(self) -> list[tuple[int, ...]]:
        """Grid, block and bytes of dynamic shared memory of all launches so far."""
        count = ctypes.c_uint()
        numbers = self._library.im2win_noted(ctypes.byref(count))
        return [tuple(numbers[i : i + NOTED]) for i in range(0, count.value, NOTED)]


def as_noted(launch: Launch) -> tuple[int, ...]:
    """A launch as the library notes it."""
    return *launch.grid, *launch.block, launch.dynamic_bytes
