"""The study of waiting: what it measures in new processes, and its table."""

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
from im2win.studies.entries import WAITING_FRONTS


def test_the_table_has_a_line_for_each_call(tmp_path: Path) -> None:
    file = tmp_path / "studies" / "some-cpu" / "waiting.json"
    file.parent.mkdir(parents=True)
    (tmp_path / "results").mkdir()
    fronts = {front: {"first": 12.34, "again": 1.2, "import": 3.0} for front in WAITING_FRONTS}
    file.write_text(json.dumps({"study": "waiting", "device": "some-cpu", "networks": {"tiny": fronts}}))
    text = fill("<!-- table?:waiting -->\n<!-- /table -->", {}, studies.load_all(tmp_path / "results"))
    for title in WAITING_FRONTS.values():
        assert f"| tiny | {title} | `some-cpu` | 12.3 | 1.2 | 3.0 |" in text


@pytest.mark.slow
def test_new_processes_find_what_the_first_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("torch", "onnx"):
        pytest.importorskip(needed)
    file, module = tmp_path / "waiting.json", script("benchmarks/waiting.py")

    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["waiting.py", "--json", str(file), *words])
        module.main()

    run("tiny", "--again", "1", "--calls", "compile")
    study: dict[str, Any] = json.loads(file.read_text())
    assert study["digests"] == digests("cpu", models=True) and list(study["networks"]) == ["tiny"]
    [(call, seconds)] = study["networks"]["tiny"].items()
    assert call == "compile" and 0 < seconds["again"] < seconds["first"]
    for words, message in ((("--again", "0"), "`--again` (=0)"), (("--calls", "tune"), "`--calls` (=tune)")):
        with pytest.raises(SystemExit):
            run(*words)
        assert message in capsys.readouterr().err
