"""`__launch_bounds__` with the number of thread blocks that a multiprocessor is to run at a time.

TVM states the threads of a block only. The compiler then takes as many registers as help one thread, and a few too many often cost a whole
block of every multiprocessor. With this number it keeps registers below what so many blocks leave each thread:

    __launch_bounds__(128)            becomes            __launch_bounds__(128, 3)

The number is what fits if a thread needs registers for its largest local array, which holds its sums and whose indices are constants once
loops are unrolled, and some more for operands, addresses and elements on their way. Results do not change: bounds restrict only where the
compiler keeps values. A kernel that needs more than that has values in local memory; the compiler reports it, and tuning decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from im2win.reconstruct.parse.expressions import size_of
from im2win.reconstruct.parse.statements import Declaration, every
from im2win.reconstruct.parse.unit import Edit, Kernel, Unit
from im2win.reconstruct.text_rules import Match

RULE = "bounds"
OTHERS = 64  # registers of a thread beside its sums
OTHERS_OF_WARPS = 40  # the same where a warp multiplies, whose operands come from shared memory as the instruction takes them
GRANULARITY = 8  # registers of a thread are counted in so many
MOST = 255  # registers of a thread
RESERVED = 1024  # bytes of shared memory that a block takes more than it declares
BLOCKS = 32  # most of a multiprocessor


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor has for all its thread blocks together: 4-byte registers, bytes of shared memory, threads."""

    registers: int = 65536
    shared: int = 233472
    threads: int = 2048


HOPPER = Multiprocessor()


def registers(kernel: Kernel) -> int:
    """Registers of a thread that are expected; a local array whose elements are of unknown size counts as nothing."""
    arrays = [part for part in every(kernel.statements) if isinstance(part, Declaration) and part.count is not None and not part.space]
    others = OTHERS_OF_WARPS if "im2win::product_" in kernel.body else OTHERS
    words = max((-(-(size_of(array.type) or 0) * (array.count or 0) // 4) for array in arrays), default=0)
    return min(-(-(words + others) // GRANULARITY) * GRANULARITY, MOST)


def resident(kernel: Kernel, sizes: Multiprocessor) -> int:
    """Thread blocks that a multiprocessor runs at a time if a thread needs the registers that are expected."""
    by_registers = sizes.registers // (-(-registers(kernel) // GRANULARITY) * GRANULARITY * kernel.threads)
    by_shared = sizes.shared // (kernel.static_bytes + kernel.launch.dynamic_bytes + RESERVED)
    return min(by_registers, by_shared, sizes.threads // kernel.threads, BLOCKS)


def rewrite(unit: Unit, sizes: Multiprocessor) -> tuple[Unit, list[Match], list[str]]:
    """States the blocks of a multiprocessor for every kernel with shared memory, of which at least two fit.

    Returns:
        The new unit, its changes, and a note for every kernel.
    """
    notes, edits = list[str](), list[Edit]()
    for name in unit.kernels:
        kernel = unit.kernel(name)
        count = resident(kernel, sizes) if kernel.shared else 0
        if kernel.bounds != kernel.threads or kernel.resident is not None or count < 2:
            notes.append(f"{RULE}: kernel {name} keeps its bounds")
            continue
        why = f"{count} blocks of {kernel.threads} threads fit, with {registers(kernel)} registers a thread"
        edits += [
            Edit(match.span("bounds"), f"{kernel.bounds}, {count}", RULE, why)
            for match in re.finditer(rf"__launch_bounds__\((?P<bounds>{kernel.bounds})\) {name}\(", unit.source)
        ]
        notes.append(f"{RULE}: kernel {name}: {why}")
    changed, matches = unit.edited(edits)
    return changed, matches, notes
