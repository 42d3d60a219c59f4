"""Translation of generated CUDA to HIP, for GPUs with wavefronts of 64 lanes (gfx906, gfx90a; the Hygon DCU is of this family).

A warp stays a group of 32 lanes in a wavefront: shuffles get width 32, and a warp barrier becomes a wavefront barrier, which is stronger.
Asynchronous copies become synchronous copies. Tensor-core products in inline assembly and WMMA have no HIP equivalent and are refused; such
a kernel needs another schedule.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from im2win.reconstruct.parse.statements import blanked
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.text_rules import Match, ReconstructError, Rule, reconstruct

RULE = "hip"
SHARED_LIMIT = 65536  # bytes of local data share (LDS) of a work-group
ARCHITECTURES = ("gfx906", "gfx90a")

# Patterns without a HIP equivalent, and what to do instead.
REFUSED = (
    (r"\bim2win::product_\w+", "a matrix product of tensor cores; use a tile whose product is fma"),
    (r"\bnvcuda::wmma\b|\bmma_sync\b", "WMMA, which only NVIDIA has; use a schedule without tensor cores"),
    (r"\b(?:__asm__|asm)\b", "inline PTX"),
    (r"\b__(?:cvta_generic_to_shared|pipeline_\w+|reduce_\w+_sync|match_\w+_sync)\b", "a built-in that HIP does not have"),
    (r"\b__syncwarp\s*\(\s*[^)\s]", "a barrier of a part of a warp"),
)

_FULL = r"\(\s*(?:0xffffffffu?|0xFFFFFFFFu?|4294967295u?|\(uint\)-1|-1)\s*,"
ANY = (0, 1 << 20)
RULES = (
    Rule("hip-fp16-header", r"^([ \t]*)#include <cuda_fp16\.h>", r"\1#include <hip/hip_fp16.h>", "half has its own header", ANY),
    Rule("hip-runtime-header", r"^([ \t]*)#include <cuda(?:_runtime)?\.h>", r"\1#include <hip/hip_runtime.h>", "HIP's runtime", ANY),
    Rule("hip-align", r"(__shared__\s+)(?:alignas|__align__)\((\d+)\)", r"\1__attribute__((aligned(\2)))",
         "clang takes no alignas behind __shared__", ANY),
    Rule("hip-syncwarp", r"\b__syncwarp\(\)", "im2win::wavefront_barrier()", "a wavefront holds two warps and waits for both", ANY),
    Rule("hip-shuffle", rf"\b__shfl(|_xor|_up|_down)_sync{_FULL}\s*([^;]*?)\)(?=[;,)\s])", r"__shfl\1(\2, 32)",
         "lanes stay among the 32 of their warp", ANY),
    Rule("hip-sleep", r"\b__nanosleep\(\d+\)", "__builtin_amdgcn_s_sleep(1)", "waits a while without taking issue slots", ANY),
)  # fmt: skip

HEADER = """#include <hip/hip_runtime.h>
namespace im2win {
// The lanes of a wavefront run in step; the compiler must not move memory accesses across this.
__device__ __forceinline__ void wavefront_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
}  // namespace im2win
"""

# In place of the PTX of device.hpp.
COPIES = """
// Plain copies of 4, 8 or 16 bytes, zeros where `inside` is false: they have landed when the next statement runs.
template <int bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool inside = true) {
  unsigned* words = static_cast<unsigned*>(to);
  const unsigned* source = static_cast<const unsigned*>(from);
#pragma unroll
  for (int i = 0; i < bytes / 4; ++i) words[i] = inside ? source[i] : 0u;
}
__device__ __forceinline__ void commit_copies() {}
template <int left>
__device__ __forceinline__ void wait_copies() {}

"""

_PTX = re.compile(r"#ifndef IM2WIN_EMULATOR\n(?P<device>(?:(?!#else|#endif).)*?\basm\b.*?)#else\n.*?#endif\n", re.DOTALL)
_SHUFFLE = re.compile(r"\b__shfl\w*_sync\s*\(")


def translate(unit: Unit) -> tuple[Unit, list[Match]]:
    """Translates a unit to HIP; returns the new unit and the changes.

    Raises:
        ReconstructError: a construct has no HIP equivalent, or a block takes more shared memory than the device has.
    """
    _refuse(unit)
    matches = list[Match]()
    source = unit.source
    for match in _PTX.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        matches.append(Match(f"{RULE}-copies", line, match.group(), COPIES, "there are no asynchronous copies to shared memory"))
    source = _PTX.sub(lambda match: COPIES, source)
    done = reconstruct(source, RULES)
    if _SHUFFLE.search(blanked(done.source)):
        raise ReconstructError("a shuffle of a part of a warp, or in a form that is not understood, has no HIP form here.")
    return replace(unit, source=HEADER + done.source), matches + done.matches


def _refuse(unit: Unit) -> None:
    text = blanked(unit.source)
    for kernel in unit.kernels.values():
        for pattern, instead in REFUSED:
            match = re.search(pattern, text[slice(*kernel.inner)])
            if match:
                line = kernel.line(kernel.inner[0] + match.start())
                raise ReconstructError(f"kernel {kernel.name}, line {line}: `{match.group()}` is {instead}; it has no HIP form.")
        for launch in kernel.launches:
            used = kernel.static_bytes + launch.dynamic_bytes
            if used > SHARED_LIMIT:
                raise ReconstructError(f"kernel {kernel.name} takes {used} bytes of shared memory; there are {SHARED_LIMIT}.")


def missing() -> str | None:
    """What this machine lacks to compile HIP; None if nothing."""
    return None if shutil.which("hipcc") else "hipcc is not on PATH (Debian's package: hipcc)"


def compile_hip(source: str, arch: str, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> bytes:
    """Compiles HIP source to a code object for `arch`, such as "gfx906". No GPU is needed.

    Raises:
        ReconstructError: hipcc is missing, or the source does not compile.
    """
    lacking = missing()
    if lacking:
        raise ReconstructError(f"HIP cannot be compiled: {lacking}.")
    with tempfile.TemporaryDirectory(prefix="im2win-hip-") as folder:
        code, out = Path(folder) / "kernel.hip", Path(folder) / "kernel.hsaco"
        code.write_text(source)
        command = ["hipcc", "--genco", f"--offload-arch={arch}", "-O3", "-std=c++17", "-o", str(out), str(code)]
        done = run(command, capture_output=True, text=True, check=False, env={**os.environ, "HIP_PLATFORM": "amd"})
        if done.returncode:
            raise ReconstructError(f"hipcc: {done.stderr.strip()[:2000]}")
        return out.read_bytes()
