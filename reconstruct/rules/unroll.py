"""The steps of a pipeline unrolled by the length of its ring of buffers, so that the buffer of each step is a constant.

    for step < 143                                    #pragma unroll 3
        ring[(step + 2) % 3] = ...      becomes       for step < 143
        sums += ring[step % 3]                            ring[(step + 2) % 3] = ...
                                                          sums += ring[step % 3]

The statements stay the same. Unrolled three times, the compiler knows how far every copy's buffer is from that of the first one, and places
in shared memory are constant offsets. A loop that is unrolled already, or whose ring is not shown to have a fixed length, stays.
"""

from __future__ import annotations

from im2win.reconstruct.parse.expressions import Number
from im2win.reconstruct.parse.unit import Edit, Unit
from im2win.reconstruct.rules.pipelines import pipeline_of
from im2win.reconstruct.rules.races import period
from im2win.reconstruct.text_rules import Match
from im2win.reconstruct.trace.events import NotShown

RULE = "unroll"
WHY = "the buffer of a step is then a constant"
MOST = 4  # steps that are unrolled


def rewrite(unit: Unit) -> tuple[Unit, list[Match], list[str]]:
    """Unrolls every pipeline by the length of its ring.

    Returns:
        The new unit, its changes, and a note for every kernel.
    """
    notes, edits = list[str](), list[Edit]()
    for name in unit.kernels:
        kernel = unit.kernel(name)
        loop = pipeline_of(kernel)
        try:
            ring = period(kernel, loop) if loop else 1
        except NotShown as error:
            notes.append(f"{RULE}: kernel {name} stays as it is: {error}")
            continue
        begin = unit.source.rfind("\n", 0, loop.span[0]) + 1 if loop else 0
        unrolled = unit.source[:begin].rstrip().rpartition("\n")[2].lstrip().startswith("#pragma unroll")
        counts = loop is not None and isinstance(loop.start, Number) and isinstance(loop.stop, Number)
        if loop is None or not counts or unrolled or not 1 < ring <= MOST:
            notes.append(f"{RULE}: kernel {name} has no pipeline over a ring of 2 to {MOST} buffers that is not unrolled")
            continue
        indent = " " * (loop.span[0] - begin)
        edits.append(Edit((begin, begin), f"{indent}#pragma unroll {ring}\n", RULE, WHY))
        notes.append(f"{RULE}: kernel {name} unrolls {ring} steps")
    changed, matches = unit.edited(edits)
    return changed, matches, notes
