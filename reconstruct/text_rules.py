"""Rules as data, and the one function that applies them.

A rule that matches less often or more often than it says is an error with its context, never a guess: generated code has changed under it.
Without rules the source passes through unchanged, which is what CPU targets and untouched kernels get.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


class ReconstructError(ValueError):
    """A rule that cannot be applied; the message names the rule, what it expected and what it found."""


@dataclass(frozen=True)
class Rule:
    """One rewrite of source text.

    name, why: for people; both appear in errors and explanations.
    pattern: a regular expression (multi-line), `replacement` in `re.sub` syntax.
    matches: (least, most) matches it expects in a translation unit.
    """

    name: str
    pattern: str
    replacement: str
    why: str
    matches: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Match:
    """One place that a rule changed: its line (from 1, in the text the rule saw), the text before and after, and why."""

    rule: str
    line: int
    before: str
    after: str
    why: str = ""


@dataclass(frozen=True)
class Reconstruction:
    """Rewritten source with every change made to get there, in order."""

    source: str
    matches: list[Match] = field(default_factory=list)


def reconstruct(source: str, rules: Sequence[Rule] = ()) -> Reconstruction:
    """Applies rules in order, each to the result of those before it; a rule whose result it would match again is refused.

    Raises:
        ReconstructError: a rule's number of matches is not what it says, or it is not idempotent.
    """
    done: list[Match] = []
    for rule in rules:
        pattern = re.compile(rule.pattern, re.MULTILINE)
        found = list(pattern.finditer(source))
        least, most = rule.matches
        if not least <= len(found) <= most:
            expected = str(least) if least == most else f"{least} to {most}"
            places = ", ".join(f"line {source.count(chr(10), 0, m.start()) + 1}" for m in found) or "nowhere"
            what = f"rule {rule.name!r} ({rule.why}) matched {len(found)} times ({places})"
            raise ReconstructError(f"{what}; it must match {expected} times.")
        done += [Match(rule.name, source.count("\n", 0, m.start()) + 1, m.group(), m.expand(rule.replacement), rule.why) for m in found]
        source = pattern.sub(rule.replacement, source)
        if found and pattern.search(source):
            raise ReconstructError(f"rule {rule.name!r} matches its own result; it must be idempotent.")
    return Reconstruction(source, done)
