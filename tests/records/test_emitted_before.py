"""Fingerprints of earlier processes: a record of older source costs its kernel's emission once, not at every first look-up."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from recorded import ok

from im2win.records import emitted_before
from im2win.records.emission import EmissionError
from im2win.records.emitted_before import emitted_once, known
from im2win.records.lookup import applies_at_once, stale
from im2win.records.record import Record
from im2win.registry.sources import code_digest

RECORD = replace(ok(), tvm=tvm.__version__)


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Record]:
    """The records whose kernels are emitted, in a fresh cache; every kernel has the fingerprint "abc"."""
    seen: list[Record] = []
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path))
    monkeypatch.setattr(emitted_before, "emitted_now", lambda record: seen.append(record) or "abc")
    return seen


def _another_process() -> None:
    emitted_before._content.cache_clear()


def test_a_kernel_is_emitted_once_for_all_processes(emitted: list[Record], tmp_path: Path) -> None:
    assert known(RECORD) is None
    assert emitted_once(RECORD) == emitted_once(RECORD) == known(RECORD) == "abc"
    _another_process()
    assert known(RECORD) == emitted_once(replace(RECORD, device="other-cpu", fingerprint="other")) == "abc" and len(emitted) == 1
    emitted_once(replace(RECORD, tile={"rows": 8}))
    assert len(emitted) == 2
    (path,) = (tmp_path / "emitted").iterdir()
    assert code_digest("cpu", RECORD.method) in path.name and tvm.__version__ in path.name and path.read_text().count("\n") == 2


def test_the_file_is_closed_again(emitted: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing can be written."""
    opened, opens = list[int](), os.open

    def noted(path: Any, *how: Any, **options: Any) -> int:
        descriptor = opens(path, *how, **options)
        opened.extend([descriptor] if str(path).startswith(str(tmp_path)) else [])
        return descriptor

    def full(descriptor: int, data: bytes) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(os, "open", noted)
    emitted_once(RECORD)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        emitted_once(replace(RECORD, tile={"rows": 8}))
    assert len(opened) == 2
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_gpu_s_kernel_depends_on_the_gpu(emitted: list[Record]) -> None:
    for device in ("nvidia-h200", "nvidia-l4", "nvidia-h200"):
        emitted_once(replace(RECORD, target="cuda", device=device))
    assert len(emitted) == 2


def test_broken_lines_and_a_cache_that_cannot_be_written_cost_time_alone(
    emitted: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted_once(RECORD)
    (path,) = (tmp_path / "emitted").iterdir()
    path.write_text("two words\n" + path.read_text().rstrip("\n"))  # the last line was not written to its end
    _another_process()
    assert known(RECORD) is None and emitted_once(RECORD) == "abc" and len(emitted) == 2
    monkeypatch.setenv("IM2WIN_CACHE", "/proc/im2win")
    assert emitted_once(RECORD) == "abc" and len(emitted) == 3


def test_a_failure_is_not_kept(emitted: list[Record], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(record: Record) -> str:
        raise EmissionError("no memory")

    monkeypatch.setattr(emitted_before, "emitted_now", failing)
    with pytest.raises(EmissionError):
        emitted_once(RECORD)
    assert not (tmp_path / "emitted").exists()


def test_records_of_older_source_apply_where_their_kernel_is_known(emitted: list[Record]) -> None:
    assert not applies_at_once(RECORD, []) and not emitted, "nobody has looked yet"
    assert stale(RECORD) is None and "its kernel has changed" in str(stale(replace(RECORD, fingerprint="old")))
    _another_process()
    assert applies_at_once(RECORD, []) and not applies_at_once(replace(RECORD, fingerprint="old"), [])
    assert applies_at_once(replace(RECORD, tile={"rows": 2}, generator=code_digest("cpu", RECORD.method)), [])
    assert not applies_at_once(replace(RECORD, tvm="0.1"), []) and len(emitted) == 1
