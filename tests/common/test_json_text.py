"""JSON that anyone may have written: one kind of error, also for what is nested too deeply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from im2win.common.json_text import parsed
from im2win.runtime.manifest import ArtefactError, read_values

DEEP = "[" * 100_000


def test_values_and_errors() -> None:
    assert parsed('{"a": [1]}') == {"a": [1]} == parsed(b'{"a": [1]}')
    for text in ("{", "", DEEP):
        with pytest.raises(ValueError, match=r"Expecting|nested too deeply"):
            parsed(text)


def test_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "op.so.json").write_text(DEEP)
    with pytest.raises(ArtefactError, match=r"not a readable manifest \(it is nested too deeply\)"):
        read_values(tmp_path / "op.so.json", "im2win build")


def test_a_file_of_layers(tmp_path: Path, command: Any) -> None:
    (tmp_path / "layers.jsonl").write_text(DEEP)
    done = command("layers", tmp_path / "layers.jsonl")
    assert done.status == 2 and "line 1: it is nested too deeply" in done.err and done.err.count("\n") == 1
