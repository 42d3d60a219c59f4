"""The table of element types of tensors, one row each, with all facts that the package needs of a type.

`schedules.cuda.arithmetic` lists the tensor-core instructions that multiply them. A type has the name that numpy and PyTorch use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16 by its name


@dataclass(frozen=True)
class ElementType:
    """A row of the table.

    Attributes:
        itemsize: bytes.
        sums: the type in which products are accumulated, and of a bias.
        outputs: output types of a problem in this type, the default first; none where there are no such problems.
        filters: the type of its filters, where that is another one.
        storage: the type of the same size that kernels take its elements as, where compilers are given their bytes; "" for its own.
        scaled: whether its layers always scale their sums, by a float32 for every output channel, and add a bias of the type of the sums.
        largest: the largest finite value, to which outputs saturate; 0 where larger ones become infinity.
        epsilon: from 1 to the next number; 0 for integers.
        limits: the least and the largest value of an integer type.
        short: in names of device functions.
        pair: the device function that makes a word of two float32 values in this type, or of their bytes.
        c: the C type; float16 and bfloat16 are passed as their bits.
        onnx: the name in TensorProto.DataType, for types that graphs are read in; "" for others.
        torch: whether PyTorch has convolutions in this type, for modules and peers.
        dlpack, cudnn: the code in DLDataType and in cudnnDataType_t.
        cudnn_maths: values of the argument `math` of `im2win.bench.peers.cudnn` that it supports.
        ceilings: names of measured peaks of this arithmetic, the nearest first.
        poisons: values that mark unwritten outputs: one that no output takes, or two, of which an output takes one at most.
        guard: value of the guard zones around outputs.
        twin: the type whose kernels differ in nothing but the type of their products; tiles that were fast in it are fast in this one.
    """

    name: str
    itemsize: int
    sums: str
    outputs: tuple[str, ...]
    epsilon: float
    short: str
    c: str
    dlpack: int
    cudnn: int
    limits: tuple[int, int] | None = None
    pair: str = ""
    onnx: str = ""
    torch: bool = False
    cudnn_maths: tuple[str, ...] = ()
    ceilings: tuple[str, ...] = ()
    poisons: tuple[float, ...] = (math.nan,)
    guard: float | None = None
    twin: str = ""
    filters: str = ""
    storage: str = ""
    scaled: bool = False
    largest: float = 0.0

    @property
    def integer(self) -> bool:
        """Whether it is an integer type, whose products and sums are exact."""
        return self.limits is not None

    @property
    def narrow(self) -> bool:
        """Whether it is a floating-point type with wider accumulators: rounding an output then costs more than rounding its sum."""
        return not self.integer and self.sums != self.name


ELEMENT_TYPES: dict[str, ElementType] = {
    row.name: row
    for row in (
        ElementType(
            "float32", 4, "float32", ("float32",), 2.0**-23, "f32", "float", 2, 0, onnx="FLOAT", torch=True, cudnn_maths=("fma", "tf32"),
        ),
        ElementType(
            "float16", 2, "float32", ("float16",), 2.0**-10, "f16", "uint16_t", 2, 2, pair="two_f16", onnx="FLOAT16", torch=True,
            cudnn_maths=("fma", "tensor"), ceilings=("f16_gflops",),
        ),
        ElementType(
            "bfloat16", 2, "float32", ("bfloat16",), 2.0**-7, "bf16", "uint16_t", 4, 9, pair="two_f16", onnx="BFLOAT16", torch=True,
            cudnn_maths=("fma", "tensor"), ceilings=("f16_gflops",), twin="float16",
        ),
        ElementType(
            "int8", 1, "int32", ("int32", "int8", "float16", "bfloat16", "float32", "uint8"), 0.0, "s8", "int8_t", 0, 3, (-128, 127),
            pair="two_int8", cudnn_maths=("fma", "tensor"), ceilings=("s8_gflops", "f16_gflops"), poisons=(-77, 78), guard=-113,
        ),
        ElementType(
            "uint8", 1, "int32", ("int32", "uint8", "float16", "bfloat16", "float32", "int8"), 0.0, "u8", "uint8_t", 1, 6, (0, 255),
            ceilings=("s8_gflops",), poisons=(179, 78), guard=143, filters="int8",
        ),
        ElementType(
            "float8_e4m3fn", 1, "float32", ("float16", "bfloat16", "float32", "float8_e4m3fn"), 2.0**-3, "e4m3", "uint8_t", 10, 12,
            pair="two_float8", ceilings=("s8_gflops", "f16_gflops"), storage="int8", scaled=True, largest=448.0,
        ),
        ElementType("int32", 4, "int32", (), 0.0, "s32", "int32_t", 0, 4, (-(2**31), 2**31 - 1), poisons=(-(2**31) + 12345,)),
    )
}  # fmt: skip

DTYPES: dict[str, int] = {name: row.itemsize for name, row in ELEMENT_TYPES.items() if row.outputs}
"""Bytes of an element, by the types that problems are in."""
STORED: dict[str, str] = {name: row.storage or name for name, row in ELEMENT_TYPES.items()}
"""The types that kernels take elements as."""
EXCHANGED = tuple(name for name, row in ELEMENT_TYPES.items() if row.torch)
"""The types that frameworks have convolutions in."""
