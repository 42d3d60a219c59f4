"""Device functions with the PTX of `wgmma`, filters in shared memory: generated for the sizes that a source calls."""

from __future__ import annotations

import re

from im2win.schedules.cuda.arithmetic import KINDS

_CALL = re.compile(rf"im2win::wgmma_({'|'.join(KINDS)})<(\d+)>")


def _function(kind: str, columns: int) -> str:
    row = KINDS[kind]
    types, sum_type, constraint, depth, ending = row.types, row.sum_type, row.constraint, row.depth, row.ending
    count = columns // 2  # accumulators of a thread
    sums = ", ".join(f"%{i}" for i in range(count))
    words = ", ".join(f"%{count + i}" for i in range(4))
    accumulators = ", ".join(f'"{constraint}"(c[{i}])' for i in range(count))
    return f"""template <>
__device__ __forceinline__ void wgmma_{kind}<{columns}>(
    {sum_type}* c, const unsigned* upper, const unsigned* lower, const void* b, int leading) {{
  asm volatile(
      "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 5}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{types} {{{sums}}}, {{{words}}}, %{count + 4}, add{ending};\\n}}"
      : {accumulators}
      : "r"(upper[0]), "r"(lower[0]), "r"(upper[1]), "r"(lower[1]), "l"(matrix_descriptor(b, leading)), "n"(1));
}}"""


def warpgroup_products(source: str) -> str:
    """Device functions, in namespace `im2win`, for every `wgmma` that the source calls; "" where the emulator defines them."""
    wanted = sorted({(kind, int(columns)) for kind, columns in _CALL.findall(source)})
    if not wanted:
        return ""
    functions = "\n".join(_function(*one) for one in wanted)
    return f"#ifndef IM2WIN_EMULATOR\nnamespace im2win {{\n{functions}\n}}  // namespace im2win\n#endif\n"
