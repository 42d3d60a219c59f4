"""Which cases of an exhaustive test belong to the fast part.

`@pytest.mark.sampled` on a parametrised test: its fast cases are few, and take each value of each parameter at least once.
`@pytest.mark.sampled(5)`: five cases, whose names have as many different words ("s", "NHWC", "bias") as five can have.
The other cases are marked `slow`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest


def sample(cases: Sequence[set[Hashable]], keep: int | None = None) -> set[int]:
    """Indices of cases, rarest features first: `keep` of them, or as many as cover all features."""
    chosen: set[int] = set()
    missing, used = set[Hashable]().union(*cases), Counter[Hashable]()
    while missing if keep is None else len(chosen) < min(keep, len(cases)):
        rest = (index for index in range(len(cases)) if index not in chosen)
        best = max(rest, key=lambda index: (len(cases[index] & missing), -sum(used[feature] for feature in cases[index]), -index))
        chosen.add(best)
        missing -= cases[best]
        used.update(cases[best])
    return chosen


def values(item: pytest.Function) -> set[Hashable]:
    """The parameters of a case with their values."""
    return {(name, str(value)) for name, value in item.callspec.params.items()}


def words(item: pytest.Function) -> set[Hashable]:
    """The words in a case's name, without their numbers."""
    return {re.sub(r"[\d.x]+", "#", word) for word in re.split(r"[-, ]", item.callspec.id)}


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Marks what is not sampled of tests that are marked `sampled`."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        keep = next(iter(cases[0].iter_markers("sampled"))).args
        fast = sample([words(case) if keep else values(case) for case in cases], *keep)
        for index, case in enumerate(cases):
            if index not in fast:
                case.add_marker(pytest.mark.slow)
