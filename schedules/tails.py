"""Tails: tiles that do not divide a loop, without a test in the micro-kernel.

A split that does not divide leaves a predicate on its block. Marked as *likely*, the predicate makes TVM's LoopPartition cut the loop in
two: whole tiles without any test, and one smaller tile for the rest, whose registers and unrolled code are its own.

before                                             after
    for xo in 4:                                       for xo in 3:                  # 14 windows each
        for xi in 14:                                      for xi in 14: ...
            if xo*14 + xi < 54: ...                    for xi in 12: ...             # the rest
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

CONFIG = {"s_tir.LoopPartition": {"partition_const_loop": True}}


def _constant(predicate: object) -> bool:
    return isinstance(predicate, tirx.IntImm)


def _mark(stmt: object) -> object:
    if isinstance(stmt, SBlockRealize):
        old = stmt.block
        block = SBlock(
            old.iter_vars,
            old.reads,
            old.writes,
            old.name_hint,
            _mark(old.body),
            old.init,
            old.alloc_buffers,
            old.match_buffers,
            old.annotations,
        )
        predicate = stmt.predicate if _constant(stmt.predicate) else tirx.likely(stmt.predicate)
        return SBlockRealize(stmt.iter_values, predicate, block)
    if isinstance(stmt, tirx.For):
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, _mark(stmt.body), stmt.thread_binding, stmt.annotations)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_mark(child) for child in stmt.seq])
    return stmt


def mark_tails(module: tvm.IRModule) -> tvm.IRModule:
    """Marks every block predicate of a scheduled module as likely, for LoopPartition (with `CONFIG`) to cut away."""
    return tvm.IRModule({name: func.with_body(_mark(func.body)) for name, func in module.functions.items()})
