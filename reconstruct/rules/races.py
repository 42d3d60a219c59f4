"""Whether threads of a block race in shared memory, shown for kernels whose main loop is a pipeline over a ring of buffers.

The barriers' own analysis (`barriers`) enumerates every iteration of every block. That takes minutes for a convolution with thousands of
blocks. Here the argument is shorter:

- Places in shared memory must not depend on the block. Outputs must be written behind the last barrier, so that no barrier orders them.
- In a loop with barriers, places in shared memory may depend on the loop variable only modulo the number of buffers of the ring. Iterations
  that far apart then access the same places, and barriers and pending copies relate neighbouring iterations only. So a shorter loop, with
  the same remainder and twice as many iterations as the ring has buffers, shows every conflict that the whole loop has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from im2win.reconstruct.parse.expressions import Binary, Call, Cast, Choice, Expr, Index, Member, Name, Number, Unary, names
from im2win.reconstruct.parse.scan import written
from im2win.reconstruct.parse.statements import Assignment, Barrier, Declaration, Effect, If, Loop, Statement, every
from im2win.reconstruct.parse.unit import WARP, Edit, Kernel, Unit
from im2win.reconstruct.trace.events import NotShown
from im2win.reconstruct.trace.footprints import Ledger
from im2win.reconstruct.trace.trace import Trace

FEW = 8  # iterations that are all enumerated
PERIODS = 2  # iterations of a loop that are enumerated, in rings of buffers


def race(unit: Unit, name: str) -> str | None:
    """A description of two accesses of a kernel's shared memory that nothing orders; None if there are none.

    Raises:
        NotShown: the argument above does not cover the kernel.
    """
    kernel = unit.kernel(name)
    _check_outputs(kernel)
    short = _shortened(unit, kernel).kernel(name)
    ledger = Ledger(Trace(short, {array.name for array in short.shared}), short.threads)
    for epoch in ledger.epochs:
        if (buffer := ledger.early(epoch)) is not None:
            return f"{buffer} is accessed where an asynchronous copy may still be writing"
    for scopes, per in ((("block",), WARP), (("block", "warp"), 1)):
        if (reason := _unordered(ledger, scopes, per)) is not None:
            return reason
    return None


def _unordered(ledger: Ledger, scopes: Sequence[str], per: int) -> str | None:
    """Two accesses by different groups of `per` threads that no barrier of these scopes separates."""
    for group in ledger.groups(lambda wait: wait.scope in scopes):
        buffers = {name: touched for epoch in group for name, touched in epoch.touched.items() if touched.conflicts(per).any()}
        if buffers:
            return f"threads write and read the same bytes of {min(buffers)}, and no barrier is between them"
        conflict = next(ledger.conflicts(group, per), None)
        if conflict is not None:
            return f"byte {conflict.byte} of {conflict.buffer} is written while another thread uses it"
    return None


def period(kernel: Kernel, loop: Loop) -> int:
    """Iterations of a loop after which it accesses the same places in shared memory again.

    Raises:
        NotShown: a place depends on the loop variable in another way.
    """
    shared, found = {array.name for array in kernel.shared}, 1
    derived = {loop.name}
    for part in every(loop.body):
        if isinstance(part, Declaration) and part.value is not None and names(part.value) & derived:
            derived.add(part.name)
    for expr in _expressions(loop.body):
        for place in _places(expr, shared):
            found = math.lcm(found, _modulus(kernel, loop, place, derived))
    return found


def _check_outputs(kernel: Kernel) -> None:
    outputs = written(kernel)
    if loose := [one.name for one in kernel.parameters if one.element and not one.restrict]:
        raise NotShown(f"parameter {loose[0]} is not __restrict__: what it points to may be what the kernel writes")
    last = max((barrier.span[1] for barrier in kernel.barriers), default=0)
    for part in every(kernel.statements):
        if isinstance(part, Assignment) and part.span[0] < last and _of(part.target, outputs):
            raise NotShown(f"line {kernel.line(part.span[0])}: a barrier stands behind a write to global memory")
    for part in every(kernel.statements):
        reads = part.value if isinstance(part, Assignment | Declaration | Effect) else part.condition if isinstance(part, If) else None
        if reads is not None and names(reads) & outputs:
            raise NotShown(f"line {kernel.line(part.span[0])}: it reads what it writes to global memory")


def _of(expr: Expr, found: set[str]) -> bool:
    """Whether an expression is a place in one of these arrays."""
    match expr:
        case Index(base, _) | Member(base, _) | Cast(_, base) | Unary("*" | "&", base):
            return _of(base, found)
        case Binary("+" | "-", left, right):
            return _of(left, found) or _of(right, found)
    return isinstance(expr, Name) and expr.name in found


def _shortened(unit: Unit, kernel: Kernel) -> Unit:
    """The unit with loops that hold barriers or copies made as short as the argument allows."""
    edits = list[Edit]()
    for loop in kernel.loops:
        if not any(isinstance(part, Barrier) for part in every(loop.body)):
            continue
        if loop.step != 1 or not isinstance(loop.start, Number) or not isinstance(loop.stop, Number):
            raise NotShown(f"line {kernel.line(loop.span[0])}: how often the loop over {loop.name} runs is not known")
        first, last = loop.start.value or 0, loop.stop.value or 0
        if last - first <= FEW:
            continue
        ring = period(kernel, loop)
        count = (last - first) % ring + PERIODS * ring
        if count >= last - first:
            continue
        head = unit.source[loop.span[0] : loop.inner[0]]
        bound = f"{loop.name} < "
        at = loop.span[0] + head.index(bound) + len(bound)
        end = unit.source.index(";", at)
        edits.append(Edit((at, end), str(first + count), "shorter", ""))
    return unit.edited(edits)[0]


def _expressions(body: Sequence[Statement]) -> Iterator[Expr]:
    for part in every(body):
        match part:
            case Assignment():
                yield part.target
                yield part.value
            case Declaration() if part.value is not None:
                yield part.value
            case Effect():
                yield part.value
            case If():
                yield part.condition


def _places(expr: Expr, shared: set[str]) -> Iterator[Expr]:
    """Expressions that say where in a shared array an expression reads or writes."""
    match expr:
        case Index(base, index):
            if _of(base, shared):
                yield index
            yield from (*_places(base, shared), *_places(index, shared))
        case Binary("+" | "-", left, right):
            if _of(left, shared):
                yield right
            elif _of(right, shared):
                yield left
            yield from (*_places(left, shared), *_places(right, shared))
        case Binary(_, left, right):
            yield from (*_places(left, shared), *_places(right, shared))
        case Unary(_, operand) | Cast(_, operand) | Member(operand, _):
            yield from _places(operand, shared)
        case Choice(condition, then, other):
            for part in (condition, then, other):
                yield from _places(part, shared)
        case Call(_, _, arguments):
            for part in arguments:
                yield from _places(part, shared)


def _modulus(kernel: Kernel, loop: Loop, expr: Expr, derived: set[str]) -> int:
    """The number that a place takes the loop variable modulo; 1 if it does not depend on it."""
    match expr:
        case Binary("%", left, Number(value)) if value and _plain(left, loop.name, derived):
            return value if loop.name in names(left) else 1
        case Binary("&", left, Number(value)) if value and value & (value + 1) == 0 and _plain(left, loop.name, derived):
            return value + 1 if loop.name in names(left) else 1
        case Binary(_, left, right):
            return math.lcm(_modulus(kernel, loop, left, derived), _modulus(kernel, loop, right, derived))
        case Cast(_, operand) | Unary("-" | "+", operand):
            return _modulus(kernel, loop, operand, derived)
    if names(expr) & derived:
        raise NotShown(f"line {kernel.line(loop.span[0])}: places in shared memory depend on {loop.name} beyond a ring of buffers")
    return 1


def _plain(expr: Expr, name: str, derived: set[str]) -> bool:
    """Whether an expression is the loop variable plus what does not change in the loop, or does not depend on it."""
    match expr:
        case Name():
            return expr.name == name or expr.name not in derived
        case Binary("+", left, right):
            return _plain(left, name, derived) and _plain(right, name, derived)
        case Cast(_, operand):
            return _plain(operand, name, derived)
    return not names(expr) & derived
