"""Measures the workspace of a kernel: the buffers that its code allocates, read while TVM compiles it."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import tirx
from tvm.ir.instrument import pass_instrument

_SHARED = "tirx.StorageRewrite"  # after this pass, buffers with disjoint lifetimes share memory


@pass_instrument
class Allocations:
    """A pass instrument that notes the bytes that one call of a kernel allocates beside its arguments.

    Attributes:
        bytes: the most alive at once; a buffer in a parallel loop counts once for each thread. Register tiles (scope "local") do not count.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.bytes = 0

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        if info.name == _SHARED:
            self.bytes = max(peak_bytes(function.body, self.threads) for function in module.functions.values())


def peak_bytes(stmt: Any, threads: int) -> int:
    """The most bytes of buffers that are alive at once under a statement.

    A buffer is alive from its allocation to the end of that sequence. Statements that follow one another (a loop cut in two) do not add up.
    """
    alive = peak = 0
    for child in children(stmt):
        alive += buffer_bytes(child)
        peak = max(peak, alive + peak_bytes(child, threads))
    parallel = isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL
    return min(threads, int(stmt.extent)) * peak if parallel else peak


def children(stmt: Any) -> list[Any]:
    """The child statements of a statement of lowered code."""
    if isinstance(stmt, tirx.For | tirx.AttrStmt):
        return [stmt.body]
    if isinstance(stmt, tirx.SeqStmt):
        return list(stmt.seq)
    if isinstance(stmt, tirx.IfThenElse):
        return [stmt.then_case] if stmt.else_case is None else [stmt.then_case, stmt.else_case]
    leaves = (tirx.AllocBuffer, tirx.BufferStore, tirx.Bind, tirx.DeclBuffer, tirx.Evaluate, tirx.AssertStmt)
    assert isinstance(stmt, leaves), f"a statement that may hold buffers: {type(stmt)}"
    return []


def buffer_bytes(stmt: Any) -> int:
    """Bytes that one statement allocates."""
    if not isinstance(stmt, tirx.AllocBuffer) or stmt.buffer.scope() == "local":
        return 0
    dtype = tvm.DataType(stmt.buffer.dtype)
    return int(math.prod(int(extent) for extent in stmt.buffer.shape) * dtype.bits * dtype.lanes // 8)
