"""Accumulators in registers: turns tiles of scope "local" into stack variables, which LLVM promotes to registers one loop at a time.

TVM takes the memory of a buffer of 1024 bytes or more from its workspace pool. LLVM promotes such a tile to registers, too, but must then
store the values back where the outermost loop ends. The accumulators of the last whole tile then occupy registers without use, while the
smaller tile of the rest runs out of registers and spills.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.tirx.compilation_pipeline import get_tir_pipeline, register_tir_pipeline

PIPELINE = "im2win_cpu"  # TVM's own pipeline followed by the pass below
LAST_PASS = "im2win.RegisterTiles"
_ON_STACK = "disable_lower_builtin"  # TVM's attribute of an allocation that the code generator handles, not the workspace pool


def _mark(stmt: object) -> object:
    if isinstance(stmt, tirx.AllocBuffer) and stmt.buffer.scope() == "local":
        return tirx.AllocBuffer(stmt.buffer, {**stmt.annotations, _ON_STACK: tirx.IntImm("bool", 1)})
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_mark(child) for child in stmt.seq])
    if isinstance(stmt, tirx.For):
        body = _mark(stmt.body)
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations, stmt.step)
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, _mark(stmt.body))
    if isinstance(stmt, tirx.IfThenElse):
        return tirx.IfThenElse(stmt.condition, _mark(stmt.then_case), _mark(stmt.else_case) if stmt.else_case else None)
    return stmt


@tirx.transform.prim_func_pass(opt_level=0, name=LAST_PASS)  # type: ignore[untyped-decorator]
def register_tiles(function: tirx.PrimFunc, module: tvm.IRModule, context: tvm.transform.PassContext) -> tirx.PrimFunc:
    """Marks every register tile of a lowered kernel as a stack variable."""
    return function.with_body(_mark(function.body))


def _pipeline() -> tuple[tvm.transform.Pass, object, object]:
    lowering, host, device = get_tir_pipeline("default")
    return tvm.transform.Sequential([lowering, register_tiles]), host, device


register_tir_pipeline(PIPELINE, _pipeline)
