"""The mutation run itself: on a package of a few lines, and what its tables and reasons name. `make mutation` runs it on the source."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from mutants import Mutant, MutantError, difference, drawn, meaning
from mutation_areas import AREAS, TESTS, TIMED, catching
from mutation_campaign import CampaignError, State, run
from paths import ROOT, SUPPORT
from scripts import script

from im2win.reports import mutation as report

SIZES = '''"""Sizes."""

from __future__ import annotations


def outputs(size: int, taps: int | None = None) -> int:
    """Windows in a line."""
    if taps is None:
        taps = 1
    found = size - taps + 1
    return found if found >= 0 else 0


def padded(size: int) -> int:
    while size % 8:
        size += 1
    return size
'''
TEST = """from im2win.sizes import outputs, padded


def test_outputs():
    assert outputs(5, 3) == 3 and outputs(2) == 2


def test_padded():
    assert padded(9) == 16


def test_that_fails_here():
    raise OSError
"""
FACTS = {"study": "mutation", "schema": 2, "device": "cpu-2t", "digests": {}, "tests": "0"}
SAID = {"versions": {}, "seed": 0, "brand": "CPU", "date": "2026-01-01T00:00:00+00:00"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one module and its tests."""
    root = tmp_path / "root"
    (root / "src" / "im2win").mkdir(parents=True)
    (root / "tests" / "support").mkdir(parents=True)
    (root / "src" / "im2win" / "__init__.py").touch()
    (root / "src" / "im2win" / "sizes.py").write_text(SIZES)
    (root / "tests" / "test_sizes.py").write_text(TEST)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: not here"]\n')
    shutil.copy2(SUPPORT / "mutation_plugin.py", root / "tests" / "support")
    return root


def changed(old: str, new: str) -> Mutant:
    """The module with one text in place of another."""
    assert SIZES.count(old) == 1
    line, diff = difference(SIZES, SIZES.replace(old, new))
    return Mutant("sizes", "src/im2win/sizes.py", line, "ByHand", diff)


def test_outcomes(root: Path, tmp_path: Path) -> None:
    """A mutant that a test notices, one that none does, and one that cannot be imported; the source stays, and nothing is done twice."""
    killed, survived = changed("- taps + 1", "- taps + 2"), changed("found >= 0", "found > 0")
    broken = changed("-> int:\n    while", "= 1:\n    while")
    path, said = tmp_path / "state.json", list[str]()
    mutants = [killed, survived, broken]

    def reason(mutant: Mutant) -> str:
        return "zero either way" if mutant == survived else ""

    def again() -> State:
        state = State.begun(path, FACTS, mutants)
        return run(root, state, lambda file: ["tests/test_sizes.py"], processes=2, folder=tmp_path, equivalent=reason, say=said.append)

    state = again()
    assert [state.verdicts[one].outcome for one in mutants] == ["killed", "survived", "incompetent"]
    assert state.verdicts[killed].test == "tests/test_sizes.py::test_outputs" and "assert" in state.verdicts[killed].reason
    known = state.baselines["tests/test_sizes.py"]
    assert known.failed == ["tests/test_sizes.py::test_that_fails_here"] and known.tests == 3
    assert (root / "src" / "im2win" / "sizes.py").read_text() == SIZES and not list(tmp_path.glob("im2win-mutation-*"))
    rows = json.loads(path.read_text())["mutants"]
    assert [row.get("equivalent") for row in rows] == [None, "zero either way", None] and len(said) == 4
    assert again().verdicts == state.verdicts and len(said) == 4
    rows[0] |= {"outcome": "survived", "left_out": ["tests/test_slow.py"]}
    assert "no test notices it; left out: `tests/test_slow.py`" in report.table([{**FACTS, "mutants": rows, **SAID}])
    rows[0] |= {"outcome": "killed"}
    text = report.table([{**FACTS, "mutants": rows, **SAID}])
    assert "| `sizes` | 3 | 1 | 0 | 1 | 0 | 1 | 0 | 100 % |" in text and "zero either way" in text and "found > 0" in text


def test_a_run_whose_time_is_over_goes_on_later(root: Path, tmp_path: Path) -> None:
    """What was not run has no verdict and is counted apart; a file of tests that takes too long is left out, and its mutants with it."""
    path, mutants = tmp_path / "state.json", [changed("- taps + 1", "- taps + 2"), changed("size += 1", "size += 3")]

    def again(**limits: float) -> State:
        state = State.begun(path, FACTS, mutants)
        return run(root, state, lambda file: ["tests/test_sizes.py"], folder=tmp_path, say=lambda line: None, **limits)

    over = again(seconds=1e-3)
    assert not over.verdicts and not over.baselines
    counted = report.counts(json.loads(path.read_text())["mutants"])
    assert (counted["drawn"], counted["not run"], report.noticed(counted)) == (2, 2, None)
    slow = root / "tests" / "test_sizes.py"
    slow.write_text(f"import time\ntime.sleep(60)\n{TEST}")
    assert again(most_s=3.0).baselines["tests/test_sizes.py"].refused == "no end in 3 s"
    slow.write_text(TEST)
    path.unlink()
    assert [again(seconds=600.0).verdicts[one].outcome for one in mutants] == ["killed", "killed"]


def test_what_never_ends_is_noticed(root: Path, tmp_path: Path) -> None:
    from mutation_campaign import Baseline, Limits, Tree, judged

    tree = Tree(root, tmp_path / "tree")
    known = {"tests/test_sizes.py": Baseline(0.1, failed=["tests/test_sizes.py::test_that_fails_here"])}
    found = judged(tree, changed("size += 1", "pass"), known, Limits(start_s=2.0))
    assert found.outcome == "timeout" and found.test == "tests/test_sizes.py::test_padded" and found.seconds < 20


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path, mutant = tmp_path / "state.json", changed("- taps + 1", "- taps + 2")
    State.begun(path, FACTS, [mutant]).save(lambda mutant: "")
    for name, again, message in (("device", [], "`device`"), ("tests", [], "`--again survived`"), ("digests", ["survived"], "`digests`")):
        with pytest.raises(CampaignError, match=message):
            State.begun(path, {**FACTS, name: "other"}, [mutant], again)
    assert State.begun(path, {**FACTS, "tests": "other"}, [mutant], ["survived"]).mutants == [mutant]
    path.write_text("[]")
    with pytest.raises(CampaignError, match="not a file of a mutation run"):
        State.begun(path, FACTS, [mutant])


def test_a_change_is_lines_for_lines() -> None:
    for new in (SIZES.replace("+ 1\n", "+ 2\n", 1), SIZES.replace("    if taps is None:\n        taps = 1\n", ""), SIZES + "x = 1\n"):
        assert Mutant("", "", *_of(difference(SIZES, new))).applied(SIZES) == new
    with pytest.raises(MutantError, match="draw again"):
        changed("- taps + 1", "- taps + 2").applied(SIZES.replace("taps", "window"))


def _of(found: tuple[int, str]) -> tuple[int, str, str]:
    return found[0], "", found[1]


def test_what_no_result_depends_on_is_no_change() -> None:
    same = ("Windows", "All windows"), ("int | None", "int"), ('"""Sizes."""', '"""Sizes."""\nimport x'), ("- taps", "+ taps")
    assert [meaning(SIZES.replace(*pair)) == meaning(SIZES) for pair in same] == [True, True, False, False]
    assert meaning("@functools.cache\ndef f(): return [*zip(a, b, strict=True)]") == meaning("def f(): return [*zip(a, b)]")
    assert meaning("def f(:") is None


def test_a_sample_is_drawn_area_by_area() -> None:
    pytest.importorskip("cosmic_ray", reason="drawn with Cosmic Ray, of the extra `mutation`")
    areas = {"common": ["src/im2win/common/quantities.py", "src/im2win/common/files.py"], "device": ["src/im2win/device/affinity.py"]}
    sample = drawn(ROOT, areas, 9, 3)
    assert sample == drawn(ROOT, areas, 9, 3) != drawn(ROOT, areas, 9, 4)
    assert Counter(mutant.area for mutant in sample) == {"common": 5, "device": 4}
    for mutant in sample:
        source = (ROOT / mutant.file).read_text()
        assert meaning(mutant.applied(source)) not in (None, meaning(source))
    with pytest.raises(MutantError, match="area 'none' has no file"):
        drawn(ROOT, {"none": ["none/*.py"]}, 1, 0)


def test_every_file_has_tests_and_every_row_is_of_files() -> None:
    files = {path.relative_to(ROOT).as_posix() for patterns in AREAS.values() for pattern in patterns for path in ROOT.glob(pattern)}
    assert len(files) > 150 and not [file for file in files if not file.endswith("__init__.py") and not catching(file)]
    named = {test for _, tests in TESTS for test in tests}
    assert not [test for test in named if not (ROOT / test.partition("::")[0]).is_file()]
    for test in {*named, *TIMED}:
        assert f"def {test.partition('::')[2]}" in (ROOT / test.partition("::")[0]).read_text()


def test_reasons_are_of_today_s_source() -> None:
    """Lines that no longer exist have no mutants: their reasons go."""
    reasons = script("tests/mutation/mutants.py").equivalents()
    for (file, diff), reason in reasons.items():
        removed = "\n".join(Mutant("", file, 1, "", diff).side("-"))
        assert removed in (ROOT / file).read_text(), f"{file}: equivalent.json has a reason for lines that are gone:\n{removed}"
        assert reason.strip() and len(reason) > 10
