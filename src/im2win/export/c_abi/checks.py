"""C code of the function that asks the CPU for the instructions of a kernel, which layers call."""

from __future__ import annotations

from collections.abc import Sequence

from im2win.device import arm
from im2win.device.cpu import Machine

# On Arm, GNU's compilers cannot ask for instructions: Linux says in words of bits what the CPU has.
_HWCAP, _HWCAP2 = 16, 26  # AT_HWCAP, AT_HWCAP2
_BITS = {"dotprod": (_HWCAP, 20), arm.SVE: (_HWCAP, 22), "i8mm": (_HWCAP2, 13), "bf16": (_HWCAP2, 14)}
_SVE_LENGTH = 51  # PR_SVE_GET_VL
_HEADERS = "#include <sys/auxv.h>\n#include <sys/prctl.h>\n"


def instructions(machine: Machine, needed: Sequence[str] = ()) -> str:
    """The function. needed: features of the machine that the kernel uses."""
    checks = " && ".join([_vectors(machine), *(_feature(name) for name in needed)])
    return f"{_HEADERS if 'getauxval' in checks else ''}static int instructions(void) {{ return {checks}; }}"


def _feature(name: str) -> str:
    """A C expression: whether the CPU has a feature."""
    if name not in _BITS:
        return f'__builtin_cpu_supports("{name}")'
    word, bit = _BITS[name]
    return f"(getauxval({word}) >> {bit} & 1)"


def _vectors(machine: Machine) -> str:
    """A C expression: whether the CPU has the vector instructions of a kernel, and vectors as long.

    Where compilers cannot test for them, all CPUs have the basic set.
    """
    if machine.isa == arm.SVE:
        return f"{_feature(arm.SVE)} && (prctl({_SVE_LENGTH}) & 0xffff) >= {4 * machine.lanes}"
    return _feature(machine.isa) if machine.isa in ("sse2", "avx", "avx2", "avx512f") else "1"
