"""Device functions with the PTX of `wgmma`, both operands in shared memory: generated for the sizes that a source calls."""

from __future__ import annotations

import re
from pathlib import Path

from im2win.schedules.cuda.arithmetic import KINDS, WARPGROUP_ONLY

_CALL = re.compile(rf"im2win::wgmma_(shared|lines|first)_({'|'.join(KINDS)})<(\d+)(?:, (\d+))?>")
_WITHOUT_WARPS = [row.kind for row in WARPGROUP_ONLY.values()]
_TRANSPOSED = {", 1, 1, 0, 0": ", 1, 1, 0, 1"}  # by the ending of an instruction, that of the one whose second operand is MN-major


def _function(form: str, kind: str, columns: int, pitch: int) -> str:
    row = KINDS[kind]
    types, sum_type, constraint, depth, ending = row.types, row.sum_type, row.constraint, row.depth, row.shared_ending
    count, add = columns // 2, int(form != "first")  # accumulators of a thread; whether products are added to what they hold
    sums = ", ".join(f"%{i}" for i in range(count))
    accumulators = ", ".join(f'"{constraint}"(c[{i}])' for i in range(count))
    sizes, descriptor = f"{columns}, {pitch}", f"column_descriptor<{pitch}>"
    if form == "lines":
        sizes, descriptor, ending = f"{columns}", "line_descriptor", _TRANSPOSED[ending]
    return f"""template <>
__device__ __forceinline__ void wgmma_{form}_{kind}<{sizes}>(
    {sum_type}* c, const void* a, int a_leading, const void* b, int b_leading) {{
  asm volatile(
      "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{types} {{{sums}}}, %{count}, %{count + 1}, add{ending};\\n}}"
      : {accumulators}
      : "l"(matrix_descriptor(a, a_leading)), "l"({descriptor}(b, b_leading)), "n"({add}));
}}"""


def shared_products(source: str) -> str:
    """Device functions, in namespace `im2win`, for sources that call them; "" for others."""
    wanted = sorted({(form, kind, int(columns), int(pitch or 0)) for form, kind, columns, pitch in _CALL.findall(source)}, reverse=True)
    if not wanted:
        return ""
    functions = "\n".join(_function(*one) for one in wanted)
    device = (Path(__file__).parent / "wgmma_shared.hpp").read_text()
    if any(kind in _WITHOUT_WARPS for _, kind, _, _ in wanted):
        device += "\n" + (Path(__file__).parent / "wgmma_float8.hpp").read_text()
    return f"{device}\n#ifndef IM2WIN_EMULATOR\nnamespace im2win {{\n{functions}\n}}  // namespace im2win\n#endif\n"
