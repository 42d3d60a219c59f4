"""The study of cold starts: what it measures in new processes, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script

from im2win.bench.source import digests
from im2win.reports import studies
from im2win.reports.tables import fill
from im2win.studies.entries import COLD_PARTS


def test_the_table_sums_what_this_package_takes(tmp_path: Path) -> None:
    parts = {part: {"median": 2.0**place, "least": 0.0, "most": 1e3} for place, part in enumerate(COLD_PARTS)}
    file = tmp_path / "studies" / "some-cpu" / "cold-start.json"
    file.parent.mkdir(parents=True)
    (tmp_path / "results").mkdir()
    file.write_text(json.dumps({"study": "cold-start", "device": "some-cpu", "layers": {"n1-c8x9x9-k8x3x3": parts}}))
    text = fill("<!-- table?:cold-start -->\n<!-- /table -->", {}, studies.load_all(tmp_path / "results"))
    assert "| n1-c8x9x9-k8x3x3 | `some-cpu` | 1.0 | 2.0 | 4.0 | 8.0 | 16.0 | 32.0 | 64.0 | 128.0 | 120.0 |" in text


@pytest.mark.slow
def test_new_processes_load_what_was_built_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, module = tmp_path / "cold-start.json", script("benchmarks/cold_start.py")

    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["cold_start.py", "--json", str(file), *words])
        module.main()

    run("n1-c8x9x9-k8x3x3-bias", "--rounds", "1")
    study: dict[str, Any] = json.loads(file.read_text())
    [parts] = study["layers"].values()
    assert study["digests"] == digests("cpu") and list(parts) == list(COLD_PARTS) and all(part["median"] > 0 for part in parts.values())
    for words, message in ((("--rounds", "0"), "`--rounds` (=0)"), (("n1-c8x9",), "n1-c8x9")):
        with pytest.raises(SystemExit):
            run(*words)
        assert message in capsys.readouterr().err
