"""The fast part of exhaustive tests: which cases a sample takes."""

from __future__ import annotations

import itertools

from sampling import sample


def test_each_value_of_each_parameter_occurs_and_few_cases_do() -> None:
    cases = [{("problem", problem), ("algorithm", algorithm)} for problem, algorithm in itertools.product(range(12), "abc")]
    chosen = [cases[index] for index in sorted(sample(cases))]
    assert set().union(*chosen) == set().union(*cases) and len(chosen) == 12
    assert all(sum(("algorithm", name) in case for case in chosen) == 4 for name in "abc"), "in turn"


def test_so_many_cases_with_as_many_words_as_they_can_have() -> None:
    cases = [{"n#", "p#"}, {"n#", "p#"}, {"n#", "p#", "NHWC"}, {"n#", "g#"}, {"n#", "p#", "bias", "relu"}]
    assert sample(cases, 3) == {2, 3, 4}
    assert sample(cases, 9) == set(range(5))
