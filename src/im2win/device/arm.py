"""Arm CPUs by name, to generate kernels for on another machine: what schedules read of them, and LLVM's target.

Caches have the sizes of a common chip with these cores, which is named. None of the machines was measured. An Arm machine that runs im2win
itself is read like every other (`Machine.host`).
"""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

from im2win.device.cpu import Machine

TRIPLE = "aarch64-linux-gnu"
SVE = "sve"  # `isa` of a machine whose schedules use SVE vectors of a fixed length
NEON = ("asimd", "neon")

# By the name that users give. All begin two fused multiply-adds of their vectors in a cycle, but Neoverse V1 with NEON, which begins four;
# its `lanes` are then those of NEON, and 8 with SVE, whose vectors have 256 bits there.
KNOWN: dict[str, Machine] = {
    "neoverse-n1": Machine(  # Ampere Altra, AWS Graviton2
        "Arm Neoverse N1", "neoverse-n1", "asimd", 4, 4, 32, 64 << 10, 1 << 20, 32 << 20, ("dotprod",),
    ),
    "neoverse-v1": Machine(  # AWS Graviton3
        "Arm Neoverse V1", "neoverse-v1", "asimd", 4, 4, 32, 64 << 10, 1 << 20, 32 << 20, ("dotprod", "i8mm", "bf16"),
    ),
    "neoverse-v1-sve": Machine(
        "Arm Neoverse V1 SVE", "neoverse-v1", SVE, 4, 8, 32, 64 << 10, 1 << 20, 32 << 20, ("dotprod", "i8mm", "bf16"),
    ),
    "cortex-a76": Machine(  # the large cores of Snapdragon 855 and Raspberry Pi 5
        "Arm Cortex-A76", "cortex-a76", "asimd", 4, 4, 32, 64 << 10, 512 << 10, 2 << 20, ("dotprod",),
    ),
    "cortex-a78": Machine(  # the large cores of Snapdragon 888
        "Arm Cortex-A78", "cortex-a78", "asimd", 3, 4, 32, 64 << 10, 512 << 10, 4 << 20, ("dotprod",),
    ),
}  # fmt: skip

_LOADED_AHEAD = 3

# LLVM makes fixed vectors of the type that a kernel has from SVE registers of at least so many bits.
_SVE_OPTION = "-aarch64-sve-vector-bits-min:uint={bits}"


def is_arm(machine: Machine) -> bool:
    """Whether a machine executes AArch64 code."""
    return machine.isa in (*NEON, SVE)


def input_registers(machine: Machine) -> int:
    """Registers for inputs that are loaded before the products read them: Arm's instructions take no operand from memory."""
    return _LOADED_AHEAD if is_arm(machine) else 0


def is_foreign(machine: Machine) -> bool:
    """Whether a machine is an Arm one, and this is not."""
    return is_arm(machine) and platform.machine() not in ("aarch64", "arm64")


def target_attributes(machine: Machine) -> dict[str, Any]:
    """What TVM's target of a machine has beside its CPU: the triple, where this machine is no Arm one, and the length of SVE vectors."""
    options = [_SVE_OPTION.format(bits=32 * machine.lanes)] if machine.isa == SVE else []
    return {**({"mtriple": TRIPLE} if is_foreign(machine) else {}), **({"cl-opt": options} if options else {})}


def named(name: str, threads: int | None = None) -> Machine:
    """The machine of that name, with its own number of threads or another.

    Raises:
        ValueError: unknown name, or `threads` is below 1.
    """
    if name not in KNOWN:
        raise ValueError(f"`machine` (={name!r}) must be one of {', '.join(KNOWN)}.")
    if threads is not None and threads < 1:
        raise ValueError(f"`threads` (={threads}) must be at least 1.")
    return replace(KNOWN[name], threads=threads or KNOWN[name].threads)
