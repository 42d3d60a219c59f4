"""`benchmarks/campaigns.sh`: parts that cannot run cost no other, and the table of what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from scripts import script


def campaigns(out: Path, *parts: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "benchmarks" / "campaigns.sh"), str(out), *parts]
    environment = {**os.environ, "PYTHON": sys.executable, **settings}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)


def test_parts_without_time_are_named(tmp_path: Path) -> None:
    held = {"study": "broken-kernels", "device": "some-cpu-2t", "rows": [{"mistake": "no wait", "outcome": "caught"}, {"mistake": ""}]}
    (tmp_path / "broken-cuda.json").write_text(json.dumps(held))
    done = campaigns(tmp_path, "fuzz-cpu", "broken-cuda", "fleet", LIMIT="480", TOTAL="10")
    assert done.returncode == 0, done.stderr
    first, second, third, table = done.stdout.splitlines()
    assert (first, second, third) == ("fuzz-cpu: no time left", "broken-cuda: no time left", "fleet: no time left")
    assert table.split() == ["broken-cuda", "some-cpu-2t", "2:", "1", "caught,", "1", "not", "run"]


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done = campaigns(tmp_path, "fuzz")
    assert done.returncode == 2 and done.stderr.startswith("PART (=fuzz) must be fuzz-cpu, fuzz-cuda, broken-cpu")


@pytest.mark.slow
def test_a_part_goes_on(tmp_path: Path) -> None:
    for seconds, cases in (("150", 4), ("150", 6)):
        done = campaigns(tmp_path, "fuzz-cpu", LIMIT=seconds, COUNT_CPU=str(cases), PROCESSES="1")
        assert f"status 0: {cases} cases, 0 failures" in done.stdout and f" {cases} cases: " in done.stdout.splitlines()[-1]


FACTS: list[tuple[dict[str, Any], str]] = [
    (
        {"study": "fuzz", "count": 9, "outcomes": {"equal": 8, "wrong": 1}, "failures": [{}], "cpu_s": 12.3},
        "9 cases: 8 equal, 1 wrong; 1 failures; 12 CPU s",
    ),
    (
        {"study": "mutation", "mutants": [{"outcome": "survived"}, {"outcome": "survived", "equivalent": "same"}, {}]},
        "3: 1 equivalent, 1 not run, 1 survived",
    ),
    (
        {"study": "fleet", "sessions": [{"workers": 1, "trials": 8, "seconds": 8.0}, {"workers": 2, "trials": 8, "seconds": 5.0}]},
        "1 workers 1.00, 2 workers 1.60",
    ),
]


@pytest.mark.parametrize("study, line", FACTS, ids=[study["study"] for study, _ in FACTS])
def test_lines_of_the_table(study: dict[str, Any], line: str) -> None:
    assert script("benchmarks/campaigns_table.py").line(study) == line
