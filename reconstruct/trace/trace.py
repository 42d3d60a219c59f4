"""Enumeration of the memory accesses of a kernel: every address of every thread, block and iteration, in program order.

Indices of generated code are integer expressions of threadIdx, blockIdx, loop variables and constants, so all addresses can be computed. A
branch on data counts as one that may be taken. Code that cannot be enumerated raises `NotShown`.

Arrays of values have the axes (loops..., blocks, threads), the innermost loop first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from im2win.reconstruct.parse.expressions import Binary, Call, Cast, Choice, Expr, Index, Member, Name, Unary, names, size_of
from im2win.reconstruct.parse.scan import POINTER_CASTS, base, constant_arrays, functions, lanes, synchronizes
from im2win.reconstruct.parse.statements import Assignment, Barrier, Declaration, Effect, If, Loop, Opaque, Scope, Span, Statement, every
from im2win.reconstruct.parse.unit import Kernel
from im2win.reconstruct.trace.events import Access, BarrierReached, CommitGroup, Event, Fence, NotShown, WaitGroup
from im2win.reconstruct.trace.pointers import Memory, Pointer, moved
from im2win.reconstruct.trace.values import Table, Values, evaluate

CAP = 1 << 24  # values in one array; a larger loop is evaluated iteration by iteration
CHUNK = 64  # blocks in one array

_FENCE = re.compile(r"(?:__threadfence\w*|atomic\w+|im2win::(?:signal|await|ticket)\w*|__nanosleep)$")
_REFUSED = re.compile(r"__sync(?!warp\b)\w*|\bbar\b|barrier|cooperative|pipeline|\basm\b|__asm__|__threadfence|atomic|__shared__|volatile")
_FRAGMENT = re.compile(
    r"nvcuda::wmma::fragment<nvcuda::wmma::(?P<use>matrix_a|matrix_b|accumulator), (?P<m>\d+), (?P<n>\d+), (?P<k>\d+), "
    r"[\w ]+(?:, nvcuda::wmma::(?P<layout>row|col)_major)?> (?P<name>\w+)\["
)


class Trace:
    """The events of one kernel, for some of its blocks.

    Args:
        kernel: with a launch.
        tracked: names of the parameters and shared arrays whose accesses are reported.
        blocks: the blockIdx of the traced blocks, one array each for x, y and z; None for a single block with unknown blockIdx.
        names: values of further variables, one for each block or one for all.
    """

    def __init__(
        self,
        kernel: Kernel,
        tracked: set[str],
        blocks: tuple[Values, Values, Values] | None = None,
        names: Mapping[str, Values] | None = None,
    ) -> None:
        self.kernel, self.tracked = kernel, tracked
        self._functions = functions(kernel.source[: kernel.source.find('extern "C"')])
        self.memory = Memory(blocks is not None)
        for parameter in kernel.parameters:
            if parameter.element:
                self.memory.sizes[parameter.name] = size_of(parameter.element) or 0
        targets = [part.target for part in every(kernel.statements) if isinstance(part, Assignment)]
        targets = [target.base if isinstance(target, Member) else target for target in targets]
        self._mutated = {target.name for target in targets if isinstance(target, Name)}
        self._tables = constant_arrays(kernel)
        self._dynamic = next((array.name for array in kernel.shared if array.space == "dynamic"), "")
        self._barriers = {barrier.span: number for number, barrier in enumerate(kernel.barriers)}
        self._fragments = {match["name"]: match for match in _FRAGMENT.finditer(kernel.body)}
        self._blocks, self._names = blocks, names or {}
        self.block_terms: dict[str, str] = {}  # by buffer, see `Pointer`

    def __iter__(self) -> Iterator[Event]:
        """The events in program order.

        Raises:
            NotShown: some code cannot be enumerated.
        """
        self.block_terms = {}
        yield from self._run(self.kernel.statements, self._start(), None, True)

    def _start(self) -> dict[str, Any]:
        launch = self.kernel.launch
        x, y, z = launch.block
        lane = np.arange(x * y * z)
        scope: dict[str, Any] = {"threadIdx.x": lane % x, "threadIdx.y": lane // x % y, "threadIdx.z": lane // (x * y)}
        for axis, extent, count in zip("xyz", launch.block, launch.grid, strict=True):
            scope[f"blockDim.{axis}"], scope[f"gridDim.{axis}"] = np.int64(extent), np.int64(count)
        for axis, count, index in zip("xyz", launch.grid, self._blocks or (None,) * 3, strict=True):
            one = np.int64(0) if count == 1 else None
            scope[f"blockIdx.{axis}"] = one if index is None else np.asarray(index).reshape(-1, 1)
        return scope | {name: np.asarray(value).reshape(-1, 1) for name, value in self._names.items()}

    # --- statements

    def _run(self, body: Sequence[Statement], scope: dict[str, Any], mask: Values | None, certain: bool) -> Iterator[Event]:
        for part in body:
            match part:
                case Declaration():
                    yield from self._declare(part, scope, mask, certain)
                case Assignment():
                    yield from self._reads(part.value, scope, mask, certain, part.span)
                    yield from self._store(part, scope, mask, certain)
                case Effect():
                    yield from self._reads(part.value, scope, mask, certain, part.span)
                case Barrier():
                    yield BarrierReached(self._barriers[part.span], part.scope)
                case Loop():
                    yield from self._loop(part, scope, mask, certain)
                case If():
                    yield from self._if(part, scope, mask, certain)
                case Scope():
                    yield from self._run(part.body, dict(scope), mask, certain)
                case Opaque():
                    if part.text.startswith("nvcuda::wmma::fragment<"):
                        continue
                    raise self._not_shown(part.span, f"`{' '.join(part.text.split())[:80]}` is {part.why}")

    def _not_shown(self, span: Span, why: str) -> NotShown:
        return NotShown(f"line {self.kernel.line(span[0])}: {why}")

    def _declare(self, part: Declaration, scope: dict[str, Any], mask: Values | None, certain: bool) -> Iterator[Event]:
        if part.space or part.count is not None:
            size = size_of(part.type)
            if size is None and (part.space or part.name in self.tracked):
                raise self._not_shown(part.span, f"{part.name} is of {part.type}, whose size is not known")
            self.memory.sizes[part.name] = size or 0
            if part.space == "dynamic":  # all dynamic arrays alias
                scope[part.name] = Pointer(self._dynamic, np.asarray(0), size or 0)
            scope[f"{part.name}[]"] = Table(part.count) if part.count and not part.space and part.name in self._tables else None
            return
        for name in (part.name, *(f"{part.name}.{field}" for field in "xyzw")):
            scope.pop(name, None)
        if part.value is None:
            return
        if part.type.endswith("*"):
            pointer = self.memory.pointer(part.value, scope)
            if pointer is None and self._mentions(part.value):
                raise self._not_shown(part.span, f"where {part.name} points is not known")
            scope[part.name] = pointer
            return
        yield from self._reads(part.value, scope, mask, certain, part.span)
        for field, lane in zip("xyzw", lanes(part), strict=False):
            scope[f"{part.name}.{field}"] = evaluate(lane, scope) if part.name not in self._mutated else None
        integer = part.name not in self._mutated and (part.type in ("int", "uint", "bool", "int64_t", "size_t"))
        scope[part.name] = evaluate(Cast(part.type, part.value), scope) if integer else None

    def _store(self, part: Assignment, scope: dict[str, Any], mask: Values | None, certain: bool) -> Iterator[Event]:
        if isinstance(part.target, Name):
            return
        if part.operator:
            yield from self._reads(part.target, scope, mask, certain, part.span)
        else:
            yield from self._inside(part.target, scope, mask, certain, part.span)
        self._settle(part.target, part.value, scope, mask, certain)
        place = self.memory.place(part.target, scope)
        if place is not None and place.buffer in self.tracked:
            yield self._access(place, True, mask, certain, part.span)
        elif place is None and self._mentions(part.target):
            raise self._not_shown(part.span, "where it writes is not known")

    def _settle(self, target: Expr, value: Expr, scope: dict[str, Any], mask: Values | None, certain: bool) -> None:
        """Records a store to a local integer array."""
        match target:
            case Index(Name(array), index) if isinstance(scope.get(f"{array}[]"), Table):
                place, found = evaluate(index, scope), evaluate(value, scope)
                if place is None or found is None or mask is not None or not certain:
                    scope[f"{array}[]"].known[:] = False
                else:
                    scope[f"{array}[]"].store(place, found)

    def _loop(self, part: Loop, scope: dict[str, Any], mask: Values | None, certain: bool) -> Iterator[Event]:
        start, stop = evaluate(part.start, scope), evaluate(part.stop, scope)
        if start is None or stop is None:
            raise self._not_shown(part.span, f"how often the loop over {part.name} runs depends on data")
        first, last = int(np.min(start)), int(np.max(stop))
        even = np.size(start) == 1 and np.size(stop) == 1
        if not even and (synchronizes(part) or part.step != 1):
            raise self._not_shown(part.span, f"how often the loop over {part.name} runs differs between threads or blocks")
        count = len(range(first, last, part.step))
        shape = np.broadcast_shapes(*(value.shape for value in scope.values() if isinstance(value, np.ndarray)))
        width = math.prod(shape)
        if synchronizes(part) or count * width > CAP:
            for value in range(first, last, part.step):
                inner = mask if even else _both(mask, (value >= np.asarray(start)) & (value < np.asarray(stop)))
                yield from self._run(part.body, {**scope, part.name: np.int64(value)}, inner, certain)
            return
        values = np.arange(first, last, part.step).reshape((-1,) + (1,) * max(2, len(shape)))
        inner = mask if even else _both(mask, (values >= start) & (values < stop))
        inside = {next(iter(base(one.target)), "") for one in every([part]) if isinstance(one, Assignment)}
        tables = [table for name in inside if isinstance(table := scope.get(f"{name}[]"), Table) and not table.pending]
        for table in tables:
            table.known[:], table.pending = False, True
        if count:
            yield from self._run(part.body, {**scope, part.name: values}, inner, certain)
        for table in tables:
            table.pending = False

    def _if(self, part: If, scope: dict[str, Any], mask: Values | None, certain: bool) -> Iterator[Event]:
        yield from self._reads(part.condition, scope, mask, certain, part.span)
        value, both = evaluate(part.condition, scope), _known(part.condition, scope)
        if synchronizes(part) and (value is None or np.any(value) != np.all(value)):
            raise self._not_shown(part.span, "a barrier or a wait behind a condition that not all threads and blocks share")
        if value is None:
            yield from self._run(part.then, dict(scope), mask if both is None else _both(mask, both), False)
            yield from self._run(part.other, dict(scope), mask, False)
            return
        for body, holds in ((part.then, np.asarray(value != 0)), (part.other, np.asarray(value == 0))):
            inner = _both(mask, holds)
            if body and (inner is None or inner.any()):
                yield from self._run(body, dict(scope), inner, certain)

    # --- expressions

    def _mentions(self, expr: Expr) -> bool:
        return bool(names(expr) & self.tracked)

    def _access(self, place: Pointer, write: bool, mask: Values | None, certain: bool, span: Span, **more: Any) -> Access:
        if place.offset is None:
            what = "writes" if write else "reads"
            raise self._not_shown(span, f"the place in {place.buffer} that it {what} depends on data, or on the block")
        if self.block_terms.setdefault(place.buffer, place.block_terms) != place.block_terms:
            raise self._not_shown(span, f"places in {place.buffer} depend on the block in several ways")
        return Access(place.buffer, write, place.size, np.asarray(place.offset), mask, certain, span, **more)

    def _reads(self, expr: Expr, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        """The accesses of evaluating an expression, including those of its calls."""
        match expr:
            case Index() | Unary("*", _) | Member(Index() | Unary("*", _) | Member(), _):
                yield from self._inside(expr, scope, mask, certain, span)
                place = self.memory.place(expr, scope)
                if place is None and self._mentions(expr):
                    raise self._not_shown(span, "what it reads is not known")
                if place is not None and place.buffer in self.tracked:
                    yield self._access(place, False, mask, certain, span)
            case Choice(condition, then, other):
                yield from self._reads(condition, scope, mask, certain, span)
                value = evaluate(condition, scope)
                for branch, chosen in ((then, True), (other, False)):
                    holds = np.asarray((value != 0) == chosen) if value is not None else _known(condition, scope) if chosen else None
                    inner = mask if holds is None else _both(mask, holds)
                    yield from self._reads(branch, scope, inner, certain and value is not None, span)
            case Binary(operator, left, right):
                yield from self._reads(left, scope, mask, certain, span)
                yield from self._reads(right, scope, mask, certain and operator not in ("&&", "||"), span)
            case Cast(_, operand) | Unary(_, operand) | Member(operand, _):
                if isinstance(expr, Unary) and expr.operator == "&" and self._mentions(expr):
                    raise self._not_shown(span, "an address goes where it is not followed")
                yield from self._reads(operand, scope, mask, certain, span)
            case Name(name) if name in self.tracked:
                raise self._not_shown(span, f"the address of {name} goes where it is not followed")
            case Call():
                yield from self._call(expr, scope, mask, certain, span)

    def _inside(self, expr: Expr, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        """The accesses of computing an address: those of its indices."""
        match expr:
            case Index(base, index):
                yield from self._inside(base, scope, mask, certain, span)
                yield from self._reads(index, scope, mask, certain, span)
            case Unary("*" | "&", base) | Cast(_, base) | Member(base, _):
                yield from self._inside(base, scope, mask, certain, span)
            case Binary("+" | "-", left, right):
                for side in (left, right):
                    yield from (
                        self._inside(side, scope, mask, certain, span)
                        if self._points(side, scope)
                        else self._reads(side, scope, mask, certain, span)
                    )
            case Name():
                return
            case Call(function, _, arguments) if function in POINTER_CASTS:
                yield from self._inside(arguments[0], scope, mask, certain, span)
            case _:
                yield from self._reads(expr, scope, mask, certain, span)

    def _points(self, expr: Expr, scope: dict[str, Any]) -> bool:
        return self.memory.pointer(expr, scope) is not None

    # --- calls

    def _call(self, call: Call, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        known: dict[str, Callable[..., Iterator[Event]]] = {
            "im2win::copy_async": self._copy_async, "im2win::commit_copies": self._commit, "im2win::wait_copies": self._wait,
            "im2win::load_words": self._load_words, "im2win::load_matrices": self._load_words,
            "nvcuda::wmma::load_matrix_sync": self._fragment, "nvcuda::wmma::store_matrix_sync": self._fragment,
            "im2win::after_predecessors": self._nothing,
        }  # fmt: skip
        if call.function in known:
            yield from known[call.function](call, scope, mask, certain, span)
            return
        body = self._functions.get(call.function.rpartition("::")[2])
        if _FENCE.match(call.function):
            yield Fence(span, call.function)
            for argument in call.arguments:
                place = self.memory.pointer(argument, scope) if self._mentions(argument) else None
                if place is not None and place.buffer in self.tracked:
                    yield self._access(place, True, mask, certain, span)
            return
        product = call.function.startswith("im2win::product_")  # inline assembly that uses registers only
        if _REFUSED.search(call.function) or (body is not None and _REFUSED.search(body) and not product):
            raise self._not_shown(span, f"what {call.function} waits for or does to memory is not known")
        for argument in call.arguments:
            pointer = self.memory.pointer(argument, scope)
            if pointer is not None and pointer.buffer in self.tracked:
                raise self._not_shown(span, f"what {call.function} does to {pointer.buffer} is not known")
            if pointer is not None:
                yield from self._inside(argument, scope, mask, certain, span)
            else:
                yield from self._reads(argument, scope, mask, certain, span)

    def _copy_async(self, call: Call, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        to, source, *condition = call.arguments
        for expr in condition:
            yield from self._reads(expr, scope, mask, certain, span)
        holds = [known for expr in condition if (known := _known(expr, scope)) is not None]
        inside = _both(mask, holds[0]) if holds else mask  # zeros are written without reading elsewhere
        for expr, write, where in ((source, False, inside), (to, True, mask)):
            yield from self._inside(expr, scope, mask, certain, span)
            pointer = self.memory.pointer(expr, scope)
            if pointer is None:
                raise self._not_shown(span, f"what {call.function} copies is not known")
            if pointer.buffer in self.tracked:
                place = replace(pointer, size=int(call.template))
                yield self._access(place, write, where, certain, span, pending=True)

    def _commit(self, call: Call, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        yield CommitGroup()

    def _wait(self, call: Call, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        yield WaitGroup(int(call.template))

    def _nothing(self, call: Call, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        """A wait for other kernels, see `schedules.cuda.launch_overlap`: it orders no threads of this one, and accesses nothing."""
        yield from ()

    def _load_words(self, call: Call, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        to, source = (self.memory.pointer(argument, scope) for argument in call.arguments)
        if to is None or source is None or to.buffer in self.tracked:
            raise self._not_shown(span, f"what {call.function} reads or writes is not known")
        for argument in call.arguments:
            yield from self._inside(argument, scope, mask, certain, span)
        if source.buffer in self.tracked:
            yield self._access(replace(source, size=16), False, mask, certain, span)

    def _fragment(self, call: Call, scope: dict[str, Any], mask: Values | None, certain: bool, span: Span) -> Iterator[Event]:
        """A WMMA load or store; every lane of the warp counts as accessing the whole matrix."""
        write = call.function.endswith("store_matrix_sync")
        fragment, pointed = (call.arguments[1], call.arguments[0]) if write else call.arguments[:2]
        pointer, leading = self.memory.pointer(pointed, scope), evaluate(call.arguments[2], scope)
        shape = self._fragments.get(next(iter(base(fragment)), ""))
        if pointer is None or leading is None or shape is None:
            raise self._not_shown(span, f"what {call.function} reads or writes is not known")
        yield from self._inside(pointed, scope, mask, certain, span)
        if pointer.buffer not in self.tracked:
            return
        rows, columns = {"matrix_a": ("m", "k"), "matrix_b": ("k", "n"), "accumulator": ("m", "n")}[shape["use"]]
        layout = shape["layout"] or str(getattr(call.arguments[-1], "name", "")).removesuffix("_major").rpartition("_")[2]
        outer, inner = (int(shape[part]) for part in ((rows, columns) if layout == "row" else (columns, rows)))
        for line in range(outer):
            place = moved(pointer, leading * line, 1)
            yield self._access(replace(place, size=pointer.size * inner), write, mask, certain, span)


def grid_blocks(kernel: Kernel) -> Iterator[tuple[Values, tuple[Values, Values, Values]]]:
    """The blocks of a kernel in chunks: linear indices (x fastest), and blockIdx as (x, y, z)."""
    x, y, _ = kernel.launch.grid
    count = math.prod(kernel.launch.grid)
    for first in range(0, count, CHUNK):
        number = np.arange(first, min(first + CHUNK, count))
        yield number, (number % x, number // x % y, number // (x * y))


def _known(condition: Expr, scope: dict[str, Any]) -> Values | None:
    """The conjunction of those operands of `&&` that are known; None if none is."""
    match condition:
        case Binary("&&", left, right):
            known = [part for part in (_known(left, scope), _known(right, scope)) if part is not None]
            return None if not known else known[0] if len(known) == 1 else known[0] & known[1]
    value = evaluate(condition, scope)
    return None if value is None else np.asarray(value != 0)


def _both(mask: Values | None, holds: Values) -> Values:
    return holds if mask is None else mask & holds
