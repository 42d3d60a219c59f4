"""Rewrite rules as regular expressions, and the function that applies them.

A rule states how often it matches. Another number of matches is an error: it means that the generated code has changed. Without rules
the source passes through unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


class ReconstructError(ValueError):
    """A rewrite that cannot be applied; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Rule:
    """One rewrite of source text.

    name, why: shown in errors and explanations.
    pattern: a regular expression, compiled with `re.MULTILINE`.
    replacement: in the syntax of `re.sub`.
    matches: the least and the largest number of matches in a translation unit.
    """

    name: str
    pattern: str
    replacement: str
    why: str
    matches: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Match:
    """One change: its line (from 1, in the text before the change), the text before and after, and the reason."""

    rule: str
    line: int
    before: str
    after: str
    why: str = ""


@dataclass(frozen=True)
class Reconstruction:
    """Rewritten source and its changes, in order."""

    source: str
    matches: list[Match] = field(default_factory=list)


def reconstruct(source: str, rules: Sequence[Rule] = ()) -> Reconstruction:
    """Applies rules in order, each to the result of the previous ones.

    Raises:
        ReconstructError: a rule matches too often or too rarely, or matches its own result.
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
