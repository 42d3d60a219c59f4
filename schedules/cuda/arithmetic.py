"""Tensor-core instructions, one row for each element type, and the kinds of arithmetic that kernels make of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from im2win.spec.accuracy import Accuracy
from im2win.spec.dtypes import ELEMENT_TYPES

SLAB = 64  # bytes of a slab: contiguous elements of one window in shared memory, the depth of two tensor-core instructions


@dataclass(frozen=True)
class Multiplier:
    """The `mma.sync` and `wgmma` instructions of an element type, with accumulators in registers.

    kind: suffix in the names of device functions and of kinds of arithmetic, such as "f16". dtype: type of the elements.
    types: accumulator and operand types in the name of `wgmma`. sum_type, constraint: C++ type and inline-assembly constraint of an
        accumulator.
    depth: elements of the sum that one `wgmma` takes (its K).
    ending: text behind the operands of a `wgmma` whose first operand is in registers. shared_ending: the same with both operands in shared
        memory.
    columns: the number of columns of a `wgmma` (its N) is a multiple of this.
    chain: most `wgmma` whose products one accumulator adds up, before float32 additions take it over; 0 for all of a sum.
    warps: whether `mma.sync` has it, too; else only `wgmma` with both operands in shared memory does.

    Tensor cores of compute capability 9.0 add products of float8_e4m3fn with less than float32's precision: they align the products of an
    instruction and the accumulator to the largest of them, keep about 13 bits of fraction and cut off the rest (DeepSeek-AI 2024,
    arXiv 2412.19437, section 3.3.2: about 14 bits). Errors of a chain grow with its length. So accumulators take `chain` instructions, 128
    products, as in that report and by default in CUTLASS, and are then added to sums on CUDA cores.
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
    chain: int = 0
    warps: bool = True

    @property
    def slab(self) -> int:
        """Elements in a slab of 64 bytes."""
        return 64 // ELEMENT_TYPES[self.dtype].itemsize


MULTIPLIERS: dict[str, Multiplier] = {
    row.dtype: row
    for row in (
        Multiplier("tf32", "float32", "f32.tf32.tf32", "float", "+f", 8, ", 1, 1", ", 1, 1"),
        Multiplier("f16", "float16", "f32.f16.f16", "float", "+f", 16, ", 1, 1, 0", ", 1, 1, 0, 0"),
        Multiplier("bf16", "bfloat16", "f32.bf16.bf16", "float", "+f", 16, ", 1, 1, 0", ", 1, 1, 0, 0"),
        Multiplier("s8", "int8", "s32.s8.s8", "int", "+r", 32, "", "", columns=16),
        Multiplier("e4m3", "float8_e4m3fn", "f32.e4m3.e4m3", "float", "+f", 32, ", 1, 1", ", 1, 1", chain=4, warps=False),
    )
}
"""By element type."""
KINDS: dict[str, Multiplier] = {row.kind: row for row in MULTIPLIERS.values()}
NATIVE: dict[str, Multiplier] = {dtype: row for dtype, row in MULTIPLIERS.items() if dtype != "float32" and row.warps}
"""Those of warps that multiply elements as they are in memory; float32 is made TF32 on the way."""
WARPGROUP_ONLY: dict[str, Multiplier] = {dtype: row for dtype, row in MULTIPLIERS.items() if not row.warps}
"""Those of warpgroups alone, with both operands in shared memory."""

Unit = Literal["core", "warp", "warpgroup"]


@dataclass(frozen=True)
class Product:
    """A kind of arithmetic and the unit that executes it.

    dtype, sum_dtype: element types of the tensors and of the accumulators. slab: elements in a slab.
    unit: "core" for CUDA cores, "warp" for `mma.sync` of a warp, "warpgroup" for `wgmma` of four warps (compute capability 9.0).
    accuracy: the accuracy of a float32 result; the products of every other type are exact.
    parts: number of TF32 parts that the packed float32 filter is stored as; 0 where filters keep their type.
    """

    dtype: str
    sum_dtype: str
    slab: int
    unit: Unit = "warp"
    accuracy: Accuracy = "exact"
    parts: int = 0


def _with_warpgroups(products: dict[str, Product]) -> dict[str, Product]:
    """The given kinds of arithmetic, and for each of a warp the same of a warpgroup, named with "wg_" before it."""
    groups = {f"wg_{name}": replace(product, unit="warpgroup") for name, product in products.items() if product.unit == "warp"}
    return products | groups


SHARED_PRODUCTS = _with_warpgroups(
    {
        "fma": Product("float32", "float32", MULTIPLIERS["float32"].slab, "core"),
        "tf32": Product("float32", "float32", MULTIPLIERS["float32"].slab, accuracy="tf32", parts=1),
        "tf32x3": Product("float32", "float32", MULTIPLIERS["float32"].slab, accuracy="float32", parts=2),
        **{row.kind: Product(dtype, ELEMENT_TYPES[dtype].sums, row.slab) for dtype, row in NATIVE.items()},
    }
)
"""Those of kernels whose threads share operands."""

CORE_PRODUCTS = {"float32": "fma", "float16": "fma_f16", "bfloat16": "fma_bf16"}
"""By element type, names of those whose products and sums are float32, on CUDA cores."""

PRODUCTS = SHARED_PRODUCTS | {
    name: Product(dtype, "float32", MULTIPLIERS[dtype].slab, "core") for dtype, name in CORE_PRODUCTS.items() if name not in SHARED_PRODUCTS
}
PRODUCTS |= {f"wg_{row.kind}": Product(dtype, ELEMENT_TYPES[dtype].sums, row.slab, "warpgroup") for dtype, row in WARPGROUP_ONLY.items()}
