"""GPU schedules of functions that are no convolutions.

dlight schedules long sums and maxima with one thread block for each output. All other functions use one thread for each output: producers
are inlined where possible, and short reductions before the output (over a window, say) run in the thread's registers.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import Schedule, ScheduleError, dlight

from im2win.frontends.models.loops import blocks_of, kinds_of

_REDUCTIONS = (dlight.gpu.Matmul, dlight.gpu.GEMV, dlight.gpu.Reduction, dlight.gpu.GeneralReduction)
_LONG = 64  # terms of a sum or maximum from which on a thread block computes it; a pooling window has fewer
_THREADS = 256  # of a thread block


def schedule(function: tirx.PrimFunc, target: Any) -> tirx.PrimFunc:
    """The function with its loops bound to thread blocks and threads."""
    sch = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
    if _terms(sch) < _LONG:
        with contextlib.suppress(ScheduleError, ValueError):  # a schedule primitive that does not apply, or several outputs
            _a_thread_an_output(sch)
            return sch.mod["main"].with_attr("tirx.is_scheduled", True)
    for rule in (*_REDUCTIONS, dlight.gpu.Fallback):
        with target, contextlib.suppress(ScheduleError):  # dlight tried a rule that does not apply
            found = rule().apply(function, target, False)
            if found is not None:
                return found.mod["main"].with_attr("tirx.is_scheduled", True)
    return function


def _terms(sch: Schedule) -> int:
    """Number of terms of the longest reduction; 1 where there is none."""
    counts = [1]
    for block in blocks_of(sch):
        extents = [axis.dom.extent for axis in sch.get(block).iter_vars if axis.iter_type == tirx.IterVar.CommReduce]
        counts.append(math.prod(map(int, extents)))
    return max(counts)


def _a_thread_an_output(sch: Schedule) -> None:
    """Schedules one thread for each output, for functions with one output.

    Raises:
        ScheduleError, ValueError: the function is not of this kind.
    """
    for block in blocks_of(sch)[:-1]:
        if "R" not in kinds_of(sch, block):
            sch.compute_inline(block)
    *producers, last = blocks_of(sch)
    if len(sch.get_output_blocks(sch.get_sblock("root"))) != 1:
        raise ValueError("several outputs")
    loops = sch.get_loops(last)
    kinds = kinds_of(sch, last)
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "S"]
    sums = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "R"]
    sch.reorder(*spatial, *sums)
    block, thread = sch.split(sch.fuse(*spatial), [None, _THREADS])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    if sums:
        sch.decompose_reduction(last, sums[0])
    for producer in reversed(producers):
        sch.compute_at(producer, thread, preserve_unit_loops=True)
        for made in range(len(sch.get(producer).writes)):
            sch.set_scope(producer, made, "local")
        if "R" in kinds_of(sch, producer):
            sch.decompose_reduction(producer, sch.get_loops(producer)[2 + kinds_of(sch, producer).index("R")])
