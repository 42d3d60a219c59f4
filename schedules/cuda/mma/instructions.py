"""The PTX of a warpgroup's products, for the sizes that a source calls: their operands are too many to write down."""

from __future__ import annotations

import re

_CALL = re.compile(r"im2win::wgmma_(f16|tf32|s8)<(\d+)>")
# of a kind: types in the instruction, the sums' type in C++ and in a constraint, elements that it is long, what follows the operands
_KINDS = {
    "f16": ("f32.f16.f16", "float", "+f", 16, ", 1, 1, 0"),
    "tf32": ("f32.tf32.tf32", "float", "+f", 8, ", 1, 1"),
    "s8": ("s32.s8.s8", "int", "+r", 32, ""),
}


def _function(kind: str, columns: int) -> str:
    types, sum_type, constraint, depth, ending = _KINDS[kind]
    count = columns // 2  # sums of a thread
    sums = ", ".join(f"%{i}" for i in range(count))
    words = ", ".join(f"%{count + i}" for i in range(4))
    held = ", ".join(f'"{constraint}"(c[{i}])' for i in range(count))
    return f"""template <>
__device__ __forceinline__ void wgmma_{kind}<{columns}>(
    {sum_type}* c, const unsigned* upper, const unsigned* lower, const void* b, int leading) {{
  asm volatile(
      "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 5}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{types} {{{sums}}}, {{{words}}}, %{count + 4}, add{ending};\\n}}"
      : {held}
      : "r"(upper[0]), "r"(lower[0]), "r"(upper[1]), "r"(lower[1]), "l"(matrix_descriptor(b, leading)), "n"(1));
}}"""


def warpgroup_products(source: str) -> str:
    """Device functions, in namespace im2win, for every product of a warpgroup that the source calls; nothing for the emulator."""
    wanted = sorted({(kind, int(columns)) for kind, columns in _CALL.findall(source)})
    if not wanted:
        return ""
    functions = "\n".join(_function(*one) for one in wanted)
    return f"#ifndef IM2WIN_EMULATOR\nnamespace im2win {{\n{functions}\n}}  // namespace im2win\n#endif\n"
