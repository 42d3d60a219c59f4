"""Facts about the CPU that a schedule is built for, read from the machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Vector instruction sets: float32 lanes, architectural vector registers. All of them have two FMA units of latency four on the cores
# that schedules are tuned for (Intel since Haswell, AMD since Zen, Arm since Cortex-A76).
_VECTORS = {"avx512f": (16, 32), "avx2": (8, 16), "avx": (8, 16), "asimd": (4, 32), "neon": (4, 32), "sse2": (4, 16)}
FMA_UNITS, FMA_LATENCY = 2, 4

# Instructions for int8 and bfloat16 that a machine may have, by LLVM's names, with those of /proc/cpuinfo.
FEATURES = {
    "avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni", "avx512bf16": "avx512_bf16", "amx-int8": "amx_int8", "amx-bf16": "amx_bf16",
    "dotprod": "asimddp", "i8mm": "i8mm", "bf16": "bf16",
}  # fmt: skip
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: a process must ask before it uses AMX

_CPUINFO, _CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Machine:
    """One CPU as a schedule sees it. Cache sizes are bytes of one core's share (level 3: of the whole cache).

    features: those of `FEATURES` that it has.
    """

    brand: str
    mcpu: str
    isa: str
    threads: int
    lanes: int
    registers: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # a list where a file was read

    @property
    def name(self) -> str:
        """The device's slug, the folder of its tuning logs: vendor and model, microarchitecture, threads."""
        words = re.sub(r"\((r|tm)\)|\b(cpu|processor|with.*|@.*|\d+-core)\b", " ", self.brand.lower())
        return "-".join([*re.findall(r"[a-z0-9]+", words), self.mcpu, f"{self.threads}t"])

    @property
    def outputs_in_flight(self) -> tuple[int, int]:
        """Least and most independent outputs that keep the FMA units busy.

        They are lanes * units * latency and lanes * registers, the model of the thesis behind arXiv 2306.14320 (eq. 3-1 and 3-2).
        """
        return self.lanes * FMA_UNITS * FMA_LATENCY, self.lanes * self.registers

    @classmethod
    def host(cls, threads: int | None = None) -> Machine:
        """This machine, with all CPUs that the process may use, or `threads` of them.

        Raises:
            ValueError: `threads` is not between 1 and the number of usable CPUs.
        """
        usable = usable_cpus()
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= usable):
            raise ValueError(f"`threads` (={threads!r}) must be an integer from 1 to the CPUs this process may use (={usable}).")
        brand, flags = _facts()
        isa = next((flag for flag in _VECTORS if flag in flags), "")
        level_1, level_2, level_3 = map(_cache, (1, 2, 3))
        lanes, registers = _VECTORS.get(isa, (4, 16))
        return cls(brand, _mcpu(), isa, threads or usable, lanes, registers, level_1, level_2, level_3, _features(flags))


def usable_cpus() -> int:
    """Number of CPUs that this process may run on."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return len(process.cpu_affinity())
    return psutil.cpu_count(logical=False) or 1


@functools.cache
def _facts() -> tuple[str, frozenset[str]]:
    """The CPU's brand and its flags, from Linux' table where that has both, as it has on x86."""
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in _CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines())
        found = {name.strip(): value.strip() for name, _, value in lines}
        if found.get("model name") and found.get("flags"):
            return found["model name"], frozenset(found["flags"].split())
    info = _asked()
    return info.get("brand_raw", "unknown cpu"), frozenset(info.get("flags", ()))


@functools.cache
def _asked() -> dict[str, Any]:
    """What py-cpuinfo says, which takes a second."""
    import cpuinfo

    return dict(cpuinfo.get_cpu_info())


@functools.cache
def _mcpu() -> str:
    from tvm.target import codegen

    return str(codegen.llvm_get_system_cpu())


def _features(flags: frozenset[str]) -> tuple[str, ...]:
    """Those of `FEATURES` that both the system and LLVM know of, and that the system lets a process use."""
    from tvm.target import Target, codegen

    known = {str(name) for name in codegen.llvm_get_cpu_features(Target({"kind": "llvm", "mcpu": _mcpu()}))}
    found = [name for name, flag in FEATURES.items() if flag in flags and name in known]
    return tuple(name for name in found if not name.startswith("amx") or _amx_permitted())


@functools.cache
def _amx_permitted() -> bool:
    """Asks Linux for the permission to use AMX's tiles, as kernels do themselves."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _cache(level: int) -> int:
    """Bytes of one instance of the data cache at this level. The system's table is preferred, since it distinguishes instances."""
    for index in sorted(_CACHES.glob("index*")):
        if int((index / "level").read_text()) == level and (index / "type").read_text().strip() in ("Data", "Unified"):
            number, unit = re.fullmatch(r"(\d+)([KMG]?)", (index / "size").read_text().strip()).groups()  # type: ignore[union-attr]
            return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]
    name = {1: "l1_data_cache_size", 2: "l2_cache_size", 3: "l3_cache_size"}[level]
    total = int(_asked().get(name, {1: 32 << 10, 2: 256 << 10, 3: 2 << 20}[level]))
    return total if level == 3 else total // max(psutil.cpu_count(logical=False) or 1, 1)
