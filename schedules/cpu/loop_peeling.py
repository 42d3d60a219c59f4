"""Loop peeling: tiles that do not divide a loop, without a predicate in the micro-kernel.

A split that does not divide leaves a predicate on its block. If the predicate is marked *likely*, TVM's LoopPartition cuts the loop in two:
whole tiles without a predicate, and one smaller tile for the rest with registers and unrolled code of its own. Each condition of a
predicate is marked by itself, so that loops are cut one after the other: `likely(a and b)` would cut none.

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


def _likely(predicate: object) -> object:
    if isinstance(predicate, tirx.And):
        return tirx.And(_likely(predicate.a), _likely(predicate.b))
    return predicate if isinstance(predicate, tirx.IntImm) else tirx.likely(predicate)


def _mark(stmt: object) -> object:
    if isinstance(stmt, SBlockRealize):
        old = stmt.block
        inside = (old.init, old.alloc_buffers, old.match_buffers, old.annotations)
        block = SBlock(old.iter_vars, old.reads, old.writes, old.name_hint, _mark(old.body), *inside)
        return SBlockRealize(stmt.iter_values, _likely(stmt.predicate), block)
    if isinstance(stmt, tirx.For):
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, _mark(stmt.body), stmt.thread_binding, stmt.annotations)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_mark(child) for child in stmt.seq])
    return stmt


def mark_tails(module: tvm.IRModule) -> tvm.IRModule:
    """Marks every condition of a scheduled module's block predicates as likely, so that LoopPartition (with `CONFIG`) cuts it away."""
    return tvm.IRModule({name: func.with_body(_mark(func.body)) for name, func in module.functions.items()})
