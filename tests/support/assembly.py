"""Reads the assembly of AArch64 kernels."""

from __future__ import annotations

import re

_BRANCH = re.compile(r"(?:b(?:\.\w+)?|cbn?z|tbn?z)\s+(?:.*,\s*)?(\.\w+)$")
_STACK = re.compile(r"(?:ldr|str|ldp|stp|ldur|stur)\s+[qdz]\d.*\[(?:sp|x29)\b")


def loops(code: str) -> list[list[str]]:
    """The instructions of every innermost loop, from the label that it jumps back to."""
    stripped = (line.strip() for line in code.splitlines())
    lines = [line for line in stripped if line and not line.startswith((".p2align", ".cfi", "//"))]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    jumps = [(labels[found[1]], i) for i, line in enumerate(lines) if (found := _BRANCH.match(line)) and labels.get(found[1], i) < i]
    inner = [one for one in jumps if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in jumps)]
    return [lines[first : last + 1] for first, last in inner]


def stack_vectors(loop: list[str]) -> list[str]:
    """The instructions of a loop that load vectors from the stack, or store them there."""
    return [line for line in loop if _STACK.match(line)]
