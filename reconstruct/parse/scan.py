"""Static facts about a kernel: parameters it may write, functions it calls, statements whose order matters."""

from __future__ import annotations

import functools
import re

from im2win.reconstruct.parse.expressions import Binary, Call, Cast, Expr, Index, Member, Name, Unary, walk
from im2win.reconstruct.parse.statements import (
    Assignment,
    Barrier,
    Declaration,
    Effect,
    If,
    Loop,
    Opaque,
    Statement,
    blanked,
    closing,
    every,
)
from im2win.reconstruct.parse.unit import Kernel

_WRITE_FIRST = ("im2win::copy_async", "nvcuda::wmma::load_matrix_sync")  # functions that write only through their first argument
POINTER_CASTS = ("static_cast", "reinterpret_cast")
_SYNCHRONIZING = re.compile(r"im2win::(?:commit_copies|wait_copies)$")


def written(kernel: Kernel) -> set[str]:
    """Names of parameters that a kernel may write.

    A parameter counts if it is assigned to, aliased by another pointer, passed to a function, or named in opaque text.
    """
    found = set[str]()
    for part in every(kernel.statements):
        if isinstance(part, Assignment):
            found |= base(part.target)
        if isinstance(part, Opaque):
            found |= set(re.findall(r"\w+", part.text))
        if isinstance(part, Declaration) and part.type.endswith("*") and part.value is not None:
            found |= base(part.value)
        for expr in expressions(part):
            for call in (inner for inner in walk(expr) if isinstance(inner, Call)):
                for argument in call.arguments[:1] if call.function in _WRITE_FIRST else call.arguments:
                    found |= _passed(argument)
    return found & {parameter.name for parameter in kernel.parameters}


def _passed(expr: Expr) -> set[str]:
    """Names of the variables that an argument may point to; an element that is loaded points nowhere."""
    match expr:
        case Name(name):
            return {name}
        case Unary("&", place):
            return base(place)
        case Cast(_, operand):
            return _passed(operand)
        case Binary(_, left, right):
            return _passed(left) | _passed(right)
    return set()


def builtins_used(kernel: Kernel) -> set[str]:
    """Built-ins that fusion cannot rename: `blockDim` and `gridDim`, and any thread or block index in a function that the kernel calls."""
    text = blanked(kernel.source)
    found = set(re.findall(r"\b(?:blockDim|gridDim)\b", text[slice(*kernel.inner)]))
    bodies = functions(kernel.source[: kernel.source.find('extern "C"')])
    for name in set(re.findall(r"(\w+)\s*(?:<[^<>;]*>)?\(", text[slice(*kernel.inner)])) & bodies.keys():
        found |= {f"{place} in {name}" for place in re.findall(r"\b(?:threadIdx|blockIdx|blockDim|gridDim)\b", bodies[name])}
    return found


def base(expr: Expr) -> set[str]:
    """Names of the variables that a memory operand is based on."""
    match expr:
        case Name(name):
            return {name}
        case Index(inner, _) | Member(inner, _) | Cast(_, inner) | Unary("*" | "&", inner):
            return base(inner)
        case Binary("+" | "-", left, right):
            return base(left) | base(right)
        case Call(function, _, arguments) if function in POINTER_CASTS:
            return base(arguments[0])
    return set()


def constant_arrays(kernel: Kernel) -> set[str]:
    """Local integer arrays whose elements can be enumerated.

    One statement writes the array, or several statements outside of loops do. No pointer to the array exists.
    """
    counts, other, looped = dict[str, int](), set[str](), set[str]()
    in_loops = {id(part) for loop in kernel.loops for part in every(loop.body)}
    for part in every(kernel.statements):
        if isinstance(part, Assignment) and isinstance(part.target, Index) and isinstance(part.target.base, Name):
            name = part.target.base.name
            counts[name] = counts.get(name, 0) + 1
            if part.operator:
                other.add(name)
            if id(part) in in_loops:
                looped.add(name)
        for expr in expressions(part):
            other |= {name for inner in walk(expr) if isinstance(inner, Unary) and inner.operator == "&" for name in base(inner)}
    integers = {part.name for part in every(kernel.statements) if isinstance(part, Declaration) and part.type == "int" and part.count}
    return {name for name, count in counts.items() if (count == 1 or name not in looped) and name in integers} - other


def lanes(part: Declaration) -> tuple[Expr, ...]:
    """The components of an integer vector that is declared with `make_int2`, `make_int3` or `make_int4`."""
    if isinstance(part.value, Call) and re.fullmatch(r"make_int[234]", part.value.function):
        return part.value.arguments
    return ()


def expressions(part: Statement) -> list[Expr]:
    """The expressions of one statement, without those of nested statements."""
    match part:
        case Declaration(value=value):
            return [value] if value is not None else []
        case Assignment(target=target, value=value):
            return [target, value]
        case Effect(value=value):
            return [value]
        case Loop(start=start, stop=stop):
            return [start, stop]
        case If(condition=condition):
            return [condition]
    return []


@functools.lru_cache(maxsize=64)
def functions(head: str) -> dict[str, str]:
    """Bodies of the functions that a source defines before its kernels, by name; overloads are concatenated."""
    text, found = blanked(head), dict[str, str]()
    for match in re.finditer(r"\b(\w+)\s*\([^()]*\)\s*(?:const\s*)?\{", text):
        if match[1] not in ("if", "for", "while", "switch"):
            found[match[1]] = found.get(match[1], "") + head[match.end() : closing(text, match.end() - 1)]
    return found


def synchronizes(part: Statement) -> bool:
    """Whether a statement contains a barrier or commits or awaits asynchronous copies."""
    for inner in every([part]):
        if isinstance(inner, Barrier):
            return True
        for expr in expressions(inner):
            if any(isinstance(call, Call) and _SYNCHRONIZING.match(call.function) for call in walk(expr)):
                return True
    return False
