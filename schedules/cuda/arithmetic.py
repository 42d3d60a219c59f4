"""What multiplies elements: the tensor-core instruction of each element type, one row each, and the kinds of arithmetic made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from im2win.spec.accuracy import Accuracy
from im2win.spec.dtypes import ELEMENT_TYPES

SLAB = 64  # bytes of one window in shared memory, contiguous: two steps of a matrix product


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

Unit = Literal["core", "warp", "warpgroup"]


@dataclass(frozen=True)
class Product:
    """A kind of arithmetic, and what carries it out.

    dtype, sum_dtype: of the tensors and of the sums. slab: elements in a slab.
    unit: CUDA cores, or tensor cores that a warp (`mma`) or a warpgroup of four warps (`wgmma`, compute capability 9.0) gives work to.
    accuracy: what of a float32 comes out; everything but float32 is exact in its products.
    parts: TF32 numbers that a packed filter's float32 becomes; 0 where it stays what it is.
    """

    dtype: str
    sum_dtype: str
    slab: int
    unit: Unit = "warp"
    accuracy: Accuracy = "exact"
    parts: int = 0


def _with_warpgroups(products: dict[str, Product]) -> dict[str, Product]:
    """Every product of a warp, by a warpgroup, too."""
    groups = {f"wg_{name}": replace(product, unit="warpgroup") for name, product in products.items() if product.unit == "warp"}
    return products | groups


PRODUCTS = _with_warpgroups(
    {
        "fma": Product("float32", "float32", MULTIPLIERS["float32"].slab, "core"),
        "tf32": Product("float32", "float32", MULTIPLIERS["float32"].slab, accuracy="tf32", parts=1),
        "tf32x3": Product("float32", "float32", MULTIPLIERS["float32"].slab, accuracy="float32", parts=2),
        **{row.kind: Product(dtype, ELEMENT_TYPES[dtype].sums, row.slab) for dtype, row in NATIVE.items()},
    }
)
