"""What multiplies elements on tensor cores: of each element type the instruction, one row each."""

from __future__ import annotations

from dataclasses import dataclass

from im2win.spec.dtypes import ELEMENT_TYPES


@dataclass(frozen=True)
class Multiplier:
    """An instruction of a warp and of a warpgroup, with its sums in registers.

    kind: in names of device functions and of kinds of arithmetic. dtype: of the elements.
    types: in wgmma's name. sum_type, constraint: of a sum, in C++ and in its assembly. depth: elements that it is long.
    ending: what follows the operands of wgmma whose first operand is in registers; with both in shared memory, `shared_ending`.
    columns: those of a wgmma are a multiple of this.
    """

    kind: str
    dtype: str
    types: str
    sum_type: str
    constraint: str
    depth: int
    ending: str
    shared_ending: str
    columns: int = 8

    @property
    def slab(self) -> int:
        """Elements in 64 bytes."""
        return 64 // ELEMENT_TYPES[self.dtype].itemsize


MULTIPLIERS: dict[str, Multiplier] = {
    row.dtype: row
    for row in (
        Multiplier("tf32", "float32", "f32.tf32.tf32", "float", "+f", 8, ", 1, 1", ", 1, 1"),
        Multiplier("f16", "float16", "f32.f16.f16", "float", "+f", 16, ", 1, 1, 0", ", 1, 1, 0, 0"),
        Multiplier("s8", "int8", "s32.s8.s8", "int", "+r", 32, "", "", columns=16),
    )
}
"""By element type."""
KINDS: dict[str, Multiplier] = {row.kind: row for row in MULTIPLIERS.values()}
NATIVE: dict[str, Multiplier] = {dtype: row for dtype, row in MULTIPLIERS.items() if dtype != "float32"}
"""Those that multiply elements as they are in memory; float32 is made TF32 on the way."""
