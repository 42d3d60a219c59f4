"""The body of a kernel as a tree of statements, parsed with regular expressions and matching brackets.

Generated code is regular: one statement a line, loops that count up to a bound, scalars that are initialised where they are declared. Any
other text becomes `Opaque`. An analysis must not conclude anything about an `Opaque` statement.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from im2win.reconstruct.parse.expressions import DEEPEST, Expr, ExpressionError, Unary, parse, plain_type

Span = tuple[int, int]
"""Half-open range of character offsets in the source."""


@dataclass(frozen=True)
class Declaration:
    """`type name = value;`, or an array of `count` elements.

    space: "shared" for static shared memory, "dynamic" for dynamic shared memory, "" for local memory.
    """

    span: Span
    type: str
    name: str
    value: Expr | None = None
    count: int | None = None
    space: str = ""


@dataclass(frozen=True)
class Assignment:
    """`target = value;`, or a compound assignment such as `target += value;`, whose `operator` is "+"."""

    span: Span
    target: Expr
    operator: str
    value: Expr


@dataclass(frozen=True)
class Effect:
    """An expression statement, in most cases a call."""

    span: Span
    value: Expr


@dataclass(frozen=True)
class Barrier:
    """`__syncthreads();` (scope "block") or `__syncwarp();` (scope "warp")."""

    span: Span
    scope: str


@dataclass(frozen=True)
class Loop:
    """`for (int name = start; name < stop; name += step)`; `inner` is the span between its braces."""

    span: Span
    name: str
    start: Expr
    stop: Expr
    step: int
    body: tuple[Statement, ...]
    inner: Span


@dataclass(frozen=True)
class If:
    """`if (condition) {} else {}`"""

    span: Span
    condition: Expr
    then: tuple[Statement, ...]
    other: tuple[Statement, ...] = ()


@dataclass(frozen=True)
class Scope:
    """`{ ... }`"""

    span: Span
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Opaque:
    """Text that is not parsed, and the reason."""

    span: Span
    text: str
    why: str


Statement = Declaration | Assignment | Effect | Barrier | Loop | If | Scope | Opaque

_TYPE = r"(?P<type>(?:const\s+)?(?:(?:unsigned|signed|long)\s+)*[A-Za-z_][\w:]*(?:<[\w:,\s]*>)?\s*\**)"
_ALIGN = r"(?:(?:alignas|__align__)\(\d+\)\s+)?"
_SKIP = re.compile(r"(?:\s+|#[^\n]*\n|;)+")
_BARRIER = re.compile(r"(__syncthreads|__syncwarp)\(\);")
_FOR = re.compile(r"for\s*\(int (\w+) = ([^;]+);\s*\1 < ([^;]+);\s*(?:\+\+\1|\1\+\+|\1 \+= (\d+))\)\s*\{")
_IF, _ELSE = re.compile(r"if\s*\("), re.compile(r"\s*else\s*(?:(\{)|(?=if\b))")
_EXTERN = re.compile(rf"extern\s+__shared__\s+{_ALIGN}{_TYPE}\s*(?P<name>\w+)\[\];")
_ARRAY = re.compile(rf"(?P<shared>__shared__\s+)?{_ALIGN}(?P<again>__shared__\s+)?{_TYPE}\s*\b(?P<name>\w+)\[(?P<count>\d+)\];")
_SCALAR = re.compile(rf"(?P<shared>__shared__\s+)?{_ALIGN}{_TYPE}\s*(?<=[\s*])(?P<name>\w+)(?:\s*=\s*(?P<value>[^;]*))?;")
_ASSIGN = re.compile(r"(?P<target>[^;={}]+?)\s*(?P<operator>[-+*/|&^]?)(?<![<>=!])=(?!=)\s*(?P<value>[^;{}]*);")
_STATEMENT = re.compile(r"[^;{}]*;")
_KEYWORDS = re.compile(r"(?:return|break|continue|goto|while|do|switch|asm|__asm__|case|delete|new)\b")


def closing(text: str, start: int) -> int:
    """Offset of the bracket that closes the one at `start`.

    Raises:
        ExpressionError: no bracket closes it.
    """
    pairs = {"(": ")", "{": "}", "[": "]"}
    opens, closes, depth = text[start], pairs[text[start]], 0
    for match in re.finditer(re.escape(opens) + "|" + re.escape(closes), text[start:]):
        depth += 1 if match.group() == opens else -1
        if depth == 0:
            return start + match.start()
    raise ExpressionError(f"a bracket that nothing closes: {text[start : start + 80]!r}")


@functools.lru_cache(maxsize=64)
def blanked(source: str) -> str:
    """The source with comments and string literals replaced by blanks; all offsets stay the same. `extern "C"` keeps its literal."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return pattern.sub(lambda match: match.group() if match.group().startswith('"C"') else re.sub(r"[^\n]", " ", match.group()), source)


def statements(text: str, start: int, end: int, depth: int = 0) -> tuple[Statement, ...]:
    """The statements between two offsets of a source from `blanked`, in `depth` others.

    Raises:
        ExpressionError: brackets do not match, or statements are nested too deeply.
    """
    found: list[Statement] = []
    at = start
    while True:
        skipped = _SKIP.match(text, at, end)
        at = skipped.end() if skipped else at
        if at >= end:
            return tuple(found)
        found.append(_statement(text, at, end, depth))
        at = found[-1].span[1]


def _statement(text: str, at: int, end: int, depth: int) -> Statement:
    if depth > DEEPEST:
        raise ExpressionError(f"statements nested more than {DEEPEST} deep")
    try:
        if match := _BARRIER.match(text, at, end):
            return Barrier(match.span(), "block" if match[1] == "__syncthreads" else "warp")
        if match := _FOR.match(text, at, end):
            last = closing(text, match.end() - 1)
            inner = match.end(), last
            body = statements(text, *inner, depth + 1)
            return Loop((at, last + 1), match[1], parse(match[2]), parse(match[3]), int(match[4] or 1), body, inner)
        if match := _IF.match(text, at, end):
            return _branch(text, at, match.end() - 1, end, depth)
        if text[at] == "{":
            last = closing(text, at)
            return Scope((at, last + 1), statements(text, at + 1, last, depth + 1))
        if _KEYWORDS.match(text, at, end):
            return _opaque(text, at, end, "a statement that is not followed")
        return _simple(text, at, end)
    except ExpressionError as error:
        return _opaque(text, at, end, str(error))


def _branch(text: str, at: int, bracket: int, end: int, depth: int) -> Statement:
    last = closing(text, bracket)
    condition = parse(text[bracket + 1 : last])
    brace = re.compile(r"\s*\{").match(text, last + 1, end)
    if brace is None:
        return _opaque(text, at, end, "a condition without braces")
    stop = closing(text, brace.end() - 1)
    then, other = statements(text, brace.end(), stop, depth + 1), tuple[Statement, ...]()
    if match := _ELSE.match(text, stop + 1, end):
        if match[1]:
            begin, stop = match.end(), closing(text, match.end() - 1)
            other = statements(text, begin, stop, depth + 1)
        else:
            other = (_statement(text, match.end(), end, depth + 1),)
            stop = other[0].span[1] - 1
    return If((at, stop + 1), condition, then, other)


def _simple(text: str, at: int, end: int) -> Statement:
    if match := _EXTERN.match(text, at, end):
        return Declaration(match.span(), plain_type(match["type"]), match["name"], count=0, space="dynamic")
    if match := _ARRAY.match(text, at, end):
        shared = match["shared"] or match["again"]
        return Declaration(match.span(), plain_type(match["type"]), match["name"], None, int(match["count"]), "shared" if shared else "")
    if match := _SCALAR.match(text, at, end):
        shared = match["shared"]
        value = parse(match["value"]) if match["value"] else None
        return Declaration(match.span(), plain_type(match["type"]), match["name"], value, 1 if shared else None, "shared" if shared else "")
    if match := _ASSIGN.match(text, at, end):
        return Assignment(match.span(), parse(match["target"]), match["operator"], parse(match["value"]))
    if match := _STATEMENT.match(text, at, end):
        value = parse(match.group().rstrip("; \n"))
        if isinstance(value, Unary) and value.operator == "*":
            return _opaque(text, at, end, "an expression without effect")
        return Effect(match.span(), value)
    return _opaque(text, at, end, "not a statement that is understood")


def _opaque(text: str, at: int, end: int, why: str) -> Opaque:
    """Text up to the end of the statement, with all bracket pairs that open in it."""
    stop = at
    while stop < end and text[stop] not in ";}":
        stop = closing(text, stop) if text[stop] in "({[" else stop
        if text[stop] == "}":
            break
        stop += 1
    return Opaque((at, min(stop + 1, end)), text[at : stop + 1], why)


def every(body: Sequence[Statement]) -> Iterator[Statement]:
    """All statements of a tree, nested ones included, in source order."""
    for statement in body:
        yield statement
        match statement:
            case Loop() | Scope():
                yield from every(statement.body)
            case If():
                yield from every(statement.then)
                yield from every(statement.other)


def has_barrier(statement: Statement) -> bool:
    """Whether a statement is a barrier or contains one."""
    return any(isinstance(part, Barrier) for part in every([statement]))
