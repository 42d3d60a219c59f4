"""Rules for the values of manifests, and the error that names value and rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Rule = tuple[Callable[[Any], bool], str]

MOST = 1 << 48  # bytes, or elements, that no tensor has


def count(least: int = 0) -> Rule:
    """An integer from `least` on."""
    return lambda value: type(value) is int and least <= value < MOST, f"an integer from {least} to {MOST - 1}"


def one_of(*words: str) -> Rule:
    """One of these words."""
    return lambda value: value in words if isinstance(value, str) else False, f"one of {', '.join(words)}"


TEXT: Rule = (lambda value: isinstance(value, str), "a text")
FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
DIGEST: Rule = (lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None, "a SHA-256 digest")
DTYPE: Rule = one_of(*(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)), "bfloat16", "bool")
TILE: Rule = (
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) and isinstance(one, int | str) for name, one in value.items()),
    "numbers and words by name",
)
SHAPE: Rule = (
    lambda value: isinstance(value, list | tuple) and len(value) <= 32 and all(type(size) is int and 0 <= size < MOST for size in value),
    "a list of at most 32 sizes",
)


def check(values: Mapping[str, Any], rules: Mapping[str, Rule], where: str = "") -> None:
    """Checks the values that have rules.

    Args:
        where: names the part of the manifest, for the message.

    Raises:
        ValueError: a value is missing or breaks its rule.
    """
    for name, (holds, rule) in rules.items():
        if name not in values:
            raise ValueError(f"`{where}{name}` is missing.")
        if not holds(values[name]):
            shown = repr(values[name])
            raise ValueError(f"`{where}{name}` (={shown if len(shown) <= 60 else shown[:57] + '...'}) must be {rule}.")
