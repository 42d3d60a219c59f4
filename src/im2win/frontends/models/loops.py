"""CPU schedules of functions that are no convolutions: elementwise loops, pooling, normalisation, softmax, transposition, copies.

One rule serves all of them. Producers are inlined where possible. The last block's outer loops are fused and run in parallel. Producers
that remain are computed inside that loop, a piece at a time, so that a piece stays in the cache. Reductions over a window run tap by tap
with the columns innermost, where LLVM vectorises them (`OPTIONS` lets it reorder sums for that):

    parallel (image, channel)
        stage the padded plane
        for row
            for tap: for column: out[row, column] = max(out[row, column], plane[row*s + u, column*s + v])
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.frontends.models.kernels import INTERLEAVED
from im2win.frontends.models.rows import ROWS, SCHEDULED

OPTIONS = {"fast-math-reassoc": True, "fast-math-contract": True}  # LLVM options, for these kernels only

_STEPS = 4  # parallel steps for each thread, for load balance
_ROWS = 8  # rows of a parallel step, at most
_SMALL = 1 << 14  # elements below which waking the threads costs more than they save


def schedule(function: tirx.PrimFunc, threads: int) -> tirx.PrimFunc:
    """The function with its loops scheduled. It is returned unchanged, correct but slow, where no rule applies."""
    if dict(function.attrs or {}).get(SCHEDULED):
        return function
    for rule in (_together, _one_by_one):
        sch = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
        with contextlib.suppress(tvm.s_tir.ScheduleError, ValueError):  # a schedule primitive that does not apply, or no blocks
            rule(sch, threads)
            return sch.mod["main"]
    return function


def _together(sch: Schedule, threads: int) -> None:
    """Applies the rule of this module to a function with one output."""
    rows = int(dict(sch.mod["main"].attrs or {}).get(ROWS, 0))
    _inline(sch, rows > 0)
    *producers, last = blocks_of(sch)
    if len(sch.get_output_blocks(sch.get_sblock("root"))) != 1:
        raise tvm.s_tir.ScheduleError("several outputs")
    outer = rows or _outer(sch, last, producers, threads)
    loops = sch.get_loops(last)
    work = max(_work(sch, block) for block in (*producers, last))
    step = None
    if outer and loops:  # a single number has none
        loops = _several_rows(sch, loops[:rows]) if rows else loops[:outer]
        step = sch.fuse(*loops) if len(loops) > 1 else loops[0]
        for block in reversed(producers):
            sch.compute_at(block, step, preserve_unit_loops=True)
        if work >= _SMALL:
            sch.parallel(step)
    for block in (*producers, last):
        _inner(sch, block, step, rows)
    across = int(dict(sch.mod["main"].attrs or {}).get(INTERLEAVED, 1))
    if across > 1 and int(sch.get(columns := sch.get_loops(last)[-1]).extent) % across == 0:
        sch.unroll(sch.split(columns, [None, across])[1])  # LLVM then makes vectors of the outer loop and shuffles them together


def _several_rows(sch: Schedule, loops: list[LoopRV]) -> list[LoopRV]:
    """Moves some iterations of a loop over rows to the inside: the latencies of a row's sums and maxima then overlap with other rows'."""
    divisors = [max(count for count in range(1, _ROWS + 1) if int(sch.get(loop).extent) % count == 0) for loop in loops]
    place = divisors.index(max(divisors))
    outer, inner = sch.split(loops[place], [None, divisors[place]])
    left = [*loops[:place], outer, *loops[place + 1 :]]
    sch.reorder(*left, inner)
    return left


def blocks_of(sch: Schedule) -> list[SBlockRV]:
    """A function's blocks in order."""
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def kinds_of(sch: Schedule, block: SBlockRV) -> str:
    """A letter for each loop variable of a block: S spatial, R reduction."""
    return "".join("S" if one.iter_type == tirx.IterVar.DataPar else "R" for one in sch.get(block).iter_vars)


def _inline(sch: Schedule, rows: bool) -> None:
    """Inlines blocks that a reader computes as fast as it would load them: plain expressions, except paddings before a window.

    With `rows`, a value that all elements of a row read is computed once.
    """
    for block in blocks_of(sch)[:-1]:
        if "R" in kinds_of(sch, block):
            continue
        readers = sch.get_consumers(block)
        windows = any("R" in kinds_of(sch, reader) for reader in readers)
        if _calls(sch.get(block).body) and (len(readers) > 1 or windows):
            continue  # a padding, or an exponential with two readers
        if rows and any(_work(sch, reader) > _work(sch, block) for reader in readers):
            continue  # one value for a row
        try:
            sch.compute_inline(block)
        except tvm.s_tir.ScheduleError:
            continue


def _calls(node: Any) -> bool:
    """Whether a block's body or expression calls functions or tests conditions."""
    if isinstance(node, tvm.ir.Call | tirx.Select):
        return True
    parts = (getattr(node, name, None) for name in ("a", "b", "value", "body"))
    return any(_calls(part) for part in parts if isinstance(part, tirx.Stmt | tirx.Expr))


def _work(sch: Schedule, block: SBlockRV) -> int:
    return math.prod(int(one.dom.extent) for one in sch.get(block).iter_vars)


def _outer(sch: Schedule, last: SBlockRV, producers: list[SBlockRV], threads: int) -> int:
    """Number of the last block's loops that run in parallel.

    It is small where inner loops are long. It never includes a loop whose iterations would share a reduction.
    """
    variables = sch.get(last).iter_vars
    kinds = kinds_of(sch, last)
    most = kinds.index("R") if "R" in kinds else len(kinds)
    made = [sch.get(block).writes[0].source for block in producers]
    for region in sch.get(last).reads:
        if not any(region.source.same_as(buffer) for buffer in made):
            continue
        used = {variable for extent in region.region for variable in tirx.analysis.undefined_vars(extent.min)}
        shared = [place for place, one in enumerate(variables) if int(one.dom.extent) > 1 and one.var not in used]
        most = min([most, *shared])
    count, steps = 0, 1
    while count < most and steps < _STEPS * threads:
        steps *= int(variables[count].dom.extent)
        count += 1
    return count


def _inner(sch: Schedule, block: SBlockRV, step: LoopRV | None, rows: int = 0) -> None:
    """Orders a block's loops under its parallel loop.

    Reductions go outside the innermost spatial loop. Where no other loop is left, or `rows` loops over rows alone, a block's reduction
    stays whole.
    """
    loops = sch.get_loops(block)
    if step is not None:
        place = next((number for number, loop in enumerate(loops) if sch.get(loop).same_as(sch.get(step))), -1)
        loops = loops[place + 1 :]
    kinds = kinds_of(sch, block)[-len(loops) :] if loops else ""
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "S"]
    sums = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "R"]
    if not sums:
        if _straight(sch, block, len(spatial)) and len(spatial) > 1:
            sch.fuse(*spatial)
        return
    inner = next((loop for loop in reversed(spatial[rows:]) if int(sch.get(loop).extent) > 1), None)
    if inner is None:
        if len(sums) > 1 and _straight(sch, block, len(sums)):
            sums = [sch.fuse(*sums)]
        sch.decompose_reduction(block, sums[0])
        return
    outer = [loop for loop in spatial if not loop.same_as(inner)]
    sch.reorder(*outer, *sums, inner)
    sch.decompose_reduction(block, sums[0])


def _straight(sch: Schedule, block: SBlockRV, count: int) -> bool:
    """Whether a block walks the last `count` axes of its tensors as one contiguous line, and uses those variables for nothing else."""
    stated = sch.get(block)
    variables = [one.var for one in stated.iter_vars[-count:]]
    extents = [int(one.dom.extent) for one in stated.iter_vars[-count:]]
    if _mentions(stated.body, variables):
        return False
    for region in (*stated.reads, *stated.writes):
        axes = [extent.min for extent in region.region]
        used = {variable for axis in axes for variable in tirx.analysis.undefined_vars(axis)}
        if not any(variable in used for variable in variables):
            continue
        shape = [int(extent) for extent in region.source.shape[-count:]]
        if len(axes) < count or shape != extents or not all(axis.same_as(one) for axis, one in zip(axes[-count:], variables, strict=True)):
            return False
    return True


def _mentions(node: Any, variables: list[Any]) -> bool:
    """Whether an expression uses variables other than as tensor indices."""
    if isinstance(node, tvm.ir.Var):
        return any(node.same_as(variable) for variable in variables)
    if hasattr(node, "indices") and not isinstance(node, tirx.Stmt):
        return False
    parts = [getattr(node, name, None) for name in ("a", "b", "value", "body", "condition", "true_value", "false_value")]
    parts += list(node.args) if isinstance(node, tvm.ir.Call) else []
    return any(_mentions(part, variables) for part in parts if isinstance(part, tirx.Stmt | tirx.Expr))


def _one_by_one(sch: Schedule, threads: int) -> None:
    """Schedules each block by itself."""
    for block in blocks_of(sch):
        _parallel_alone(sch, block, threads)


def _parallel_alone(sch: Schedule, block: SBlockRV, threads: int) -> None:
    """Runs the outer spatial loops of a block in parallel."""
    loops = sch.get_loops(block)
    kinds = kinds_of(sch, block)
    count, steps = 0, 1
    while count < len(loops) and kinds[count] == "S" and steps < _STEPS * threads:
        steps *= int(sch.get(loops[count]).extent)
        count += 1
    if count and _work(sch, block) >= _SMALL:
        sch.parallel(sch.fuse(*loops[:count]))
