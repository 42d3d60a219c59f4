"""Digests that the cache folder keeps: right after every change of the source, whatever the folder holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from im2win.common.locking import locked
from im2win.registry import kept_digests, sources


class Computed:
    """Computes a digest and counts how often it is asked to."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        return f"{self.times:016x}"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path / "cache"))
    for name in ("one.py", "rooms/two.hpp"):
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / name).write_text("x = 1\n")
    return tmp_path / "package"


def new_process() -> None:
    """Forgets what this process remembers."""
    kept_digests._state.cache_clear()
    kept_digests._read.cache_clear()


def files_of(package: Path) -> list[Path]:
    return sorted((package.parent / "cache" / "digests").glob("*.json"))


def test_a_digest_is_computed_once(package: Path) -> None:
    compute = Computed()
    for _ in range(3):
        assert kept_digests.kept(package, "code cpu", compute) == f"{1:016x}"
        new_process()
    assert kept_digests.kept(package, "code cuda", compute) == f"{2:016x}" and compute.times == 2
    assert len(files_of(package)) == 1


def test_processes_that_start_at_once_compute_a_digest_once(package: Path) -> None:
    """Each has its own memory, and a lock of its own on the folder."""
    code = (
        "import sys, time; from pathlib import Path; from im2win.registry.kept_digests import kept; sys.stdin.readline(); "
        "kept(Path(sys.argv[1]), 'code cpu', lambda: print('computed') or time.sleep(0.5) or '12')"
    )
    command = [sys.executable, "-c", code, str(package)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for one in started:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    assert sorted(one.communicate()[0] for one in started) == ["", "", "computed\n"]


def test_a_lock_that_another_process_keeps_costs_time_and_nothing_else(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_digests, "WAIT_S", 0.1)
    with locked(package.parent / "cache" / "digests" / "lock"):
        assert kept_digests.kept(package, "code cpu", Computed()) == f"{1:016x}"


@pytest.mark.parametrize("change", ["another byte", "same size", "new file", "removed", "renamed"])
def test_every_change_of_the_source_counts(package: Path, change: str) -> None:
    compute = Computed()
    kept_digests.kept(package, "code cpu", compute)
    one, before = package / "one.py", (package / "one.py").stat()
    if change == "another byte":
        one.write_text("x = 12\n")
    elif change == "same size":
        one.write_text("x = 2\n")
        os.utime(one, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "new file":
        (package / "rooms" / "three.c").write_text("")
    elif change == "removed":
        one.unlink()
    else:
        one.rename(package / "other.py")
    new_process()
    assert kept_digests.kept(package, "code cpu", compute) == f"{2:016x}"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"code cpu": 1}', '{"code cpu": "not a digest"}', "[" * 100_000, b"\xff\xfe"])
def test_what_is_no_table_of_digests_is_not_read(package: Path, text: str | bytes) -> None:
    compute = Computed()
    kept_digests.kept(package, "code cpu", compute)
    [path] = files_of(package)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    new_process()
    assert kept_digests.kept(package, "code cpu", compute) == f"{2:016x}"
    new_process()
    assert kept_digests.kept(package, "code cpu", compute) == f"{2:016x}" and files_of(package) == [path]


def test_a_file_that_others_can_write_is_not_read(package: Path) -> None:
    compute = Computed()
    kept_digests.kept(package, "code cpu", compute)
    files_of(package)[0].chmod(0o666)
    new_process()
    assert kept_digests.kept(package, "code cpu", compute) == f"{2:016x}"


def test_without_a_folder_digests_are_computed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package.parent / "file").write_text("")
    monkeypatch.setenv("IM2WIN_CACHE", str(package.parent / "file" / "cache"))
    assert kept_digests.kept(package, "code cpu", Computed()) == f"{1:016x}"


def test_old_states_are_removed(package: Path) -> None:
    for number in range(kept_digests.KEPT + 3):
        (package / "one.py").write_text(f"x = {number}\n")
        new_process()
        kept_digests.kept(package, "code cpu", Computed())
        newest = max(files_of(package), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (time.time(), time.time() + number))
    assert len(files_of(package)) == kept_digests.KEPT


def test_the_packages_own_digests_are_those_that_are_computed() -> None:
    for target in sources.TARGETS:
        assert sources.choice_digest(target) == sources.choice_digest.__wrapped__(target)
        assert sources.code_digest(target, "direct/tiled") == sources.code_digest.__wrapped__(target, "direct/tiled")
