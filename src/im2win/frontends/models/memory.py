"""Plans a model's memory: constants lie in the file, inputs and outputs with the caller, and all other values share one workspace.

Values that can be computed in place are not copied. A view shares memory with its source, and so does a slice
whose elements lie side by side. A concatenation along the first axis that has
more than one element (in NCHW at batch 1: channels) is computed directly by its sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from im2win.frontends.models.parts import Join
from im2win.frontends.models.program import Call, Copy, Program
from im2win.runtime.model import ALIGNMENT

WEIGHTS, WORKSPACE, FIRST = 0, 1, 2  # bases: the file, the workspace, then the inputs and outputs in their order


@dataclass(frozen=True)
class Place:
    """An address: `offset` bytes behind a base."""

    base: int
    offset: int


@dataclass(frozen=True)
class Plan:
    """The calls in the order in which they run, the places of all values, and the bytes of the workspace."""

    calls: tuple[Call | Copy, ...]
    places: dict[str, Place]
    workspace: int


class _Values:
    """Records which values are parts of other values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inside: dict[str, tuple[str, int]] = {**{output: (source, 0) for output, source in program.views.items()}, **program.cuts}
        self.sources: dict[str, list[str]] = {output: [source] for output, (source, _) in self.inside.items()}

    def root(self, name: str) -> tuple[str, int]:
        """The value that holds another one, and the offset in bytes inside it."""
        offset = 0
        while name in self.inside:
            name, further = self.inside[name]
            offset += further
        return name, offset

    def whole(self, name: str) -> str | None:
        """The value with exactly the memory of this one; None where it is a part of another value."""
        root, _ = self.root(name)
        return root if self.program.bytes(root) == self.program.bytes(name) else None


def plan(program: Program, joins: tuple[Join, ...], offsets: dict[str, int], alignment: int = 1) -> Plan:
    """Plans the memory of a program.

    Args:
        joins: concatenations.
        offsets: of the constants in the file, in bytes.
        alignment: bytes that a tensor's offset inside a concatenation must be a multiple of; other tensors are copied.
    """
    values = _Values(program)
    given = set(program.inputs) | set(program.constants)
    calls = list(program.calls)
    bound: dict[str, int] = {}  # roots in the caller's memory
    for number, name in enumerate(program.outputs):
        root = values.whole(name)
        if root is None or root in given or root in bound:
            root = f"output/{number}"
            program.declare(root, program.shapes[name], program.dtypes[name])
            calls.append(Copy(name, root, 0, 0))
        bound[root] = FIRST + len(program.inputs) + number
    made = {name for call in program.calls if isinstance(call, Call) for name in call.outputs} | {join.output for join in joins}
    for join in joins:
        calls += _joined(values, join, made - given - set(bound), alignment)
    ordered = _in_order(program, values, calls)
    places = {name: Place(FIRST + number, 0) for number, name in enumerate(program.inputs)}
    places |= {name: Place(WEIGHTS, offsets[name]) for name in program.constants}
    places |= {name: Place(base, 0) for name, base in bound.items()}
    workspace = _workspace(program, values, ordered, places)
    for name in program.shapes:
        root, offset = values.root(name)
        if root in places and name != root:
            places[name] = Place(places[root].base, places[root].offset + offset)
    return Plan(tuple(ordered), places, workspace)


def _joined(values: _Values, join: Join, movable: set[str], alignment: int) -> list[Copy]:
    """Places the sources of a concatenation inside it. Returns the copies that are needed where that is impossible."""
    program, begin = values.program, 0
    copies: list[Copy] = []
    shape = program.shapes[join.output]
    straight = math.prod(shape[: join.axis]) == 1
    step = program.bytes(join.output) // max(shape[join.axis], 1)
    values.sources[join.output] = list(join.sources)
    for source in join.sources:
        root = values.whole(source)
        target, behind = values.root(join.output)
        if straight and root in movable and root != target and (behind + begin * step) % alignment == 0:
            values.inside[str(root)] = (join.output, begin * step)
        else:
            copies.append(Copy(source, join.output, join.axis, begin))
        begin += program.shapes[source][join.axis]
    return copies


def _in_order(program: Program, values: _Values, calls: list[Call | Copy]) -> list[Call | Copy]:
    """The calls that the outputs depend on, each after those that compute its inputs, and as late as possible."""
    makers: dict[str, list[int]] = {}
    for number, call in enumerate(calls):
        for name in call.outputs if isinstance(call, Call) else (call.output,):
            makers.setdefault(name, []).append(number)

    def needed(name: str) -> list[int]:
        found: list[int] = []
        left, seen = [name], set[str]()
        while left:
            value = left.pop()
            if value not in seen:
                seen.add(value)
                found += makers.get(value, [])
                left += values.sources.get(value, [])
        return sorted(found)

    ordered: list[Call | Copy] = []
    done: set[int] = set()
    wanted = [number for name in _results(program) for number in needed(name)]
    stack = [(number, False) for number in reversed(wanted)]
    while stack:
        number, ready = stack.pop()
        if number in done:
            continue
        call = calls[number]
        if ready:
            done.add(number)
            ordered.append(call)
            continue
        stack.append((number, True))
        inputs = call.inputs if isinstance(call, Call) else (call.source,)
        stack += [(maker, False) for name in reversed(inputs) for maker in reversed(needed(name)) if maker not in done]
    return ordered


def _results(program: Program) -> list[str]:
    copied = (f"output/{number}" for number in range(len(program.outputs)))
    return [copy if copy in program.shapes else name for copy, name in zip(copied, program.outputs, strict=True)]


def _workspace(program: Program, values: _Values, calls: list[Call | Copy], places: dict[str, Place]) -> int:
    """Places the remaining values. Values with disjoint lifetimes share memory; the largest are placed first."""
    alive: dict[str, list[int]] = {}
    for time, call in enumerate(calls):
        names: tuple[Any, ...] = (*call.inputs, *call.outputs) if isinstance(call, Call) else (call.source, call.output)
        for name in names:
            root, _ = values.root(name)
            if root not in places:
                span = alive.setdefault(root, [time, time])
                span[1] = time
    placed: list[tuple[int, int, list[int]]] = []
    for name in sorted(alive, key=program.bytes, reverse=True):
        size, offset = -(-max(program.bytes(name), 1) // ALIGNMENT) * ALIGNMENT, 0
        for begin, end, span in sorted(placed):
            if span[0] <= alive[name][1] and alive[name][0] <= span[1]:
                if begin >= offset + size:
                    break
                offset = max(offset, end)
        placed.append((offset, offset + size, alive[name]))
        places[name] = Place(WORKSPACE, offset)
    return max((end for _, end, _ in placed), default=0)
