"""Temporary folders: their own process', gone at its end, and what killed processes left is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from im2win.common.temporary import temporary_folder

HOLD = """
import time
from im2win.common.temporary import temporary_folder
held = temporary_folder("tune")
print(held.name, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_gone_at_its_end(tmp_path: Path) -> None:
    with temporary_folder("tune") as name:
        assert Path(name).parent == tmp_path and Path(name).name.startswith(f"im2win-tune-p{os.getpid()}-")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    other = [tmp_path / name for name in ("im2win-tune-abc", "im2win-model-p1-1-x", "im2win-tune-p1", f"im2win-other-p{2**22}-1-x")]
    for path in other:
        path.mkdir()
    again = tmp_path / f"im2win-tune-p{os.getpid()}-1-x"  # of a process that had this one's number
    again.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        (held / "library.so").touch()
        with temporary_folder("tune"):
            assert held.exists() and not again.exists()
        process.send_signal(signal.SIGKILL)
    assert held.exists()
    with temporary_folder("tune") as name:
        assert sorted(tmp_path.iterdir()) == sorted([*other, Path(name)])


def test_a_tuner_that_is_asked_to_end_leaves_nothing(tmp_path: Path) -> None:
    words = ["tune", "n1-c64x28x28-k64x3x3-p1", "--trials", "64", "--logs", str(tmp_path / "logs")]
    with subprocess.Popen([sys.executable, "-m", "im2win", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        limit = time.monotonic() + 60
        while not list(tmp_path.glob("im2win-tune-*/*.so")) and time.monotonic() < limit:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert not list(tmp_path.glob("im2win-tune-*"))
