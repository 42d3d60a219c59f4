"""Rules apply exactly as often as they say, or not at all."""

from __future__ import annotations

import pytest

from im2win.reconstruct import ReconstructError, Rule, reconstruct

SOURCE = "load(a);\n__syncthreads();\nuse(a);\n__syncthreads();\n"
WEAKEN = Rule("weaken", r"__syncthreads\(\)", "__syncwarp()", "warp-private data", (2, 2))


def test_without_rules_the_source_passes_through() -> None:
    assert reconstruct(SOURCE).source == SOURCE


def test_a_rule_rewrites_and_says_where() -> None:
    result = reconstruct(SOURCE, [WEAKEN])
    assert result.source == SOURCE.replace("__syncthreads", "__syncwarp")
    assert [(match.line, match.before, match.after) for match in result.matches] == [
        (2, "__syncthreads()", "__syncwarp()"),
        (4, "__syncthreads()", "__syncwarp()"),
    ]


def test_rules_see_the_result_of_those_before() -> None:
    drop = Rule("drop", r"^__syncwarp\(\);\n", "", "nothing to wait for", (1, 9))
    assert reconstruct(SOURCE, [WEAKEN, drop]).source == "load(a);\nuse(a);\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [("", r"matched 0 times \(nowhere\); it must match 2 times"), ("\n__syncthreads()", r"matched 1 times \(line 2\)")],
)
def test_a_wrong_number_of_matches_is_an_error(source: str, message: str) -> None:
    with pytest.raises(ReconstructError, match=message):
        reconstruct(source, [WEAKEN])


def test_a_rule_that_matches_its_own_result_is_refused() -> None:
    with pytest.raises(ReconstructError, match="'again' matches its own result"):
        reconstruct("x", [Rule("again", "x", "xx", "never ends")])
