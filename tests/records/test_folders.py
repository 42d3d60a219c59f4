"""The folders of records: which are searched and written, and that one which cannot be written is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from recorded import CONV, DEVICE, fill, ok

import im2win
from im2win.common.locking import LogError
from im2win.device.cpu import Machine
from im2win.records import lookup
from im2win.records.folders import folder_to_write, named_folders, user_folder
from im2win.records.log import Log
from im2win.records.lookup import PACKAGED, open_logs


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which does not exist yet."""
    monkeypatch.setenv("IM2WIN_LOGS", str(tmp_path / "mine"))
    return tmp_path / "mine"


def _searched(logs: Any = None) -> list[Path]:
    return [log.folder for log in open_logs(logs)]


def test_no_test_reads_the_real_folder(own_logs: Path) -> None:
    assert user_folder() == own_logs


def test_the_user_s_folder_is_the_platform_s_unless_named(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_folder() == mine
    monkeypatch.setenv("IM2WIN_LOGS", "beside")
    assert user_folder() == Path.cwd() / "beside"
    monkeypatch.setenv("IM2WIN_LOGS", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(mine.parent / "data"))
    assert user_folder().name == "tuning_logs" and user_folder().parent.name == "im2win"
    if sys.platform == "linux":
        assert user_folder() == mine.parent / "data" / "im2win" / "tuning_logs"


def test_named_folders_come_first_then_the_user_s_then_the_package_s(mine: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert _searched() == _searched(one) == [PACKAGED], "a folder that does not exist is left out"
    for folder in (mine, one, two):
        folder.mkdir()
    assert _searched() == [mine, PACKAGED]
    assert _searched(one) == _searched(str(one)) == [one, mine, PACKAGED]
    assert _searched([two, str(one)]) == [two, one, mine, PACKAGED]
    assert _searched((one, mine)) == [one, mine, PACKAGED], "no folder twice"


def test_names_are_absolute_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_folders("logs") == (str(tmp_path / "logs"),) and named_folders(None) == named_folders([]) == ()
    with pytest.raises(TypeError, match=r"`logs` \(=\[1\]\) must be a folder or a sequence of folders"):
        named_folders([1])  # type: ignore[list-item]


def test_tuning_writes_the_first_named_folder_else_the_user_s(mine: Path, tmp_path: Path) -> None:
    assert folder_to_write(None) == mine and mine.is_dir()
    assert folder_to_write([tmp_path / "one" / "deep", mine]) == tmp_path / "one" / "deep" and (tmp_path / "one" / "deep").is_dir()


@pytest.mark.parametrize("place", ["/proc/im2win", "{file}", "{file}/logs"])
def test_a_folder_that_cannot_be_written_is_named_before_any_work(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    folder = place.format(file=tmp_path / "file")
    monkeypatch.setenv("IM2WIN_LOGS", folder)
    with pytest.raises(LogError, match=rf"`{folder}`.*`logs`, or `--logs`, and .* IM2WIN_LOGS name another") as caught:
        im2win.tune("n1-c8x10x10-k16x3x3", trials=1)
    assert "\n" not in str(caught.value)
    assert folder_to_write(tmp_path / "other").is_dir(), "another folder is taken all the same"


def test_a_folder_without_permission_is_read_but_not_written(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(Log(mine), ok())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(LogError, match="Permission denied"):
        folder_to_write(None)
    (log, _) = open_logs(None)
    assert log.read(CONV, DEVICE) == [ok()]


def test_every_look_up_finds_what_the_user_s_folder_holds(mine: Path) -> None:
    """Also in a process that was started later, and told nothing."""
    fill(Log(mine), ok(device=Machine.host().name))
    found = lookup.search(CONV, Machine.host(), ["im2win/stored"], None)
    assert [record.device for record, _ in found.skipped][:1] == [Machine.host().name], "it was seen; its TVM is another one"
    script = "from im2win.records.lookup import open_logs; print([str(log.folder) for log in open_logs(None)][0])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(mine)


def test_a_missing_folder_costs_nothing(mine: Path) -> None:
    open_logs(None)
    start = time.perf_counter()
    for _ in range(100):
        open_logs(None)
    assert time.perf_counter() - start < 0.1 and not mine.exists()
