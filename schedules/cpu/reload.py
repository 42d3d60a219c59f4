"""Inputs that several K steps of a register tile read: kept in registers by the compiler, or loaded by every step.

Neighbouring taps read overlapping windows. LLVM unrolls short loops over taps, loads each input once, and keeps all of them until their
last use. On machines with few registers the accumulators must then leave theirs: of 6 windows x 2 vectors x 3x3 taps on AVX2, 41 of 191
instructions reach for the stack. To load again costs less: a core begins two loads and two FMAs in a cycle, and 12 FMAs need 8 loads.

The fence between K steps is one of the compiler alone (`syncscope("singlethread")`), for which it emits no instruction. It may neither use
an input that it loaded before the fence again, nor load one of the next step ahead.

before                                             after
    for c, u, v:                                       for c, u, v:
        sums[...] += input * filter                        fence
                                                           sums[...] += input * filter
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from im2win.schedules.cpu.products import Ends, Expr, Values, uses, with_body

_FENCE = "im2win_fence"
_LLVM = f"""
define void @{_FENCE}() alwaysinline nounwind {{
  fence syncscope("singlethread") seq_cst
  ret void
}}
"""
_SUM = ("c", "u", "v")  # axes of the sum


def with_fence(module: tvm.IRModule) -> tvm.IRModule:
    """A module whose loops `fence` has changed, with the definition of the fence."""
    return tvm.IRModule({name: func.with_body(_with_definition(func.body)) for name, func in module.functions.items()})


def fence(loop: Expr, values: Values, inner: Ends, body: Any) -> Any:
    """The body of a loop of a product; that of the innermost loop over K steps begins with the fence."""
    if not any(uses(values[axis], loop) for axis in _SUM) or any(uses(values[axis], var) for axis in _SUM for var in inner):
        return body
    return tirx.SeqStmt([tirx.Evaluate(tirx.call_extern("void", _FENCE)), body])


def _with_definition(root: Any) -> Any:
    """The root block of a function, with the definition of the fence for TVM's code generator."""
    text = tvm.ir.StringImm(_LLVM)
    return with_body(root, tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", text, root.block.body))
