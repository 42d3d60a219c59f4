"""Logs: nothing whole is ever lost, nothing broken is ever trusted."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from recorded import CONV, DEVICE, bad, fill, ok, stale
from worker_appends import append_for_ever, append_many

from im2win.common.locking import LogError
from im2win.records.log import Log, Merged, Problem, Pruned, merge

SPAWN = multiprocessing.get_context("spawn")


# --- reading and writing ---------------------------------------------------------------------------------------------


def test_append_then_read(log: Log) -> None:
    records = [ok(), bad(trial=1), ok(2e-3, trial=2)]
    fill(log, *records)
    assert log.read(CONV, DEVICE) == records == list(Log(str(log.folder)))
    assert log.path(CONV, DEVICE) == log.folder / DEVICE / "n1-c64x56x56-k64x3x3-p1.jsonl"
    assert log.path(CONV, DEVICE).read_text() == "".join(record.to_line() + "\n" for record in records)
    assert log.problems == []


def test_what_is_written_is_on_the_disk(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, before `append` returns, and before a pruned file takes the old one's place."""
    events: list[object] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("replaced"), replace(old, new)))
    sizes = [fill(log, record).path(CONV, DEVICE).stat().st_size for record in (ok(), ok(2e-3, trial=1))]
    log.prune()
    assert events == [*sizes, log.path(CONV, DEVICE).stat().st_size, "replaced"] and log.read(CONV, DEVICE) == [ok()]


def test_a_folder_that_does_not_exist_is_an_empty_log(log: Log) -> None:
    assert log.read(CONV, DEVICE) == log.devices() == log.convs(DEVICE) == log.problems == list(log) == []
    assert not log.folder.exists()


def test_devices_and_convs_are_sorted(log: Log) -> None:
    asymmetric = CONV.with_(padding=(0, 1, 2, 3))  # its key has dots, like a file's ending
    fill(log, ok(conv=CONV), ok(conv=asymmetric), ok(device="amd-zen5-2t"))
    assert log.devices() == ["amd-zen5-2t", DEVICE]
    assert log.convs(DEVICE) == [asymmetric, CONV]
    assert log.read(asymmetric, DEVICE) == [ok(conv=asymmetric)]


def test_what_was_read_is_read_again_when_it_changes(log: Log) -> None:
    fill(log, ok())
    assert len(log.read(CONV, DEVICE)) == 1
    fill(Log(log.folder), ok(trial=1))
    assert len(log.read(CONV, DEVICE)) == 2
    log.path(CONV, DEVICE).unlink()
    assert log.read(CONV, DEVICE) == []


BROKEN = {
    b'{"schema": 1, "conv"': "must be JSON",
    b"\xff\xfe": "'utf-8' codec can't decode",
    b"null": "must be a JSON object",
    ok().to_line().replace('"schema": 5', '"schema": 6').encode(): "`schema` (=6) must be 5",
    ok().to_line().replace("[0.001]", "[NaN]").encode(): "`samples_s` (=(nan,)) must be a list of finite seconds",
    ok().to_line().replace("[0.001]", "[]").encode(): "`samples_s` (=()) must be a list of at least one time",
    ok(device="elsewhere").to_line().encode(): f"`device` (='elsewhere') must be '{DEVICE}', as the path of its file says",
    ok(conv=CONV.with_(batch=2)).to_line().encode(): "`conv` (='n2-c64x56x56-k64x3x3-p1') must be 'n1-c64x56x56-k64x3x3-p1'",
}


@pytest.mark.fault("records", "a record is broken")
@pytest.mark.parametrize(("line", "reason"), BROKEN.items())
def test_a_broken_line_costs_that_line_only(log: Log, line: bytes, reason: str) -> None:
    path = log.path(CONV, DEVICE)
    fill(log, ok())
    with path.open("ab") as file:
        file.write(line + b"\n\n \r\n")
    fill(log, ok(trial=1))
    for _ in range(2):  # the second time from memory
        assert log.read(CONV, DEVICE) == [ok(), ok(trial=1)]
        (problem,) = log.problems
        assert (problem.path, problem.line_number) == (path, 2)
        assert reason in problem.reason


@pytest.mark.fault("records", "a record's time was edited")
def test_an_edited_time_is_never_the_best(log: Log) -> None:
    """The record that claims a picosecond, and the one that claims what could be true, are lines that cannot be read."""
    fill(log, ok(3e-3), ok(2e-3, trial=1), ok(4e-3, trial=2))
    path = log.path(CONV, DEVICE)
    path.write_text(path.read_text().replace("[0.002]", "[1e-12]").replace("[0.004]", "[0.001]"))
    assert log.read(CONV, DEVICE) == [ok(3e-3)]
    picosecond, millisecond = (problem.reason for problem in log.problems)
    assert "`samples_s` (=(1e-12,)) must be" in picosecond and "the checksum of the line: something changed it" in millisecond
    assert log.prune().broken == 2 and log.read(CONV, DEVICE) == [ok(3e-3)] and path.read_text() == ok(3e-3).to_line() + "\n"


def test_lines_of_before_checksums_are_read_and_written_with_one(log: Log) -> None:
    path = log.path(CONV, DEVICE)
    path.parent.mkdir(parents=True)
    for trial in range(2):
        values = {name: value for name, value in json.loads(ok(trial=trial).to_line()).items() if name != "checksum"}
        with path.open("a") as file:
            file.write(json.dumps({**values, "schema": 4}) + "\n")
    before = path.read_bytes()
    assert log.read(CONV, DEVICE) == [ok(), ok(trial=1)] and not log.problems and path.read_bytes() == before
    log.append(ok(trial=2))
    assert path.read_bytes().startswith(before) and log.read(CONV, DEVICE) == [ok(), ok(trial=1), ok(trial=2)]
    assert merge([log], Log(log.folder.parent / "into")).added == 3
    lines = (log.folder.parent / "into" / DEVICE / path.name).read_text().splitlines()
    assert all("checksum" in json.loads(line) for line in lines)


@pytest.mark.fault("records", "a record is truncated")
def test_a_truncated_last_line_does_not_swallow_the_next(log: Log) -> None:
    whole = (ok().to_line() + "\n").encode()
    path = log.path(CONV, DEVICE)
    path.parent.mkdir(parents=True)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole + whole[:cut])
        log.append(ok(trial=9))
        kept = [ok()] * (2 if cut >= len(whole) - 1 else 1)  # without its newline a line is whole
        assert log.read(CONV, DEVICE) == [*kept, ok(trial=9)]
        assert [problem.line_number for problem in log.problems] == ([2] if 0 < cut < len(whole) - 1 else [])


@pytest.mark.fault("records", "a record is of another layer or device")
def test_foreign_files_are_left_alone(log: Log) -> None:
    fill(log, ok())
    for name in ("README.md", ".n1-c1x1x1-k1x1x1.jsonl.tmp", "n1-c1x1x1-k1x1x1.json", "notes.jsonl", "n1-c1x1x1-k1x1x1-s1.jsonl"):
        (log.folder / DEVICE / name).write_text("not a record\n")
    (log.folder / "README.md").write_text("not a device")
    (log.folder / "__pycache__").mkdir()
    (log.folder / DEVICE / f"{CONV.with_(batch=3)}.jsonl").mkdir()
    assert log.devices() == [DEVICE]
    assert list(log) == [ok()]
    reasons = {problem.path.name: problem.reason for problem in log.problems}
    assert set(reasons) == {"notes.jsonl", "n1-c1x1x1-k1x1x1-s1.jsonl", f"{CONV.with_(batch=3)}.jsonl"}
    assert reasons["notes.jsonl"].startswith("the file's name is no key: Conv2d.parse: key 'notes' must look like")
    assert reasons["n1-c1x1x1-k1x1x1-s1.jsonl"].endswith("must be written 'n1-c1x1x1-k1x1x1'.")
    assert reasons[f"{CONV.with_(batch=3)}.jsonl"] == "cannot be read: Is a directory"
    (log.folder / DEVICE / f"{CONV.with_(batch=3)}.jsonl").rmdir()
    assert log.prune(accepts=lambda record: "all") == Pruned(stale=1)
    assert (log.folder / DEVICE / "notes.jsonl").read_text() == "not a record\n"


def test_an_unreadable_file_is_a_problem_to_readers_and_an_error_to_prune(log: Log) -> None:
    path = log.path(CONV, DEVICE)
    path.mkdir(parents=True)
    assert log.read(CONV, DEVICE) == []
    assert log.problems == [Problem(path, 0, "cannot be read: Is a directory")]
    with pytest.raises(LogError, match=f"^`{path}` cannot be read: Is a directory: change its permissions or remove it, then"):
        log.prune()
    with pytest.raises(LogError, match=rf"^cannot write `{path}` \(Is a directory\): there is a file where a folder belongs, or the"):
        log.append(ok())


# --- places that cannot be written -----------------------------------------------------------------------------------


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match=f"^`{tmp_path / 'file'}` is a file; choose a folder for the logs.$"):
        Log(tmp_path / "file")
    below = Log(tmp_path / "file" / "logs")
    assert below.read(CONV, DEVICE) == below.devices() == []
    with pytest.raises(LogError, match=rf"^cannot write `{below.folder / DEVICE}` \(Not a directory\): there is a file where"):
        below.append(ok())
    with pytest.raises(LogError, match=r"\(Not a directory\)"):
        merge([fill(Log(tmp_path / "good"), ok())], below)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_a_path_that_nobody_can_write() -> None:
    with pytest.raises(LogError, match=rf"^cannot write `/proc/im2win/{DEVICE}` \(.*\): choose another folder for the logs.$"):
        Log("/proc/im2win").append(ok())


@pytest.mark.fault("disks and folders", "the log's folder is read-only")
def test_a_read_only_folder(log: Log) -> None:
    fill(log, ok())
    (log.folder / DEVICE).chmod(0o555)
    try:
        if os.access(log.folder / DEVICE, os.W_OK):
            pytest.skip("this user writes where permissions forbid it (root)")
        (log.folder / DEVICE / ".lock").chmod(0o444)
        with pytest.raises(LogError, match=r"\(Permission denied\): choose a folder for the logs that you may write, or change"):
            log.append(ok(trial=1))
        assert log.read(CONV, DEVICE) == [ok()]
        assert log.prune(dry_run=True) == Pruned(kept=1)
    finally:
        (log.folder / DEVICE).chmod(0o755)


@pytest.mark.fault("disks and folders", "the log's disk is full")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk(log: Log) -> None:
    path = log.path(CONV, DEVICE)
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    with pytest.raises(LogError, match=rf"^cannot write `{path}` \(No space left on device\): free some space there, or choose"):
        log.append(ok())


@pytest.mark.fault("disks and folders", "the log's disk fills up within a line")
def test_a_disk_that_fills_up_within_a_line_leaves_nothing_of_it(log: Log) -> None:
    resource = pytest.importorskip("resource")
    fill(log, ok())
    before = log.path(CONV, DEVICE).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))  # the system writes 20 bytes of the line, then refuses
    try:
        with pytest.raises(LogError, match=r"\(File too large\): free some space there"):
            log.append(ok(trial=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.path(CONV, DEVICE).read_bytes() == before


@pytest.mark.fault("disks and folders", "another process holds the log's lock")
def test_a_lock_that_stays_taken(log: Log) -> None:
    hurried = Log(log.folder, lock_timeout_s=0.05)
    with log._locked(DEVICE):
        with pytest.raises(LogError, match=f"^`{log.folder / DEVICE / '.lock'}` was held by another process for 0.05 s: wait until"):
            hurried.append(ok())
        hurried.append(ok(device="other"))  # devices do not wait for one another
    hurried.append(ok())
    assert hurried.read(CONV, DEVICE) == [ok()]


# --- many writers, killed writers ------------------------------------------------------------------------------------


def test_two_processes_append_at_once(log: Log) -> None:
    writers = [SPAWN.Process(target=append_many, args=(str(log.folder), ok(seed=seed), 200)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    records = log.read(CONV, DEVICE)
    assert len(records) == len(log.path(CONV, DEVICE).read_bytes().splitlines()) == 400
    assert log.problems == []
    for seed in (1, 2):
        assert [record.trial for record in records if record.seed == seed] == list(range(200))


@pytest.mark.fault("processes", "a writer is killed within a line")
def test_a_killed_writer_loses_no_record_that_was_written(log: Log) -> None:
    chance = random.Random(0)
    for seed in range(5):
        receive, send = SPAWN.Pipe(duplex=False)
        writer = SPAWN.Process(target=append_for_ever, args=(str(log.folder), ok(seed=seed), send))
        writer.start()
        send.close()
        assert receive.poll(60)
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        written = []
        with contextlib.suppress(EOFError, OSError):  # the end, or a message that the kill cut short
            while True:
                written.append(receive.recv())
        trials = [record.trial for record in log.read(CONV, DEVICE) if record.seed == seed]
        assert trials[: len(written)] == written == list(range(len(written)))
        assert len(trials) <= len(written) + 2  # a line is on the disk before it is announced, and announced before it arrives
        assert len(log.problems) <= seed + 1  # at most the line that this kill cut short
        log.append(ok(seed=seed, trial=10**6))  # its lock died with it
        assert log.read(CONV, DEVICE)[-1] == ok(seed=seed, trial=10**6)


# --- merge and prune -------------------------------------------------------------------------------------------------


def test_merge_is_a_union_without_duplicates(tmp_path: Path) -> None:
    a = fill(Log(tmp_path / "a"), ok(), ok(2e-3, trial=1), ok(device="amd-zen5-2t"))
    b = fill(Log(tmp_path / "b"), ok(date="2026-02-02T00:00:00Z"), ok(3e-3), bad(), bad(), bad("timeout"), ok(tile={"rows": 8}))
    with b.path(CONV, DEVICE).open("ab") as file:
        file.write(b"broken\n")
    into = fill(Log(tmp_path / "into"), ok(2e-3, trial=1))
    assert merge([a, b], into) == Merged(added=6, duplicates=3, broken=1)
    assert into.read(CONV, DEVICE) == [ok(2e-3, trial=1), ok(), ok(3e-3), bad(), bad("timeout"), ok(tile={"rows": 8})]
    assert into.read(CONV, "amd-zen5-2t") == [ok(device="amd-zen5-2t")]
    assert merge([a, b], into) == Merged(added=0, duplicates=9, broken=1)
    assert merge([into], into) == Merged(added=0, duplicates=7)
    assert into.problems == []


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"trial": 1}, {"fingerprint": "x"}, {"tvm": "0.26"}, {"threads": 1}, {"algorithm": "mec/tiled"}]
)
def test_merge_keeps_what_differs(tmp_path: Path, change: dict[str, Any]) -> None:
    into = fill(Log(tmp_path / "into"), ok())
    assert merge([fill(Log(tmp_path / "a"), ok(**change))], into) == Merged(added=1)


def _crowd(log: Log) -> Log:
    fill(log, ok(3e-3), ok(1e-3, trial=1), bad(trial=2), ok(2e-3, algorithm="mec/tiled"), ok(0.5e-3, tvm="0.26.0"), ok(2e-3, trial=3))
    with log.path(CONV, DEVICE).open("ab") as file:
        file.write(b"broken")
    return fill(log, bad("timeout", conv=CONV.with_(batch=2)), ok(4e-3, device="amd-zen5-2t"))


def test_prune_keeps_the_best_of_each_algorithm(log: Log) -> None:
    _crowd(log)
    path = log.path(CONV, DEVICE)
    path.chmod(0o664)
    before = {file: file.read_bytes() for file in log.folder.rglob("*.jsonl")}
    expected = Pruned(kept=3, slower=2, stale=1, failing=2, broken=1)
    assert log.prune(accepts=stale, dry_run=True) == expected
    assert {file: file.read_bytes() for file in log.folder.rglob("*.jsonl")} == before
    assert log.prune(accepts=stale) == expected
    assert log.read(CONV, DEVICE) == [ok(1e-3, trial=1), ok(2e-3, algorithm="mec/tiled")]
    assert log.convs(DEVICE) == [CONV]  # the file with nothing left is gone
    assert log.problems == []
    assert path.stat().st_mode & 0o777 == 0o664
    assert sorted(os.listdir(path.parent)) == [".lock", path.name]
    inode = path.stat().st_ino
    assert log.prune(accepts=stale) == Pruned(kept=3)
    assert path.stat().st_ino == inode  # nothing to do, nothing rewritten


def test_prune_more_than_one_one_device_and_records_that_do_not_compete(log: Log) -> None:
    _crowd(log)
    assert log.prune(2, dry_run=True, device=DEVICE) == Pruned(kept=4, slower=1, failing=2, broken=1)
    assert log.prune(device="amd-zen5-2t") == Pruned(kept=1)
    assert log.prune(device="nowhere") == Pruned()
    assert log.prune() == Pruned(kept=4, slower=2, failing=2, broken=1)
    assert ok(0.5e-3, tvm="0.26.0") in log.read(CONV, DEVICE)  # faster, but it does not beat today's
    with pytest.raises(ValueError, match=re.escape("`keep` (=0) must be at least 1.")):
        log.prune(0)


@pytest.mark.fault("disks and folders", "pruning fails half-way")
def test_a_prune_that_fails_leaves_the_file_whole(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    _crowd(log)
    path = log.path(CONV, DEVICE)
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(LogError, match=rf"^cannot write `{path}` \(No space left on device\): free some space"):
        log.prune(device=DEVICE)
    assert path.read_bytes() == before
    assert [name for name in os.listdir(path.parent) if name.endswith(".tmp")] == []
