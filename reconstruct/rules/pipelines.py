"""One barrier a step instead of two, in loops that TVM has made a pipeline over a ring of buffers.

TVM waits before the copies of a later step, and again before the products of this step:

    for step                                       for step
        __syncthreads()                                __syncthreads()
        ring[(step + n) % (n + 1)] = ...               ring[(step + n) % (n + 1)] = ...
        __syncthreads()                   becomes      sums += ring[step % (n + 1)]
        sums += ring[step % (n + 1)]               __syncthreads()
    sums += the last steps                         sums += the last steps

The products of a step read what was copied before the first barrier, so only the products behind the loop need the second one.

Where copies pass through registers, and are stored behind the products, TVM waits before these stores too:

    for step                                       for step
        registers = ...                                registers = ...
        __syncthreads()                                __syncthreads()
        sums += ring[step % 2]             becomes     sums += ring[step % 2]
        __syncthreads()                                ring[(step + 1) % 2] = registers
        ring[(step + 1) % 2] = registers
    __syncthreads()                                __syncthreads()
    sums += the last step                          sums += the last step

The other buffer was read before the first barrier, so the stores need not wait. Every change is shown to be free of races (`races`), or
refused.
"""

from __future__ import annotations

import itertools

from im2win.reconstruct.parse.expressions import Call
from im2win.reconstruct.parse.statements import Barrier, Declaration, Effect, Loop, Statement, has_barrier
from im2win.reconstruct.parse.unit import Edit, Kernel, Unit
from im2win.reconstruct.rules.races import race
from im2win.reconstruct.text_rules import Match
from im2win.reconstruct.trace.events import NotShown

RULE = "pipelines"
WHY = "the products of a step read what was copied before its first barrier"
WHY_STORES = "the buffer that a step stores to was read before its first barrier"


def pipeline_of(kernel: Kernel) -> Loop | None:
    """The outermost loop whose body begins with a barrier, behind declarations and a wait for copies; None without one."""
    for loop in kernel.loops:
        first = next((part for part in loop.body if not isinstance(part, Declaration) and not _waits(part)), None)
        if isinstance(first, Barrier):
            return loop
    return None


def _waits(part: Statement) -> bool:
    """Whether a statement waits for asynchronous copies."""
    return isinstance(part, Effect) and isinstance(part.value, Call) and part.value.function == "im2win::wait_copies"


def stores_last(kernel: Kernel) -> Loop | None:
    """The outermost loop that loads, waits, multiplies, waits and stores, with a barrier behind it; None without one."""
    parts = [part for part in kernel.statements if not isinstance(part, Declaration)]
    for loop, behind in itertools.pairwise(parts):
        if isinstance(loop, Loop) and isinstance(behind, Barrier) and not isinstance(loop.body[-1], Barrier):
            barriers = [part for part in loop.body if isinstance(part, Barrier)]
            if len(barriers) == 2 and sum(map(has_barrier, loop.body)) == 2:
                return loop
    return None


def _edits(kernel: Kernel) -> list[Edit]:
    """The changes to a kernel's pipeline; none where it has no loop with two barriers a step."""
    loop = pipeline_of(kernel)
    barriers = [part for part in loop.body if isinstance(part, Barrier)] if loop else []
    if loop is None:
        if (loop := stores_last(kernel)) is None:
            return []
        second = [part for part in loop.body if isinstance(part, Barrier)][1]
        return [Edit(second.span, "", RULE, WHY_STORES)]
    if len(barriers) != 2 or sum(map(has_barrier, loop.body)) != 2:
        return []
    indent = kernel.source[kernel.source.rfind("\n", 0, loop.span[0]) + 1 : loop.span[0]]
    return [
        Edit(barriers[1].span, "", RULE, WHY),
        Edit((loop.span[1], loop.span[1]), f"\n{indent}__syncthreads();", RULE, "the products behind the loop read its last copies"),
    ]


def rewrite(unit: Unit) -> tuple[Unit, list[Match], list[str]]:
    """Removes the second barrier of every pipeline's step where that is shown to be right.

    Returns:
        The new unit, its changes, and a note for every kernel.
    """
    notes, matches = list[str](), list[Match]()
    for name in unit.kernels:
        kernel = unit.kernel(name)
        if not (edits := _edits(kernel)):
            notes.append(f"{RULE}: kernel {name} has no loop with two barriers a step")
            continue
        changed, made = unit.edited(edits)
        try:
            reason = race(changed, name)
        except NotShown as error:
            reason = str(error)
        if reason is None:
            unit, matches = changed, matches + made
            notes.append(f"{RULE}: kernel {name} has one barrier a step")
        else:
            notes.append(f"{RULE}: kernel {name} keeps two barriers a step: {reason}")
    return unit, matches, notes
