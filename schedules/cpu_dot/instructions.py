"""The table of instructions that multiply int8, bfloat16 and float16 on CPUs, one row each.

All of them take words of 32 bits: elements of neighbouring input channels, whose products with a filter's word they add to a sum of 32
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from im2win.device.cpu import Machine
from im2win.schedules.cpu_dot.vectors import typed

Expr = Any

SHIFT = 128  # added to int8 inputs of instructions that take unsigned ones, taken off uint8 inputs of those that take signed ones
AVX512_LANES = 16  # words of a vector; only AVX-512 has so many
PACKED = 64  # outputs of one byte that a vector holds
TILE_ROWS, TILE_WORDS, TILES = 16, 16, 8  # of AMX: rows of a tile, words of a row, tile registers
_BITS = {16: 512, 8: 256, 4: 128}  # of a vector, by words
_HALVES = {"dpbf16": "@llvm.x86.avx512bf16.dpbf16ps.{bits}", "bfdot": "@llvm.aarch64.neon.bfdot.v4f32.v8bf16"}
# Instructions of NEON: sdot v0.4s, v1.16b, v2.4b[3] multiplies by the last word of v2.
NEON_LANES = 4
_BY_ELEMENT = ("sdot", "usdot", "bfdot")
# Instructions of SVE with vectors of 256 bits: LLVM's intrinsic, and its type of the elements that it multiplies.
_SVE_LANES = 8
_SVE = {
    "sdot": ("llvm.aarch64.sve.sdot.nxv4i32", "i8"), "usdot": ("llvm.aarch64.sve.usdot.nxv4i32", "i8"),
    "bfdot": ("llvm.aarch64.sve.bfdot", "bfloat"),
}  # fmt: skip
_MADD = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}


@dataclass(frozen=True)
class Instruction:
    """A row of the table.

    Attributes:
        dtypes: element types of inputs that it multiplies.
        group: elements of a word.
        staged: the type that inputs are converted to when they are copied.
        lanes: words of its vectors.
        features: by lanes, the features of a `Machine` of which it needs one; none where it needs none of them.
        shift: added to elements, as for `packing.cpu_dot.added`.
        title: what it is.
    """

    name: str
    title: str
    dtypes: tuple[str, ...]
    group: int
    staged: str
    lanes: tuple[int, ...]
    features: tuple[str, ...] = ()
    shift: int = 0

    @property
    def tiles(self) -> bool:
        """Whether it multiplies AMX tiles."""
        return self.name == "amx"

    def by_element(self, lanes: int) -> bool:
        """Whether it reads one operand as any word of a vector, which then needs no load and no register of its own."""
        return self.name in _BY_ELEMENT and lanes == NEON_LANES

    @property
    def packs(self) -> bool:
        """Whether a CPU that has it for vectors of 16 words has AVX512-BW."""
        return self.name in ("amx", "vnni", "madd")

    @property
    def sums(self) -> str:
        """The type of its sums."""
        return "float32" if "bfloat16" in self.dtypes else "int32"

    def missing(self, machine: Machine, lanes: int) -> str:
        """The features of which a machine would need one for it; "" if it has what it needs."""
        needed = self.features
        if self.name == "vnni" and lanes == 16:
            needed = ("avx512vnni",)
        if self.name == "madd" and lanes > 4 and machine.isa not in ("avx2", "avx512f"):
            return "avx2"
        if self.name == "madd" and machine.isa in ("asimd", "neon", ""):
            return "sse2"
        return "" if not needed or set(needed) & set(machine.features) else " or ".join(needed)


INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction(
        "amx", "tdpbssd, tdpbusd, tdpbsud: tiles of 16 x 64 bytes", ("int8", "uint8"), 4, "uint8", (16,), ("amx-int8",),
    ),
    Instruction(
        "vnni", "vpdpbusd: four products and three additions in int32", ("int8", "uint8"), 4, "uint8", (16, 8, 4),
        ("avx512vnni", "avxvnni"), SHIFT,
    ),
    Instruction("usdot", "usdot: four products and their sum in int32", ("uint8",), 4, "uint8", (8, 4), ("i8mm",)),
    Instruction("sdot", "sdot: four products and their sum in int32", ("int8", "uint8"), 4, "uint8", (8, 4), ("dotprod",), -SHIFT),
    Instruction("madd", "vpmaddwd on int16, and an addition", ("int8", "uint8"), 2, "int16", (16, 8, 4)),
    Instruction("mul", "products in int32", ("int8", "uint8"), 1, "int32", (16, 8, 4, 2, 1)),
    Instruction("amx", "tdpbf16ps: tiles of 16 x 32 bfloat16", ("bfloat16",), 2, "uint16", (16,), ("amx-bf16",)),
    Instruction("dpbf16", "vdpbf16ps: two products in float32", ("bfloat16",), 2, "uint16", (16, 8, 4), ("avx512bf16",)),
    Instruction("bfdot", "bfdot: two products and their sum in float32", ("bfloat16",), 2, "uint16", (8, 4), ("bf16",)),
    Instruction("fma", "fused multiply-adds of float32", ("bfloat16", "float16"), 1, "float32", (16, 8, 4, 2, 1)),
)  # fmt: skip
NAMES = tuple(dict.fromkeys(one.name for one in INSTRUCTIONS))


def instruction(name: str, dtype: str) -> Instruction | None:
    """The instruction of that name for inputs of a type; None if there is none."""
    return next((one for one in INSTRUCTIONS if one.name == name and dtype in one.dtypes), None)


def multiplied(one: Instruction, total: Expr, data: Expr, taps: Expr, lanes: int) -> Expr:
    """A vector of sums plus the products of a vector of input words and one of filter words.

    Args:
        data, taps: in the type `staged`, `lanes` words each.
    """
    if one.name == "vnni":
        words = [tirx.reinterpret(f"int8x{4 * lanes}", value) for value in (data, taps)]
        return tirx.call_llvm_pure_intrin(f"int32x{lanes}", f"llvm.x86.avx512.vpdpbusd.{_BITS[lanes]}", total, *words)
    if one.name == "madd":
        return total + tirx.call_llvm_pure_intrin(f"int32x{lanes}", _MADD[lanes], data, taps)
    if one.name in ("sdot", "usdot") and lanes == NEON_LANES:
        words = [tirx.reinterpret("int8x16", value) for value in (data, taps)]
        return tirx.call_llvm_pure_intrin("int32x4", f"llvm.aarch64.neon.{one.name}.v4i32.v16i8", total, *words)
    if one.name in ("dpbf16", *_SVE):
        return tirx.call_extern(typed(one.sums, lanes), f"im2win_{one.name}_{lanes}", total, data, taps)
    return total + data * taps


def definitions(one: Instruction, lanes: int) -> str:
    """LLVM code of functions that `multiplied` calls; "" if it calls none.

    TVM has no vectors of bfloat16 for its intrinsics, and no SVE vectors of the length that fixed ones fill.
    """
    if one.name in _SVE and lanes == _SVE_LANES:
        return _of_sve(one)
    if one.name not in _HALVES:
        return _NARROWED if narrows(one) else ""
    code = _NARROWED if narrows(one) and lanes == AVX512_LANES else ""
    sums, words, halves = f"<{lanes} x float>", f"<{2 * lanes} x i16>", f"<{2 * lanes} x bfloat>"
    intrinsic = _HALVES[one.name].format(bits=_BITS[lanes])
    return f"""{code}
declare {sums} {intrinsic}({sums}, {halves}, {halves})
define {sums} @im2win_{one.name}_{lanes}({sums} %s, {words} %x, {words} %w) alwaysinline nounwind {{
  %a = bitcast {words} %x to {halves}
  %b = bitcast {words} %w to {halves}
  %r = call {sums} {intrinsic}({sums} %s, {halves} %a, {halves} %b)
  ret {sums} %r
}}
"""


def narrows(one: Instruction) -> bool:
    """Whether a CPU that has an instruction has one that rounds vectors of float32 to bfloat16, which takes what is below the normal
    numbers as zero, as the products do."""
    return one.name == "dpbf16" or (one.tiles and "bfloat16" in one.dtypes)


def narrowed(value: Expr) -> Expr:
    """The bits of a vector of float32 of AVX-512, rounded to the nearest even bfloat16."""
    return tirx.call_extern(f"uint16x{AVX512_LANES}", "im2win_narrowed", value)


def rounded(value: Expr) -> Expr:
    """A vector of float32 of AVX-512 as int32, rounded to nearest even, in one instruction: LLVM takes two."""
    none, all_lanes, current = tirx.Broadcast(tirx.const(0, "int32"), AVX512_LANES), tirx.const(-1, "int16"), tirx.const(4, "int32")
    return tirx.call_llvm_pure_intrin(f"int32x{AVX512_LANES}", "llvm.x86.avx512.mask.cvtps2dq.512", value, none, all_lanes, current)


def packed(quarters: Sequence[Expr], dtype: str) -> Expr:
    """Four vectors of int32 of AVX-512, in the range of int8 or uint8, as one vector of bytes."""
    halves = [tirx.call_llvm_pure_intrin("int16x32", "llvm.x86.avx512.packssdw.512", *quarters[first : first + 2]) for first in (0, 2)]
    name = {"uint8": "llvm.x86.avx512.packuswb.512", "int8": "llvm.x86.avx512.packsswb.512"}[dtype]
    words = tirx.reinterpret("int32x16", tirx.call_llvm_pure_intrin(f"{dtype}x{PACKED}", name, *halves))
    # both pack inside lanes of 128 bits, each of which has a word of every quarter
    return tirx.reinterpret(f"{dtype}x{PACKED}", tirx.Shuffle([words], [4 * lane + quarter for quarter in range(4) for lane in range(4)]))


_NARROWED = """
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
define <16 x i16> @im2win_narrowed(<16 x float> %x) alwaysinline nounwind {
  %b = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %x)
  %r = bitcast <16 x bfloat> %b to <16 x i16>
  ret <16 x i16> %r
}
"""


def _of_sve(one: Instruction) -> str:
    """The function of an SVE instruction: vectors of a fixed length, which fill the registers that LLVM is told of, as scalable ones."""
    lanes, group, element = _SVE_LANES, one.group, f"i{32 // one.group}"
    (name, kind), number = _SVE[one.name], "i32" if one.sums == "int32" else "float"
    short = number.replace("float", "f32")
    sums, words = f"<{lanes} x {number}>", f"<{group * lanes} x {element}>"
    whole, bits, parts = f"<vscale x 4 x {number}>", f"<vscale x {4 * group} x {element}>", f"<vscale x {4 * group} x {kind}>"
    insert, extract = f"@llvm.vector.insert.nxv4{short}.v{lanes}{short}", f"@llvm.vector.extract.v{lanes}{short}.nxv4{short}"
    insert_words = f"@llvm.vector.insert.nxv{4 * group}{element}.v{group * lanes}{element}"
    return f"""
declare {whole} @{name}({whole}, {parts}, {parts})
declare {whole} {insert}({whole}, {sums}, i64)
declare {bits} {insert_words}({bits}, {words}, i64)
declare {sums} {extract}({whole}, i64)
define {sums} @im2win_{one.name}_{lanes}({sums} %s, {words} %x, {words} %w) alwaysinline nounwind {{
  %t = call {whole} {insert}({whole} poison, {sums} %s, i64 0)
  %p = call {bits} {insert_words}({bits} poison, {words} %x, i64 0)
  %q = call {bits} {insert_words}({bits} poison, {words} %w, i64 0)
  %a = bitcast {bits} %p to {parts}
  %b = bitcast {bits} %q to {parts}
  %d = call {whole} @{name}({whole} %t, {parts} %a, {parts} %b)
  %r = call {sums} {extract}({whole} %d, i64 0)
  ret {sums} %r
}}
"""
