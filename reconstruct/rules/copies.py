"""Asynchronous copies in place of a load and a store: data goes from global to shared memory without passing through registers.

    float v; if (inside) { v = data[i]; } else { v = 0; } ring[j] = v;      becomes      copy_async<4>(ring + j, data + i, inside);
    *(float4*)(ring + j) = *(float4*)(data + i);                            becomes      copy_async<16>(ring + j, data + i);

Copies are committed step by step, and the barrier that made the stores visible waits for them first. In a pipeline over a ring of n + 1
buffers, a step waits for the oldest of n groups only, so that copies have n steps to arrive. The wait is shown to be long enough (`races`),
or all groups are awaited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from im2win.reconstruct.parse.expressions import Name, plain_type, size_of
from im2win.reconstruct.parse.scan import written
from im2win.reconstruct.parse.statements import Assignment, Declaration, If, Loop, Scope, Span, Statement, every, has_barrier
from im2win.reconstruct.parse.unit import Edit, Kernel, Unit
from im2win.reconstruct.rules.pipelines import pipeline_of
from im2win.reconstruct.rules.races import period, race
from im2win.reconstruct.text_rules import Match, ReconstructError
from im2win.reconstruct.trace.events import NotShown

RULE = "copies"
WIDTHS = (4, 8, 16)  # bytes of an asynchronous copy
MOST_AHEAD = 3  # steps that copies run ahead at most
WHY = "the data needs no register on its way, and the thread does not wait for it"

_ARRAY = r"(?P<array>\w+|\(\((?P<element>\w[\w ]*)\*\)(?P<bytes>\w+)\))"  # by its name, or in dynamic shared memory
_VECTOR = re.compile(rf"\*\((?P<type>\w+)\*\)\({_ARRAY} \+ (?P<index>.*)\)$", re.DOTALL)
_ZERO = r"(?:0x0p\+0|0(?:\.0*)?(?:e\+00)?)[fh]?"
_NARROW = rf"(?:\(signed char\)0|__float2(?:half|bfloat16)_rn\({_ZERO}\)|{_ZERO})"  # in any type
_PAIR = rf"(?:__pack_\w+\({_NARROW}, {_NARROW}\)|{_NARROW})"
_ZEROS, _COMMENT = re.compile(rf"{_NARROW}|make_\w+\({_PAIR}(?:, {_PAIR})*\)"), re.compile(r"/\*.*?\*/", re.DOTALL)
_ELEMENT = re.compile(rf"{_ARRAY}\[(?P<index>.*)\]$", re.DOTALL)


@dataclass(frozen=True)
class _Copy:
    """A copy: the statements that it replaces, from first to last, and the call that stands for them."""

    span: Span
    call: str


def rewrite(unit: Unit) -> tuple[Unit, list[Match], list[str]]:
    """Makes every copy from global to shared memory asynchronous.

    Returns:
        The new unit, its changes, and a note for every kernel.
    """
    notes, matches = list[str](), list[Match]()
    for name in unit.kernels:
        kernel = unit.kernel(name)
        copies = list(_copies(kernel, kernel.statements))
        if not copies:
            notes.append(f"{RULE}: kernel {name} copies nothing to shared memory by loads and stores alone")
            continue
        reason = ""
        for left in _left(kernel):
            changed, made = unit.edited(_edits(kernel, copies, left))
            try:
                reason = race(changed, name) or ""
            except NotShown as error:
                reason = str(error)
            if not reason:
                unit, matches = changed, matches + made
                notes.append(f"{RULE}: kernel {name} copies asynchronously, {left + 1} steps ahead")
                break
        else:
            raise ReconstructError(f"{RULE}: kernel {name} cannot copy asynchronously: {reason}")
    return unit, matches, notes


def _left(kernel: Kernel) -> list[int]:
    """Numbers of groups that a step may leave in flight, the likeliest first: all steps ahead but one, or none."""
    loop = pipeline_of(kernel)
    try:
        most = period(kernel, loop) - 2 if loop else 0
    except NotShown:
        return list(range(MOST_AHEAD - 1, -1, -1))
    return [most, 0] if most > 0 else [0]


def _copies(kernel: Kernel, body: Sequence[Statement]) -> Iterator[_Copy]:
    """The copies among statements, nested ones included."""
    for place, part in enumerate(body):
        match part:
            case Loop() | Scope():
                yield from _copies(kernel, part.body)
            case If():
                yield from (*_copies(kernel, part.then), *_copies(kernel, part.other))
            case Assignment(operator=""):
                if (found := _plain(kernel, part) or _guarded(kernel, body[max(place - 2, 0) : place], part)) is not None:
                    yield found


def _text(kernel: Kernel, span: Span) -> str:
    return kernel.source[slice(*span)]


def _sides(kernel: Kernel, part: Assignment) -> tuple[str, str]:
    """The texts of both sides of an assignment."""
    target, _, value = _text(kernel, part.span).rstrip(";").partition(" = ")
    return target.strip(), value.strip()


def _place(kernel: Kernel, text: str) -> tuple[str, str, int] | None:
    """(array, pointer expression, bytes) of an element or a vector of an array; None for other texts."""
    if (found := _VECTOR.match(text)) is not None:
        size = size_of(found["type"])
    elif (found := _ELEMENT.match(text)) is not None:
        kinds = {array.name: array.type for array in kernel.shared} | {one.name: one.element for one in kernel.parameters}
        size = size_of(plain_type(found["element"] or kinds.get(found["array"], "")))
    else:
        return None
    return None if size is None else (found["bytes"] or found["array"], f"{found['array']} + {found['index']}", size)


def _to_shared(kernel: Kernel, target: str, source: str) -> tuple[str, str, int] | None:
    """(pointer to, pointer from, bytes) of a copy from a tensor that is only read to shared memory; None for other assignments."""
    to, given = _place(kernel, target), _place(kernel, source)
    if to is None or given is None or to[2] != given[2] or to[2] not in WIDTHS:
        return None
    inputs = {one.name for one in kernel.parameters if one.element and one.restrict} - written(kernel)
    shared = {array.name for array in kernel.shared}
    return (to[1], given[1], to[2]) if to[0] in shared and given[0] in inputs else None


def _plain(kernel: Kernel, part: Assignment) -> _Copy | None:
    found = _to_shared(kernel, *_sides(kernel, part))
    return None if found is None else _Copy(part.span, f"im2win::copy_async<{found[2]}>({found[0]}, {found[1]});")


def _guarded(kernel: Kernel, before: Sequence[Statement], part: Assignment) -> _Copy | None:
    """A copy of an element, or of zero: `T v; if (c) { v = data[i]; } else { v = 0; } ring[j] = v;`"""
    match before:
        case (
            Declaration(name=name, value=None, count=None),
            If(
                then=(Assignment(target=Name(one), operator="") as load,),
                other=(Assignment(target=Name(two), operator="") as zero,),
            ) as test,
        ) if one == two == name and part.value == Name(name):
            found = _to_shared(kernel, _sides(kernel, part)[0], _sides(kernel, load)[1])
            if found is None or not _is_zero(_sides(kernel, zero)[1]):
                return None
            text = _text(kernel, test.span)
            condition = text[text.index("(") + 1 : text.index("{")].rstrip()[:-1]
            call = f"im2win::copy_async<{found[2]}>({found[0]}, {found[1]}, {condition});"
            return _Copy((before[0].span[0], part.span[1]), call)
    return None


def _is_zero(text: str) -> bool:
    """Whether a value is zero, or a vector of zeros."""
    return _ZEROS.fullmatch(_COMMENT.sub("", text)) is not None


def _edits(kernel: Kernel, copies: Sequence[_Copy], left: int) -> list[Edit]:
    """The changes that make copies asynchronous; a step of the pipeline leaves `left` groups in flight."""
    edits = [Edit(copy.span, copy.call, RULE, WHY) for copy in copies]
    loop = pipeline_of(kernel)
    for at in _ends(kernel, kernel.statements, [copy.span for copy in copies]):
        edits.append(Edit((at, at), "\nim2win::commit_copies();", RULE, "the copies of a step are one group"))
    for barrier in kernel.barriers:
        inside = loop is not None and loop.span[0] <= barrier.span[0] < loop.span[1]
        wait = f"im2win::wait_copies<{left if inside else 0}>();\n"
        edits.append(Edit((barrier.span[0], barrier.span[0]), wait, RULE, "copies are complete before the barrier that makes them visible"))
    return edits


def _ends(kernel: Kernel, body: Sequence[Statement], spans: Sequence[Span]) -> Iterator[int]:
    """Where groups of copies end: behind each run of statements that copy, in a step of the prologue or of the loop."""
    copying = [any(part.span[0] <= at < part.span[1] or (at <= part.span[0] < end) for at, end in spans) for part in body]
    for place, (part, here) in enumerate(zip(body, copying, strict=True)):
        if not here:
            continue
        if isinstance(part, Loop) and (has_barrier(part) or _is_step(part, spans)):
            yield from _ends(kernel, part.body, spans)
        elif not any(copying[place + 1 : _run_end(body, place)]):
            yield part.span[1]


def _run_end(body: Sequence[Statement], place: int) -> int:
    """Index of the first statement behind `place` that ends a run: a barrier or products; declarations do not."""
    end = place + 1
    while end < len(body) and not has_barrier(body[end]):
        end += 1
    return end


def _is_step(loop: Loop, spans: Sequence[Span]) -> bool:
    """Whether an iteration of a loop is a step of its own: whether it holds loops that copy."""
    return any(isinstance(part, Loop) and any(part.span[0] <= at < part.span[1] for at, _ in spans) for part in every(loop.body))
