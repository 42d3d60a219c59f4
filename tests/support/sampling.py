"""Which cases of an exhaustive test belong to the fast part, and which to no ordinary run.

`@pytest.mark.sampled` on a parametrised test: its fast cases are few, and take each value of each parameter at least once.
`@pytest.mark.sampled(5)`: five cases, whose names have as many different words ("s", "NHWC", "bias") as five can have.
The other cases are marked `slow`.

`@pytest.mark.pairwise` on a test of three parameters and more: each value of a parameter occurs with each value of each other parameter,
but not in all combinations of three. The other cases are marked `exhaustive`, and `slow`.
`@pytest.mark.valuewise` on a test of two parameters whose cases take seconds each: each value of either parameter occurs, likewise.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence, Set

import pytest


def sample(cases: Sequence[Set[Hashable]], keep: int | None = None) -> set[int]:
    """Indices of cases, rarest features first: `keep` of them, or as many as cover all features."""
    chosen: set[int] = set()
    missing, used = set[Hashable]().union(*cases), Counter[Hashable]()
    while missing if keep is None else len(chosen) < min(keep, len(cases)):
        gains = {index: len(case & missing) for index, case in enumerate(cases) if index not in chosen}
        most = max(gains.values())
        rest = (index for index, gain in gains.items() if gain == most)
        best = max(rest, key=lambda index: (-sum(used[feature] for feature in cases[index]), -index))
        chosen.add(best)
        missing -= cases[best]
        used.update(cases[best])
    return chosen


def pairs(case: set[Hashable]) -> set[Hashable]:
    """The pairs of a case's features."""
    return {frozenset(pair) for pair in itertools.combinations(case, 2)}


def values(item: pytest.Function) -> set[Hashable]:
    """The parameters of a case with their values."""
    return {(name, str(value)) for name, value in item.callspec.params.items()}


def words(item: pytest.Function) -> set[Hashable]:
    """The words in a case's name, without their numbers."""
    return {re.sub(r"[\d.x]+", "#", word) for word in re.split(r"[-, ]", item.callspec.id)}


def _marked(items: Sequence[pytest.Item], marker: str) -> list[list[pytest.Function]]:
    """The cases of each test with this marker."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(marker):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(tests.values())


def mark_exhaustive(items: Sequence[pytest.Item]) -> None:
    """Marks what brings no pair of values that others lack, of tests that are marked `pairwise`; no value, of those marked `valuewise`."""
    for marker, features in (("pairwise", lambda case: pairs(values(case))), ("valuewise", values)):
        for cases in _marked(items, marker):
            ordinary = sample([features(case) for case in cases])
            for index, case in enumerate(cases):
                if index not in ordinary:
                    case.add_marker(pytest.mark.exhaustive)
                    case.add_marker(pytest.mark.slow)


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Marks what is not sampled of tests that are marked `sampled`; what is exhaustive is not drawn."""
    for marked in _marked(items, "sampled"):
        cases = [case for case in marked if not case.get_closest_marker("exhaustive")]
        keep = next(iter(cases[0].iter_markers("sampled"))).args
        fast = sample([words(case) if keep else values(case) for case in cases], *keep)
        for index, case in enumerate(cases):
            if index not in fast:
                case.add_marker(pytest.mark.slow)


def every_second_ordinary(cases: Iterable[object]) -> list[object]:
    """Values of one parameter, of which every second one is exhaustive."""
    return [pytest.param(case, marks=pytest.mark.exhaustive) if index % 2 else case for index, case in enumerate(cases)]
