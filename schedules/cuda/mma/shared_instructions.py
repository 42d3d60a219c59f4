"""Device functions with the PTX of `wgmma`, both operands in shared memory: generated for the sizes that a source calls."""

from __future__ import annotations

import re
from pathlib import Path

from im2win.schedules.cuda.arithmetic import KINDS

_CALL = re.compile(rf"im2win::wgmma_shared_({'|'.join(KINDS)})<(\d+), (\d+)>")


def _function(kind: str, columns: int, pitch: int) -> str:
    row = KINDS[kind]
    types, sum_type, constraint, depth, ending = row.types, row.sum_type, row.constraint, row.depth, row.shared_ending
    count = columns // 2  # accumulators of a thread
    sums = ", ".join(f"%{i}" for i in range(count))
    accumulators = ", ".join(f'"{constraint}"(c[{i}])' for i in range(count))
    return f"""template <>
__device__ __forceinline__ void wgmma_shared_{kind}<{columns}, {pitch}>(
    {sum_type}* c, const void* a, int a_leading, const void* b, int b_leading) {{
  asm volatile(
      "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{types} {{{sums}}}, %{count}, %{count + 1}, add{ending};\\n}}"
      : {accumulators}
      : "l"(matrix_descriptor(a, a_leading)), "l"(column_descriptor<{pitch}>(b, b_leading)), "n"(1));
}}"""


def shared_products(source: str) -> str:
    """Device functions, in namespace `im2win`, for sources that call them; "" for others."""
    wanted = sorted({(kind, int(columns), int(pitch)) for kind, columns, pitch in _CALL.findall(source)})
    if not wanted:
        return ""
    functions = "\n".join(_function(*one) for one in wanted)
    device = (Path(__file__).parent / "wgmma_shared.hpp").read_text()
    return f"{device}\n#ifndef IM2WIN_EMULATOR\nnamespace im2win {{\n{functions}\n}}  // namespace im2win\n#endif\n"
