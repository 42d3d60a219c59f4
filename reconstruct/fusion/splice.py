"""Splicing of a kernel's body into another kernel: thread and block indices become variables computed there."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from im2win.reconstruct.parse.expressions import Index, Unary, walk
from im2win.reconstruct.parse.scan import expressions
from im2win.reconstruct.parse.statements import Barrier, Declaration, If, Loop, Opaque, Scope, Statement, blanked, has_barrier, statements
from im2win.reconstruct.parse.unit import AXES, WARP, Kernel
from im2win.reconstruct.text_rules import ReconstructError

_WARP_WIDE = re.compile(r"_sync\(|__syncwarp|wmma|product_|__activemask")


def indented(text: str, by: int = 2) -> str:
    """Indents all lines that are not empty by `by` columns."""
    return re.sub(r"^(?=[^\n])", " " * by, text, flags=re.MULTILINE)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Replaces whole identifiers, all at once."""
    if not names:
        return text
    pattern = re.compile(r"(?<![\w.])(?:" + "|".join(sorted(map(re.escape, names), key=len, reverse=True)) + r")(?!\w)")
    return pattern.sub(lambda match: names[match.group()], text)


def linear_thread(block: tuple[int, int, int]) -> str:
    """Linear index of a thread in a block of this shape, as C source."""
    x, y, z = block
    text = "((int)threadIdx.x)"
    if y > 1:
        text = f"((((int)threadIdx.y) * {x}) + {text})"
    return text if z == 1 else f"((((int)threadIdx.z) * {x * y}) + {text})"


Shape = tuple[int, int, int]


def as_part(kernel: Kernel, body: str, prefix: str, block: Shape, names: Mapping[str, str], blocks: Mapping[str, str] | None) -> str:
    """A kernel's body for execution by the threads of another kernel.

    Args:
        kernel: with its launch.
        body: of the kernel, possibly edited.
        prefix: of the variables that hold its thread and block indices.
        block: block shape of the other kernel, whose linear thread index is the variable `thread`.
        names: new names of parameters and arrays.
        blocks: its block index along x, y and z, as C source; None if it equals the other kernel's.

    Raises:
        ReconstructError: the kernel has block barriers and more threads than the other, or warp-wide operations in partial warps.
    """
    own, text, threads = kernel.threads, renamed(body, names), math.prod(block)
    if own != threads and (own % WARP or threads % WARP) and _WARP_WIDE.search(body):
        raise ReconstructError(f"kernel {kernel.name}: warps of {own} threads cannot be warps of a block of {threads}")
    meets = any(barrier.scope == "block" for barrier in kernel.barriers)
    number, before, after = "thread", "", ""
    if own != threads and meets:
        if own > threads:
            raise ReconstructError(f"kernel {kernel.name} has barriers and {own} threads, more than {threads}")
        text = guarded(text, f"thread < {own}")
    elif own != threads:
        before, number, after = _rounds(own, threads, prefix)
    moved = ("thread",) * (kernel.launch.block != block) + ("block",) * (blocks is not None)
    head = _indices(kernel, text, prefix, number, blocks, moved)
    for what in moved:
        text = re.sub(rf"\b{what}Idx\.([xyz])\b", rf"{prefix}_{what}_\1", text)
    inner = head + textwrap.dedent(text.strip("\n").rstrip(" ")) + "\n"
    inner = re.sub(r"\n+", "\n", inner)
    depth = before.count("{")
    return before + indented(inner, 2 * depth) + after


def _indices(kernel: Kernel, text: str, prefix: str, number: str, blocks: Mapping[str, str] | None, moved: Sequence[str]) -> str:
    """Declarations of the thread and block indices that a body uses, for the kinds in `moved`."""
    x, y, z = kernel.launch.block
    numbers = {"x": f"({number} % {x})" if y * z > 1 else number, "y": f"(({number} / {x}) % {y})" if z > 1 else f"({number} / {x})",
               "z": f"({number} / {x * y})"}  # fmt: skip
    extents = dict(zip(AXES, (x, y, z), strict=True))
    lines = []
    for what in moved:
        for axis in (axis for axis in AXES if re.search(rf"\b{what}Idx\.{axis}\b", text)):
            value = (blocks or {}).get(axis, "0") if what == "block" else numbers[axis] if extents[axis] > 1 else "0"
            lines.append(f"int {prefix}_{what}_{axis} = {value};\n")
    return "".join(lines)


def _rounds(own: int, threads: int, prefix: str) -> tuple[str, str, str]:
    """Loop head, name of the linear thread index, and loop tail for a body whose threads run in several rounds."""
    count, number = -(-own // threads), f"{prefix}_thread"
    before, after, depth = "", "", 0
    if count > 1:
        before = f"for (int {prefix}_round = 0; {prefix}_round < {count}; ++{prefix}_round) {{\n"
        depth = 1
        before += indented(f"int {number} = (({prefix}_round * {threads}) + thread);\n")
    else:
        number = "thread"
    if own % threads:
        before += indented(f"if ({number} < {own}) {{\n", 2 * depth)
        depth += 1
    for level in reversed(range(depth)):
        after += "  " * level + "}\n"
    return before, number, after


def guarded(body: str, condition: str) -> str:
    """A body whose statements run under a condition, while all threads execute its barriers.

    Raises:
        ReconstructError: a declaration reads memory, which threads outside the condition must not do.
    """
    text = blanked(body)
    inserts = sorted(_guards(statements(text, 0, len(text)), condition), reverse=True)
    for at, words in inserts:
        body = body[:at] + words + body[at:]
    return body


def _guards(parts: Sequence[Statement], condition: str) -> Iterator[tuple[int, str]]:
    for part in parts:
        if isinstance(part, Barrier):
            continue
        if isinstance(part, Declaration):
            if any(isinstance(inner, Index) or (isinstance(inner, Unary) and inner.operator == "*") for inner in _inside(part)):
                raise ReconstructError(f"the declaration of {part.name} reads memory, which threads without work must not")
        elif isinstance(part, Loop | Scope) and has_barrier(part):
            yield from _guards(part.body, condition)
        elif isinstance(part, If) and has_barrier(part):
            yield from _guards([*part.then, *part.other], condition)
        elif isinstance(part, Opaque) and part.text.startswith("nvcuda::wmma::fragment<"):
            continue
        else:
            yield part.span[0], f"if ({condition}) {{ "
            yield part.span[1], " }"


def _inside(part: Statement) -> list[object]:
    return [inner for expr in expressions(part) for inner in walk(expr)]
