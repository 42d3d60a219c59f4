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

from im2win.common.temporary import YOUNG_S, TemporaryFolder

HOLD = """
import time
from im2win.common.temporary import TemporaryFolder
held = TemporaryFolder("tune")
print(held.name, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def aged(path: Path) -> None:
    """Makes a folder as old as those that are not left alone."""
    then = time.time() - YOUNG_S - 1
    os.utime(path, (then, then))


def test_it_is_gone_at_its_end(tmp_path: Path) -> None:
    with TemporaryFolder("tune") as name:
        assert Path(name).parent == tmp_path and Path(name).name.startswith("im2win-tune-held-")
    folder = TemporaryFolder("tune")
    folder.cleanup()
    folder.cleanup()
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("processes", "a killed tuner's folder stays")
def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """A folder that is held, whatever its age; of another purpose or name; a link; and one whose maker may be about to lock it."""
    other = [tmp_path / name for name in ("im2win-tune-abc", "im2win-model-held-x", "im2win-tune-held-young")]
    for path in other:
        path.mkdir()
    for path in other[:2]:
        aged(path)
    link = tmp_path / "im2win-tune-held-link"
    link.symlink_to(other[0])
    os.utime(link, (0, 0), follow_symlinks=False)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        (held / "library.so").touch()
        aged(held)
        with TemporaryFolder("tune"):
            assert (held / "library.so").exists()
        process.send_signal(signal.SIGKILL)
    assert held.exists()
    with TemporaryFolder("tune") as name:
        assert sorted(tmp_path.iterdir()) == sorted([*other, link, Path(name)])


@pytest.mark.fault("processes", "the tuner is asked to end")
def test_a_tuner_that_is_asked_to_end_leaves_nothing(tmp_path: Path) -> None:
    words = ["tune", "n1-c64x28x28-k64x3x3-p1", "--trials", "64", "--logs", str(tmp_path / "logs")]
    with subprocess.Popen([sys.executable, "-m", "im2win", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        limit = time.monotonic() + 60
        while not list(tmp_path.glob("im2win-tune-*/*.so")) and time.monotonic() < limit:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert not list(tmp_path.glob("im2win-tune-*"))
