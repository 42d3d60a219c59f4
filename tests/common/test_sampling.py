"""The fast part of exhaustive tests: which cases a sample takes."""

from __future__ import annotations

import itertools

from sampling import pairs, sample


def test_each_value_of_each_parameter_occurs_and_few_cases_do() -> None:
    cases = [{("problem", problem), ("algorithm", algorithm)} for problem, algorithm in itertools.product(range(12), "abc")]
    chosen = [cases[index] for index in sorted(sample(cases))]
    assert set().union(*chosen) == set().union(*cases) and len(chosen) == 12
    assert all(sum(("algorithm", name) in case for case in chosen) == 4 for name in "abc"), "in turn"


def test_so_many_cases_with_as_many_words_as_they_can_have() -> None:
    cases = [{"n#", "p#"}, {"n#", "p#"}, {"n#", "p#", "NHWC"}, {"n#", "g#"}, {"n#", "p#", "bias", "relu"}]
    assert sample(cases, 3) == {2, 3, 4}
    assert sample(cases, 9) == set(range(5))


def test_each_pair_of_values_occurs_in_few_cases_and_others_are_exhaustive() -> None:
    values = {"problem": range(5), "algorithm": "abcd", "turn": range(3)}
    cases = [set(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    chosen = sample([pairs(case) for case in cases])
    met = {frozenset(pair) for index in chosen for pair in itertools.combinations(cases[index], 2)}
    assert met == {frozenset(pair) for case in cases for pair in itertools.combinations(case, 2)}
    assert 5 * 4 <= len(chosen) <= 5 * 4 + 4 < len(cases)
