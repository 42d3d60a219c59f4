"""Deletion and weakening of barriers, proven by index analysis.

Without a barrier, two epochs become one. If no threads of different warps conflict in it, `__syncwarp` is enough. If no threads of one warp
conflict either, no barrier is needed. `trace` enumerates every address, `footprints` finds conflicts. Barriers are decided one by one, each
with the previous decisions in force. Global memory that the kernel writes counts like shared memory. A barrier next to a fence or an atomic
operation stays, because other blocks observe the order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from im2win.reconstruct.parse.scan import written
from im2win.reconstruct.parse.unit import WARP, Edit, Kernel, Unit
from im2win.reconstruct.text_rules import Match
from im2win.reconstruct.trace.events import BarrierReached, NotShown
from im2win.reconstruct.trace.footprints import Conflict, Ledger
from im2win.reconstruct.trace.trace import Trace

Needed = Literal["needed", "not shown", "warp", "none"]
RULE = "barriers"
BLOCKS = 4096  # the largest grid whose blocks are analysed one by one


@dataclass(frozen=True)
class Verdict:
    """The result of the analysis of one barrier.

    number: index among the kernel's barriers in source order. line: in the source. scope: "block" or "warp", of the barrier as it is.
    outcome: "needed"; "not shown" to be needless, so it stays; "warp": only threads of one warp conflict; "none": no threads conflict.
    """

    kernel: str
    number: int
    line: int
    span: tuple[int, int]
    scope: str
    outcome: Needed
    why: str

    @property
    def replacement(self) -> str | None:
        """The text that replaces the barrier; None if it stays."""
        if self.outcome == "none":
            return ""
        return "__syncwarp();" if self.outcome == "warp" and self.scope == "block" else None


def barrier_verdicts(kernel: Kernel) -> list[Verdict]:
    """A verdict on every barrier of a kernel, in source order. The barriers that are executed most often are decided first.

    Raises:
        ReconstructError: the kernel has barriers, and its launch is not known.
    """
    count = len(kernel.barriers)
    if not count:
        return []
    try:
        ledgers = _ledgers(kernel)
    except NotShown as error:
        return [_verdict(kernel, number, "not shown", str(error)) for number in range(count)]
    state = [barrier.scope for barrier in kernel.barriers]
    counts = Counter(epoch.ended.number for epoch in ledgers[0].epochs if epoch.ended)
    found = dict[int, Verdict]()
    for number in sorted(range(count), key=lambda number: (-counts[number], number)):
        outcome, why = _decide(kernel, ledgers, state, number)
        if outcome in ("warp", "none"):
            state[number] = outcome
        found[number] = _verdict(kernel, number, outcome, why)
    return [found[number] for number in range(count)]


def _verdict(kernel: Kernel, number: int, outcome: Needed, why: str) -> Verdict:
    barrier = kernel.barriers[number]
    return Verdict(kernel.name, number, kernel.line(barrier.span[0]), barrier.span, barrier.scope, outcome, why)


def _ledgers(kernel: Kernel) -> list[Ledger]:
    """A ledger for every combination of scalar arguments, and for every block unless one block represents all."""
    outputs = written(kernel)
    loose = [parameter.name for parameter in kernel.parameters if parameter.element and not parameter.restrict]
    if outputs and loose:
        raise NotShown(f"parameter {loose[0]} is not __restrict__: what it points to may be what the kernel writes")
    tracked = {array.name for array in kernel.shared} | outputs
    count, threads = math.prod(kernel.launch.grid), kernel.threads
    given = [{name: np.array(value) for name, value in numbers.items()} for numbers in kernel.numbers]
    try:
        return [Ledger(Trace(kernel, tracked, None, names), threads) for names in given]
    except NotShown as error:
        if count > BLOCKS:
            raise
        first = error
    x, y, _ = kernel.launch.grid
    blocks = [(np.array([i % x]), np.array([i // x % y]), np.array([i // (x * y)])) for i in range(count)]
    try:
        return [Ledger(Trace(kernel, tracked, block, names), threads) for names in given for block in blocks]
    except NotShown:
        raise first from None


def _decide(kernel: Kernel, ledgers: Sequence[Ledger], state: Sequence[str], number: int) -> tuple[Needed, str]:
    """Whether warps conflict without this block barrier; then whether threads do without a barrier of any scope."""
    if state[number] == "block":
        reason = _conflict(kernel, ledgers, number, lambda wait: state[wait.number] == "block", WARP)
        if reason is not None:
            return reason
    reason = _conflict(kernel, ledgers, number, lambda wait: state[wait.number] != "none", 1)
    if reason is None:
        return "none", "no thread touches what another writes"
    if state[number] == "block":
        return "warp", f"only threads of one warp conflict: {reason[1]}"
    return reason


def _conflict(
    kernel: Kernel, ledgers: Sequence[Ledger], number: int, separates: Callable[[BarrierReached], bool], per: int
) -> tuple[Needed, str] | None:
    """Why a barrier must stay among those for which `separates` holds; None if no groups of `per` threads conflict without it."""
    for ledger in ledgers:
        for group in ledger.groups(lambda wait: wait.number != number and separates(wait)):
            if not any(epoch.ended and epoch.ended.number == number for epoch in group[:-1]):
                continue
            fence = next((epoch.fence for epoch in group if epoch.fence), None)
            if fence:
                return "needed", f"it orders {fence.text} in line {kernel.line(fence.span[0])}, which other blocks take part in"
            conflict = next(ledger.conflicts(group, per), None)
            if conflict is not None:
                sure = conflict.certain and conflict.separated
                return ("needed" if sure else "not shown"), _described(kernel, conflict)
    return None


def _described(kernel: Kernel, conflict: Conflict) -> str:
    """Description of a conflict."""
    one, other = conflict.one, conflict.other
    write, read = ("writes", "reads") if conflict.certain else ("may write", "may read")
    place = f"byte {conflict.byte} of {conflict.buffer}"
    first, second = (_thread(kernel, thread) for thread in (conflict.thread, conflict.another))
    lines = [kernel.line(access.span[0]) for access in (one, other)]
    text = f"{first} {write} {place} in line {lines[0]}, {second} {write if other.write else read} it in line {lines[1]}"
    return text + ("" if conflict.separated else ", and no barrier is between them even now")


def _thread(kernel: Kernel, thread: int) -> str:
    x, y, z = kernel.launch.block
    index = (thread % x, thread // x % y, thread // (x * y)) if y * z > 1 else thread
    return f"thread {index} of warp {thread // WARP}"


def _edits(kernel: Kernel, verdicts: Sequence[Verdict]) -> list[Edit]:
    """The edits that verdicts allow."""
    return [
        Edit(_line_of(kernel, verdict) if not verdict.replacement else verdict.span, verdict.replacement, RULE, verdict.why)
        for verdict in verdicts
        if verdict.replacement is not None
    ]


def _line_of(kernel: Kernel, verdict: Verdict) -> tuple[int, int]:
    """Span of the whole line if the barrier stands alone in it, otherwise of the barrier."""
    start = kernel.source.rfind("\n", 0, verdict.span[0]) + 1
    end = kernel.source.find("\n", verdict.span[1]) + 1
    alone = kernel.source[start:end].strip() == kernel.source[slice(*verdict.span)]
    return (start, end) if alone else verdict.span


def changed(unit: Unit, verdicts: Sequence[Verdict]) -> tuple[Unit, list[Match]]:
    """Makes the changes that verdicts allow; returns the new unit and the changes."""
    kernels = unit.kernels.items()
    return unit.edited(edit for name, kernel in kernels for edit in _edits(kernel, [one for one in verdicts if one.kernel == name]))


def weakened(unit: Unit) -> tuple[Unit, list[Match], list[Verdict]]:
    """Deletes or weakens all barriers that the analysis shows to be needless.

    Returns:
        The new unit, its changes, and the verdicts on all barriers.

    Raises:
        ReconstructError: the launch of a kernel with barriers is not known.
    """
    verdicts = [verdict for kernel in unit.kernels.values() for verdict in barrier_verdicts(kernel)]
    return *changed(unit, verdicts), verdicts
