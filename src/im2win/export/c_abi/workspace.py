"""Measures the workspace of a CPU kernel from the allocation calls in its lowered code."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir.instrument import pass_instrument

ALIGNMENT = 64  # bytes; alignment of every allocation

_LOWERED = "tirx.LowerTVMBuiltin"  # after this pass, an allocation that does not fit on the stack is a call
_ALLOCATE = "tirx.TVMBackendAllocWorkspace"


@pass_instrument
class Workspace:
    """A pass instrument that notes the bytes that a call needs: `serial` for the call itself, `task` for each task of a parallel loop."""

    def __init__(self) -> None:
        self.serial = self.task = 0

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        if info.name == _LOWERED:
            for function in module.functions.values():
                self.serial = max(self.serial, self._peak(function.body))

    def bytes(self, threads: int) -> int:
        """Bytes for at most `threads` concurrent tasks."""
        return self.serial + threads * self.task

    def _peak(self, stmt: Any) -> int:
        """Most bytes alive at once under a statement, without those of tasks. An allocation lives to the end of its sequence."""
        alive = peak = 0
        for child in _children(stmt):
            alive += _allocated(child)
            peak = max(peak, alive + self._peak(child))
        if isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL:
            self.task = max(self.task, peak)
            return 0
        return peak


def _children(stmt: Any) -> list[Any]:
    if isinstance(stmt, tirx.SeqStmt):
        return list(stmt.seq)
    if isinstance(stmt, tirx.IfThenElse):
        return [one for one in (stmt.then_case, stmt.else_case) if one is not None]
    return [stmt.body] if hasattr(stmt, "body") else []


def _allocated(stmt: Any) -> int:
    call = stmt.data if isinstance(stmt, tirx.DeclBuffer) else None
    if not isinstance(call, tvm.ir.Call) or getattr(call.op, "name", "") != _ALLOCATE:
        return 0
    return -(-int(call.args[2]) // ALIGNMENT) * ALIGNMENT
