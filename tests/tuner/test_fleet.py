"""Fleets: workers that share one queue of candidates, and what becomes of a run when they die, hang, lie, join late or are strangers.

The tracker is TVM's, and every worker is a process. But for the last tests no kernel runs: a candidate's library is a text that says what
happens when it is measured (`worker_measures`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_processes import Processes, processes, wait_for
from paths import ROOT
from sessions import SMALL

import im2win
from im2win.common.worker_pool import WorkerError
from im2win.device.cpu import Machine
from im2win.numerics.reference import random_tensors, reference
from im2win.packing.cpu_blocked import FilterPack
from im2win.records.log import Log
from im2win.records.lookup import stale
from im2win.spec.conv2d import Conv2d
from im2win.tuner.fleet import messages, probe
from im2win.tuner.fleet.fleet import MOST_FAULTS, Fleet, FleetError
from im2win.tuner.fleet.messages import Facts, Limits, MessageError
from im2win.tuner.fleet.secret import SecretError, check_reach, is_loopback, proof, proves, read_secret
from im2win.tuner.fleet.server import Server, on_device
from im2win.tuner.fleet.task import Answer
from im2win.tuner.fleet.tracker import Tracker, TrackerError, address, checked_key
from im2win.tuner.fleet.wire import Channel, ChannelError, TooLargeError, greet, welcome
from im2win.tuner.measurement import _agreed
from im2win.tuner.runners.cpu import Candidate, Outcome, RunJob, probed

SECRET = "a secret of tests, long enough"
DEVICE = Machine("Some CPU", "znver4", "avx512f", 2, 16, 32, 32 << 10, 1 << 20, 32 << 20)
FAKE: dict[str, Any] = {"device": dataclasses.asdict(DEVICE), "runner": "worker_measures"}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers of these tests are forked")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    pytest.importorskip("tornado", reason="TVM's tracker needs tornado (extra `rpc`)")
    with processes(tmp_path_factory.mktemp("workers")) as started:
        yield started


@pytest.fixture(scope="module")
def port(started: Processes) -> int:
    return started.tracker()


_keys = itertools.count()


@pytest.fixture
def key() -> str:
    return f"test{next(_keys)}"


def gathered(port: int, key: str, workers: int = 1, **how: Any) -> Fleet:
    """A fleet, once so many workers have joined."""
    fleet = Fleet(f"127.0.0.1:{port}", key, **{"wait_s": 20.0, **how})
    wait_until(lambda: len(fleet.workers) >= workers)
    return fleet


def wait_until(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., Future[Answer]]:
    """Queues a job whose candidates' libraries are these texts."""
    names = itertools.count()

    def submit(fleet: Fleet, *texts: str, limit_s: float = 20.0, **how: Any) -> Future[Answer]:
        paths = [tmp_path / f"{next(names)}.so" for _ in texts]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        candidates = tuple(Candidate(path, FilterPack(16)) for path in paths)
        return fleet.submit(RunJob(SMALL, candidates, 0), limit_s, **how)

    return submit


Measure = Callable[..., "Future[Answer]"]


def ok_s(future: Future[Answer]) -> list[float]:
    return [one.samples_s[0] for one in future.result(30).outcomes()]


# --- the queue -------------------------------------------------------------------------------------------------------


def test_workers_share_one_queue(started: Processes, port: int, key: str, measure: Measure) -> None:
    for _ in range(2):
        started.worker(port, key, **FAKE)
    with gathered(port, key, 2) as fleet:
        assert fleet.device == DEVICE
        answers = [measure(fleet, f"ok {1e-3 * (place + 1)}", "ok 1.0") for place in range(8)]
        assert [ok_s(one) for one in answers] == [[1e-3 * (place + 1), 1.0] for place in range(8)]
        assert all(fleet.done[name] for name in fleet.workers) and not fleet.faults
        one, other = fleet.workers
        assert measure(fleet, "ok 1", only=one).result(30).worker == one
        assert measure(fleet, "ok 1", avoid=[one]).result(30).worker == other


def test_a_worker_serves_the_next_tuner(started: Processes, port: int, key: str, measure: Measure) -> None:
    started.worker(port, key, **FAKE)
    for _ in range(2):
        with gathered(port, key) as fleet:
            assert ok_s(measure(fleet, "ok 2.0")) == [2.0]


@pytest.mark.fault("fleets", "a worker joins late")
def test_a_late_worker_joins_a_run(started: Processes, port: int, key: str, measure: Measure) -> None:
    started.worker(port, key, **FAKE)
    with gathered(port, key) as fleet:
        answers = [measure(fleet, "sleep 0.3") for _ in range(12)]
        time.sleep(0.3)
        started.worker(port, key, **FAKE)
        assert len({one.result(30).worker for one in answers}) == 2


# --- faults of workers -----------------------------------------------------------------------------------------------


@pytest.mark.fault("fleets", "a worker dies")
def test_a_worker_that_dies_costs_its_job_and_not_the_run(started: Processes, port: int, key: str, measure: Measure) -> None:
    pids = [started.worker(port, key, **FAKE)[0] for _ in range(2)]
    with gathered(port, key, 2) as fleet:
        answers = [measure(fleet, "sleep 0.2") for _ in range(6)]
        time.sleep(0.1)
        started.kill(pids[0])
        assert [ok_s(one) for one in answers] == [[1e-3]] * 6 and sum(fleet.faults.values()) == 1
        assert len(fleet.workers) == 1


@pytest.mark.fault("fleets", "a job that workers die of")
def test_a_job_that_workers_die_of_is_given_up(started: Processes, port: int, key: str, measure: Measure, tmp_path: Path) -> None:
    """It goes behind the others, and costs so many workers."""
    (count := tmp_path / "deaths").touch()
    for _ in range(MOST_FAULTS):
        started.worker(port, key, **FAKE)
    with gathered(port, key, MOST_FAULTS) as fleet:
        fatal, others = measure(fleet, f"unplug 99 {count}"), [measure(fleet, "sleep 0.1") for _ in range(12)]
        assert [ok_s(one) for one in others] == [[1e-3]] * 12
        with pytest.raises(WorkerError, match="3 workers failed with it, the last one since") as caught:
            fatal.result(30).outcomes()
        assert caught.value.killed and count.stat().st_size == MOST_FAULTS, "it says nothing of the candidate"
        started.worker(port, key, **FAKE)
        assert ok_s(measure(fleet, "ok 1.0")) == [1.0]


@pytest.mark.fault("fleets", "machines are taken away at random")
def test_workers_lost_by_chance_count_against_no_job(started: Processes, port: int, key: str, measure: Measure, tmp_path: Path) -> None:
    """Two jobs lose a worker each and are finished by others, so a third one may lose two more than `MOST_FAULTS` allows."""
    counts, times = [tmp_path / name for name in ("one", "two", "unlucky")], [1, 1, MOST_FAULTS + 1]
    for count in counts:
        count.touch()
    started.worker(port, key, **FAKE)
    with gathered(port, key) as fleet:
        first = measure(fleet, "sleep 1.0")  # all of them are queued meanwhile
        answers = [measure(fleet, f"unplug {often} {count}") for often, count in zip(times, counts, strict=True)]
        for lost in range(1, sum(times) + 1):
            wait_until(lambda lost=lost: sum(fleet.faults.values()) == lost)  # type: ignore[misc]
            started.worker(port, key, **FAKE)
        assert [ok_s(one) for one in (first, *answers)] == [[1e-3]] * 4
        assert [count.stat().st_size for count in counts] == times and fleet.by_chance == sum(times)


@pytest.mark.fault("fleets", "a worker hangs")
def test_a_worker_that_is_stopped_is_given_up(started: Processes, port: int, key: str, measure: Measure) -> None:
    """It hangs with its connection open. When it goes on, its answer is nobody's."""
    pids = [started.worker(port, key, **FAKE)[0] for _ in range(2)]
    with gathered(port, key, 2, silence_s=1.5) as fleet:
        answers = [measure(fleet, "sleep 0.2") for _ in range(4)]
        time.sleep(0.1)
        started.kill(pids[0], signal.SIGSTOP)
        assert [ok_s(one) for one in answers] == [[1e-3]] * 4 and sum(fleet.faults.values()) == 1
        started.kill(pids[0], signal.SIGCONT)
        wait_until(lambda: len(fleet.workers) == 2)
        assert ok_s(measure(fleet, "ok 1.0")) == [1.0]


@pytest.mark.fault("fleets", "a worker lies")
def test_a_worker_that_lies_is_found_out_and_dropped(
    started: Processes, port: int, key: str, measure: Measure, caplog: pytest.LogCaptureFixture
) -> None:
    """Its outputs are checked here, at pixels that it does not know before. Nothing that it says is kept."""
    started.worker(port, key, **FAKE)
    _, log = started.worker(port, key, **FAKE, environment={"BEHAVIOUR": "lie"})
    with caplog.at_level(logging.WARNING, "im2win.fleet"), gathered(port, key, 2) as fleet:
        answers = []
        while max(fleet.faults.values(), default=0) < MOST_FAULTS:
            answers.append(measure(fleet, "sleep 0.05"))
            time.sleep(0.05)
        assert {ok_s(one)[0] for one in answers} == {1e-3}
        assert len({one.result().worker for one in answers}) == 1, "the liar's answers are none"
        wait_for(f"it was dropped after {MOST_FAULTS} faults", log)
    assert "it calls a candidate right, and its output differs from the reference by" in caplog.text


@pytest.mark.fault("fleets", "a worker accuses right candidates")
def test_a_worker_that_accuses_is_contradicted(started: Processes, port: int, key: str, measure: Measure) -> None:
    """What speaks against a candidate counts when a second worker finds the same."""
    started.worker(port, key, **FAKE, environment={"BEHAVIOUR": "accuse"})
    with gathered(port, key) as fleet:
        [accuser] = fleet.workers
        started.worker(port, key, **FAKE)
        wait_until(lambda: len(fleet.workers) == 2)
        answers = [measure(fleet, "ok 1.0") for _ in range(6)]
        assert [ok_s(one) for one in answers] == [[1.0]] * 6 and fleet.faults[accuser] >= 1
        assert measure(fleet, "wrong").result(30).outcomes()[0].outcome == "wrong"


@pytest.mark.fault("fleets", "a worker answers with rubbish")
def test_an_answer_that_is_none_is_a_fault(started: Processes, port: int, key: str, measure: Measure) -> None:
    started.worker(port, key, **FAKE)
    started.worker(port, key, **FAKE, environment={"BEHAVIOUR": "rubbish"})
    with gathered(port, key, 2) as fleet:
        assert [ok_s(one) for one in [measure(fleet, "sleep 0.1") for _ in range(4)]] == [[1e-3]] * 4
        assert sum(fleet.faults.values()) >= 1


@pytest.mark.fault("fleets", "all workers are gone")
def test_without_workers_a_run_ends_and_says_what_to_do(started: Processes, port: int, key: str, measure: Measure) -> None:
    pid, _ = started.worker(port, key, **FAKE)
    with gathered(port, key, wait_s=2.0) as fleet:
        answer = measure(fleet, "sleep 5")
        time.sleep(0.2)
        started.kill(pid)
        with pytest.raises(FleetError, match=f"no worker with key .*{key}.* for 2 s: start one with `im2win worker --tracker 127.0.0.1:"):
            answer.result(30)
        with pytest.raises(FleetError):
            measure(fleet, "ok 1").result(30)
    with pytest.raises(FleetError, match="start one with `im2win worker"):
        Fleet(f"127.0.0.1:{port}", "nobody", wait_s=0.3)


# --- faults of candidates --------------------------------------------------------------------------------------------


def test_candidates_that_crash_or_hang_cost_no_worker(started: Processes, port: int, key: str, measure: Measure) -> None:
    for _ in range(2):
        started.worker(port, key, **FAKE)
    with gathered(port, key, 2) as fleet:
        crashed, hung = measure(fleet, "crash"), measure(fleet, "hang", limit_s=1.0)
        with pytest.raises(WorkerError, match="signal SIGSEGV") as caught:
            crashed.result(30).outcomes()
        assert caught.value.kind == "crashed"
        with pytest.raises(WorkerError, match="no result within 1 s") as caught:
            hung.result(30).outcomes()
        assert caught.value.kind == "timeout" and not fleet.faults
        assert ok_s(measure(fleet, "ok 1.0")) == [1.0] and len(fleet.workers) == 2


def test_the_workers_time_limit_holds_whatever_the_tuner_says(started: Processes, port: int, key: str, measure: Measure) -> None:
    started.worker(port, key, **FAKE, limits={"job_s": 1.0})
    with gathered(port, key) as fleet, pytest.raises(WorkerError, match="no result within 1 s"):
        measure(fleet, "hang", limit_s=500.0).result(30).outcomes()


# --- who may talk to whom --------------------------------------------------------------------------------------------


@pytest.mark.fault("fleets", "a worker of another device")
def test_device_models_never_mix(started: Processes, port: int, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two models are two keys at the tracker; of one model but for a smaller cache, the second worker is refused and told so."""
    other = {**FAKE, "device": {**FAKE["device"], "brand": "Other CPU"}}
    started.worker(port, key, **FAKE)
    with gathered(port, key) as fleet, caplog.at_level(logging.WARNING, "im2win.fleet"):
        _, log = started.worker(port, key, **{**FAKE, "device": {**FAKE["device"], "l3_bytes": 1 << 20}})
        wait_for("has other properties", log)
        started.worker(port, key, **other)
        wait_until(lambda: "is refused: its some-znver4-2t has other properties" in caplog.text)
        time.sleep(0.5)
        assert len(fleet.workers) == 1
    with pytest.raises(FleetError, match=r"several device models \(other-znver4-2t, some-znver4-2t\).*name one with --device"):
        Fleet(f"127.0.0.1:{port}", key, wait_s=5.0)
    with gathered(port, key, device="other-znver4-2t") as fleet:
        assert fleet.device.brand == "Other CPU"


@pytest.mark.fault("fleets", "a tuner with another secret")
def test_a_secret_opens_both_sides(started: Processes, port: int, key: str, measure: Measure, caplog: pytest.LogCaptureFixture) -> None:
    _, log = started.worker(port, key, **FAKE, secret=SECRET)
    with caplog.at_level(logging.WARNING, "im2win.fleet"):
        for wrong in (b"another secret of the tests", b""):
            with pytest.raises(FleetError, match="was refused: the worker refuses this tuner: it has another secret"):
                Fleet(f"127.0.0.1:{port}", key, secret=wrong, wait_s=10.0)
    wait_for("what connected does not know the secret", log)
    with gathered(port, key, secret=SECRET.encode()) as fleet:
        assert ok_s(measure(fleet, "ok 1.0")) == [1.0]


@pytest.mark.fault("fleets", "an upload that is too large")
def test_too_large_an_upload_is_refused_before_it_is_read(started: Processes, port: int, key: str, measure: Measure) -> None:
    """By the tuner, which knows the limit; and by the worker, where a tuner does not care. It goes on afterwards."""
    _, log = started.worker(port, key, **FAKE, limits={"upload_bytes": 4000})
    said = "was refused: it takes 4000 bytes at once, and the job has 50000: give it a higher --upload-limit"
    with gathered(port, key, wait_s=2.0) as fleet, pytest.raises(FleetError, match=said):
        measure(fleet, "ok 1.0" + " " * 49_994).result(30)
    tracker = Tracker(("127.0.0.1", port))
    full = f"{key}/{FAKE_NAME}"
    tracker.request(full)
    found = tracker.granted(20)
    tracker.close()
    assert found is not None
    with socket.create_connection(found[:2], 10) as sock:
        channel = greet(sock, full, found[2], b"", 1 << 20)
        channel.receive(10)
        sock.sendall(struct.pack(">Q", 1 << 50))
        with pytest.raises(ChannelError, match=r"closed|broke"):
            while True:
                assert "exceeds the limit of 4000 bytes" in channel.receive(10)[0]["refused"]
    wait_for("a message of 1125899906842624 bytes exceeds the limit of 4000 bytes", log)
    with gathered(port, key) as fleet:
        assert ok_s(measure(fleet, "ok 1.0")) == [1.0]


FAKE_NAME = DEVICE.name


@pytest.mark.fault("fleets", "a problem that is too large")
def test_a_problem_beyond_a_workers_memory_is_refused(started: Processes, port: int, key: str, measure: Measure) -> None:
    started.worker(port, key, **FAKE, limits={"tensor_bytes": 1000})
    with gathered(port, key, wait_s=1.0) as fleet, pytest.raises(FleetError, match="take 20096 bytes, and this worker takes up to 1000"):
        measure(fleet, "ok 1.0").result(30)


@pytest.mark.fault("fleets", "strangers connect")
def test_strangers_do_not_disturb_a_worker(started: Processes, port: int, key: str, measure: Measure) -> None:
    """A port scanner, TVM's own client, one without a valid match key, and one that takes the worker from the tracker and never comes."""
    _, log = started.worker(port, key, **FAKE, secret=SECRET)
    full, tracker = f"{key}/{FAKE_NAME}", Tracker(("127.0.0.1", port))
    tracker.request(full)
    found = tracker.granted(20)
    assert found is not None
    where = found[:2]
    with socket.create_connection(where) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_for("does not speak TVM's RPC", log)
    with socket.create_connection(where) as sock, pytest.raises(ChannelError, match="refuses this tuner"):
        greet(sock, full, f"{full}:0.5", SECRET.encode(), 1000)
    wait_for("has no valid match key", log)
    with socket.create_connection(where) as sock:
        words = f"client:{found[2]}".encode()
        sock.sendall(struct.pack("<ii", 0xFF271, len(words)) + words)
        assert struct.unpack("<i", sock.recv(4)) == (0xFF271 + 2,)  # TVM's client says: key mismatch
    with socket.create_connection(where) as sock:
        sock.sendall(struct.pack("<ii", 0xFF271, 1 << 30))
        wait_for("a greeting is too long", log)
    tracker.close()
    with gathered(port, key, secret=SECRET.encode()) as fleet:  # the match key that was taken and not used is replaced
        assert ok_s(measure(fleet, "ok 1.0")) == [1.0]


@pytest.mark.fault("fleets", "the tracker goes")
def test_a_tracker_that_goes_leaves_a_run_alone(started: Processes, key: str, measure: Measure) -> None:
    port = started.tracker()
    pid = started.pids[-1]
    started.worker(port, key, **FAKE)
    with gathered(port, key) as fleet:
        started.kill(pid)
        time.sleep(0.3)
        assert ok_s(measure(fleet, "ok 1.0")) == [1.0]
    with pytest.raises(TrackerError, match=r"cannot be reached .*`python -m tvm.exec.rpc_tracker` starts one"):
        Fleet(f"127.0.0.1:{port}", key)


# --- beyond loopback -------------------------------------------------------------------------------------------------


def test_beyond_loopback_a_secret_is_needed() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("192.0.2.1") and not is_loopback("no such host")
    check_reach("192.0.2.1", b"secret", "`host`")
    for make in (
        lambda: Server(DEVICE, "k", ("127.0.0.1", 9190), host="0.0.0.0"),
        lambda: Fleet("192.0.2.1:9190", "k"),
    ):
        with pytest.raises(SecretError, match="lies beyond loopback, where a worker and a tuner need a shared secret"):
            make()


def test_secrets_are_long_and_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IM2WIN_SECRET", raising=False)
    assert read_secret() == b""
    monkeypatch.setenv("IM2WIN_SECRET", "short")
    with pytest.raises(SecretError, match=r"in IM2WIN_SECRET \(5 bytes\) must have at least 16 bytes"):
        read_secret()
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o644)
    with pytest.raises(SecretError, match="must be closed to other users: chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == SECRET.encode()
    with pytest.raises(SecretError, match="cannot be read"):
        read_secret(tmp_path / "missing")


# --- messages --------------------------------------------------------------------------------------------------------


def _pair(ours: bytes = b"s", theirs: bytes = b"s", limit: int = 1000) -> tuple[Any, Any]:
    """Both ends of a greeting: a channel, or the error that it ended in."""
    one, other = socket.socketpair()
    ends: list[Any] = [None, None]

    def run(place: int, what: Callable[..., Channel], sock: socket.socket, secret: bytes) -> None:
        try:
            ends[place] = what(sock, "k", "k:random", secret, limit)
        except ChannelError as error:
            sock.close()
            ends[place] = error

    thread = threading.Thread(target=run, args=(1, welcome, other, theirs))
    thread.start()
    run(0, greet, one, ours)
    thread.join()
    return ends[0], ends[1]


def test_frames_are_checked() -> None:
    tuner, worker = _pair()
    tuner.send({"do": "x"}, [b"abc", b""])
    assert worker.receive(1) == ({"do": "x"}, [b"abc", b""])
    worker.send({"a": 1})
    assert tuner.receive(1) == ({"a": 1}, [])
    with pytest.raises(ChannelError, match="nothing came in time"):
        tuner.receive(0.05)
    tuner.send({}, [b"x" * 2000])
    with pytest.raises(TooLargeError, match="exceeds the limit of 1000 bytes"):
        worker.receive(1)
    for end in (tuner, worker):
        end.close()


@pytest.mark.fault("fleets", "messages that were altered, repeated or reflected")
@pytest.mark.parametrize("change", ["flip", "repeat", "reflect"])
def test_a_frame_that_was_altered_repeated_or_sent_back_is_refused(change: str) -> None:
    tuner, worker = _pair()
    tuner.send({"do": "measure"})
    sent = worker._sock.recv(1000)
    for end in (tuner, worker):
        end.close()
    one, other = socket.socketpair()
    again = Channel(other, worker._sends, worker._receives, 1000)
    if change == "reflect":
        again = Channel(other, tuner._sends, tuner._receives, 1000)
    one.sendall(sent if change != "flip" else sent[:-1] + bytes([sent[-1] ^ 1]))
    if change == "repeat":
        again.receive(1)
        one.sendall(sent)
    with pytest.raises(ChannelError, match="altered"):
        again.receive(1)
    one.close()
    again.close()


@pytest.mark.parametrize("content", [
    b"", b"\0\0", b"\0\0\0\x09{}", b"\0\0\0\x02[]", b"\0\0\0\x02{}", b"\0\0\0\x05{x:1}",
    b'\0\0\0\x0e{"blobs": [1]}', b'\0\0\0\x0f{"blobs": [-1]}', b"\0\x01\x86\xa0" + b"[" * 100_000,
])  # fmt: skip
def test_content_that_is_no_message_is_refused(content: bytes) -> None:
    from im2win.tuner.fleet.wire import _split

    with pytest.raises(ChannelError):
        _split(content)


def test_both_sides_of_a_greeting_must_know_the_secret() -> None:
    tuner, worker = _pair(b"one", b"other")
    assert "another secret" in str(tuner) and "does not know the secret" in str(worker)
    assert proves(proof(b"s", "tuner", "m", "n"), b"s", "tuner", "m", "n")
    for changed in (("t", "tuner", "m", "n"), ("s", "worker", "m", "n"), ("s", "tuner", "x", "n"), ("s", "tuner", "m", "x")):
        assert not proves(proof(b"s", "tuner", "m", "n"), changed[0].encode(), *changed[1:])


@pytest.mark.fault("fleets", "an impostor for a worker")
def test_a_worker_that_cannot_prove_itself_gets_nothing() -> None:
    one, other = socket.socketpair()

    def impostor() -> None:
        other.recv(1000)
        answer = b"server:k -proof=" + b"0" * 64
        other.sendall(struct.pack("<ii", 0xFF271, len(answer)) + answer)

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ChannelError, match="does not prove that it knows the secret"):
        greet(one, "k", "k:random", b"secret", 1000)
    thread.join()
    one.close()
    other.close()


def _job(tmp_path: Path) -> tuple[RunJob, dict[str, Any]]:
    job = RunJob(SMALL, (Candidate(tmp_path / "1.so", FilterPack(16)),), 0, probe=((0, 1, 2),))
    return job, messages.job_message(job, [b"library"], 5.0)


def test_a_job_arrives_as_it_was_sent(tmp_path: Path) -> None:
    job, message = _job(tmp_path)
    found, limit_s = messages.read_job(message, [b"library"], tmp_path, Limits(job_s=3.0))
    assert limit_s == 3.0 and found.probe == job.probe and found.give_up_s == job.give_up_s
    assert found.conv == SMALL and found.candidates[0].pack == FilterPack(16) and found.candidates[0].path.parent == tmp_path
    assert found.candidates[0].path.read_bytes() == b"library"


@pytest.mark.parametrize(("change", "said"), [
    ({"conv": "n1"}, "key"), ({"conv": 5}, "must be a string"), ({"seed": -1}, "out of range"), ({"samples": 1 << 40}, "out of range"),
    ({"seconds": 1e9}, "out of range"), ({"limit_s": -1.0}, "out of range"), ({"limit_s": "x"}, "a finite number"),
    ({"probe": [[0, 0, 99]]}, "pixels"), ({"probe": [[0, 0]]}, "pixels"), ({"probe": [["a"]]}, "an integer"), ({"more": 1}, "must hold"),
    ({"candidates": []}, "1 to 64"), ({"candidates": [5]}, "must hold"), ({"conv": "n999999-c8x10x10-k16x3x3"}, "takes up to"),
])  # fmt: skip
def test_a_job_that_breaks_a_rule_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    _, message = _job(tmp_path)
    with pytest.raises(MessageError, match=said):
        messages.read_job({**message, **change}, [b"library"], tmp_path, Limits())


@pytest.mark.parametrize(("change", "said"), [
    ({"sha256": "0" * 64}, "not the one that its job names"), ({"accuracy": "any"}, "accuracy"), ({"workspace_bytes": -1}, "from 0 to"),
    ({"pack": {"kind": "pickle"}}, "must be of a kind"), ({"pack": []}, "an object"), ({"pack": {"kind": "filters", "block": ""}}, "block"),
])  # fmt: skip
def test_a_candidate_that_breaks_a_rule_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    _, message = _job(tmp_path)
    message["candidates"] = [{**message["candidates"][0], **change}]
    with pytest.raises(MessageError, match=said):
        messages.read_job(message, [b"library"], tmp_path, Limits())


def test_an_answer_arrives_as_it_was_sent(tmp_path: Path) -> None:
    job, _ = _job(tmp_path)
    sent = Outcome("ok", "", 1e-7, [1e-3, 2e-3], np.arange(16.0).reshape(1, 16))
    [found] = messages.read_answer(*messages.answer_message([sent]), job)
    assert found.samples_s == sent.samples_s and found.error == sent.error and np.array_equal(found.probed, sent.probed)


@pytest.mark.parametrize(("change", "said"), [
    ({"outcome": "splendid"}, "ok or wrong"), ({"samples_s": []}, "times"), ({"samples_s": [1e-12]}, "times"),
    ({"samples_s": ["1"]}, "number"),
    ({"error": None}, "tolerance"), ({"error": 1.0}, "tolerance"), ({"error": -1.0}, "at least 0"), ({"message": None}, "a string"),
    ({"more": 1}, "must hold"),
])  # fmt: skip
def test_an_answer_that_breaks_a_rule_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    job, _ = _job(tmp_path)
    message, blobs = messages.answer_message([Outcome("ok", "", 1e-7, [1e-3], np.zeros((1, 16)))])
    message["outcomes"] = [{**message["outcomes"][0], **change}]
    with pytest.raises(MessageError, match=said):
        messages.read_answer(message, blobs, job)
    with pytest.raises(MessageError):
        messages.read_answer(message, [b"123"], job)
    with pytest.raises(MessageError, match="as many outcomes"):
        messages.read_answer({"outcomes": []}, [], job)


@pytest.mark.parametrize(("change", "said"), [
    ({"protocol": 2}, "protocol 2"), ({"target": "tpu"}, "tpu"), ({"code": "other"}, "install the same"), ({"device": {}}, "must hold"),
    ({"device": {"mcpu": "x; rm"}}, "device.mcpu"), ({"device": {"brand": "a\nb"}}, "device.brand"), ({"device": {"threads": 0}}, "above"),
    ({"device": {"mcpu": "../up"}}, "device.mcpu"), ({"limits": {"job_s": "long"}}, "limits"), ({"device": {"lanes": 1.5}}, "an integer"),
])  # fmt: skip
def test_facts_that_break_a_rule_are_refused(change: dict[str, Any], said: str) -> None:
    facts = dataclasses.asdict(Facts.of(DEVICE, Limits()))
    assert Facts.read(facts) == (DEVICE, Limits())
    for name, value in change.items():
        facts[name] = {**facts[name], **value} if isinstance(value, dict) and value else value
    with pytest.raises(MessageError, match=said):
        Facts.read(facts)


# --- the tuner's own check -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conv", [
    SMALL, SMALL.with_(padding=(2, 1, 0, 3), stride=(2, 1), dilation=(1, 2), layout="NHWC", bias=True, residual=True, activation="relu"),
    Conv2d(3, 8, 9, 7, 12, (3, 2), padding=1, groups=4, bias=True, activation="silu"), Conv2d(2, 6, 5, 5, 6, 3, padding=(1, 1), groups=6),
], ids=str)  # fmt: skip
def test_the_check_knows_right_outputs_from_wrong_ones(conv: Conv2d) -> None:
    tensors = random_tensors(conv, 3)
    given = {name: tensors[name] for name in ("bias", "residual") if name in tensors}
    expected = reference(conv, tensors["data"], tensors["filter"], **given)
    checked, pixels = probe.Probe(conv, 3, "cpu"), probe.draw(conv)
    right = probed(expected.astype(np.float32), conv, pixels).astype(np.float64)
    assert checked.wrong(pixels, right, "float32") is None
    for wrong in (np.roll(right, 1), right * 1.01, np.full_like(right, np.nan), right + (right == right.max()), np.zeros_like(right)):
        assert "differs from the reference" in str(checked.wrong(pixels, wrong, "float32"))
    assert "others came" in str(checked.wrong(pixels, right[:, 1:], "float32"))
    assert probe.draw(conv) != probe.draw(conv)


@pytest.mark.parametrize("conv", [
    Conv2d(2, 8, 6, 6, 16, 3, padding=1, dtype="float16", bias=True, activation="relu"),
    Conv2d(2, 8, 6, 6, 16, 3, padding=1, dtype="int8", layout="NHWC", bias=True),
    Conv2d(2, 8, 6, 6, 16, 3, dtype="int8", out_dtype="int8", residual=True, activation="relu"),
], ids=str)  # fmt: skip
def test_the_check_knows_what_gpus_compute(conv: Conv2d) -> None:
    """Of the tensors that a GPU's runner makes, with its own reference."""
    torch = pytest.importorskip("torch")
    from im2win.tuner.runners import cuda

    expected, _ = cuda.reference(conv, cuda.device_tensors(conv, 1, "cpu"))
    output = expected.to(getattr(torch, conv.out_dtype))
    pixels = probe.draw(conv)
    values = probed(output, conv, pixels).double().numpy()
    checked = probe.Probe(conv, 1, "cuda")
    assert checked.wrong(pixels, values, "float32") is None
    assert checked.wrong(pixels, np.roll(values, 1), "float32") is not None


def test_times_that_two_workers_do_not_agree_on_are_the_slower_ones() -> None:
    fast, slow, like = (Outcome("ok", "", 1e-7, [seconds] * 3) for seconds in (1e-9, 2e-3, 2.2e-3))
    assert _agreed(fast, slow) is slow and _agreed(slow, fast) is slow
    assert _agreed(slow, like).samples_s == slow.samples_s + like.samples_s
    assert _agreed(slow, Outcome("wrong", "9")).outcome == "wrong"


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "said"), [
    (lambda: address("nowhere"), r"`tracker` \(='nowhere'\) must be HOST:PORT"), (lambda: address("h:0"), "HOST:PORT"),
    (lambda: checked_key("a b"), r"`key` \(='a b'\) must be letters"), (lambda: checked_key("a/b"), "letters"),
    (lambda: on_device("tpu"), "must be cpu, cuda or cuda:N"), (lambda: on_device("cpu:1"), "must be cpu, cuda or cuda:N"),
    (lambda: im2win.tune(SMALL, tracker="127.0.0.1:1", threads=2), "im2win worker --threads"),
    (lambda: im2win.tune(SMALL, "tpu", tracker="127.0.0.1:1"), "`target`"),
])  # fmt: skip
def test_bad_arguments_are_named(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_an_ipv6_tracker_has_brackets() -> None:
    assert address("[::1]:9190") == ("::1", 9190)


@pytest.mark.parametrize(("words", "said"), [
    (["worker", "--tracker", "nowhere"], "`tracker` (='nowhere') must be HOST:PORT"),
    (["worker", "--tracker", "127.0.0.1:1", "--host", "0.0.0.0"], "`host` (='0.0.0.0') lies beyond loopback"),
    (["worker", "--tracker", "127.0.0.1:1", "--device", "gpu"], "`device` (='gpu') must be cpu, cuda or cuda:N."),
    (["worker", "--tracker", "127.0.0.1:1", "--key", "a b"], "`key` (='a b') must be letters"),
    (["tune", str(SMALL), "--tracker", "127.0.0.1:1"], "the tracker 127.0.0.1:1 cannot be reached"),
    (["tune", str(SMALL), "--tracker", "192.0.2.1:1"], "`tracker` (='192.0.2.1') lies beyond loopback"),
])  # fmt: skip
def test_bad_options_are_one_line(command: Callable[..., Any], words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IM2WIN_SECRET", raising=False)
    done = command(*words)
    assert done.status == 2 and done.err.splitlines()[-1].startswith(f"im2win: {said}"), done.err


# --- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.fault("fleets", "two workers die and one lies in a run with kernels")
def test_a_run_survives_two_dead_workers_and_a_liar(started: Processes, port: int, key: str, tmp_path: Path) -> None:
    """Four workers with real kernels. Two are killed and one lies in mid-run: no trial is lost, and nothing that the liar says is kept."""
    honest = [started.worker(port, key)[0] for _ in range(3)]
    trials, lock = 0, threading.Lock()

    def misfortune(state: im2win.tuner.session.Progress) -> None:
        nonlocal trials
        with lock:
            trials = max(trials, state.trial)
        if state.trial == 2 and len(honest) == 3:
            started.worker(port, key, runner="worker_lies")
            started.kill(honest.pop())
        if state.trial == 4 and len(honest) == 2:
            started.kill(honest.pop())

    record = im2win.tune(SMALL, trials=10, logs=tmp_path, tracker=f"127.0.0.1:{port}", key=key, progress=misfortune)
    records = Log(tmp_path).read(SMALL, Machine.host().name)
    assert {one.trial for one in records} == set(range(10)) and len(honest) == 1
    assert [f"{one.outcome}: {one.message}" for one in records if one.outcome != "ok"] == [], "no verdict on a candidate"
    assert min(min(one.samples_s) for one in records) > 1e-8, "no lie"
    assert record.outcome == "ok" and not any(stale(one) for one in records) and not Log(tmp_path).problems
    assert im2win.build(SMALL, logs=tmp_path).tuned


def test_the_commands_of_the_guide(
    port: int, key: str, tmp_path: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker and a tuner that share a file with a secret. The worker leaves nothing behind when it is told to end."""
    monkeypatch.delenv("IM2WIN_SECRET", raising=False)
    secret, temporary = tmp_path / "secret", tmp_path / "temporary"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    temporary.mkdir()
    options = ["--tracker", f"127.0.0.1:{port}", "--key", key, "--secret-file", str(secret)]
    worker = subprocess.Popen(
        [sys.executable, "-m", "im2win", "worker", *options, "--threads", "1"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temporary)},
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        name = Machine.host(1).name
        assert worker.stdout.readline().startswith(f"{key}/{name} listens on 127.0.0.1:")
        done = command("tune", str(SMALL), "--trials", "2", "--logs", str(tmp_path / "logs"), "--json", *options)
        assert done.status == 0, done.err
        [layer] = json.loads(done.out)["layers"]
        assert layer["device"] == name and layer["failed"] is None and len(Log(tmp_path / "logs").read(SMALL, name)) >= 2
    finally:
        worker.terminate()
        assert worker.wait(30) == 143
        worker.stdout.close()
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_more_workers_take_less_time(started: Processes, port: int, key: str, measure: Measure) -> None:
    """Where measuring is what takes time: 24 jobs of a quarter of a second."""
    seconds = {}
    for count in (1, 2, 4):
        while len(started.pids_of.get(key, [])) < count:
            started.worker(port, key, **FAKE)
        with gathered(port, key, count) as fleet:
            for name in fleet.workers:  # their processes are there
                measure(fleet, "ok 1.0", only=name).result(30)
            began = time.monotonic()
            for one in [measure(fleet, "sleep 0.25") for _ in range(24)]:
                one.result(60)
            seconds[count] = time.monotonic() - began
    print(f"seconds by workers: {seconds}")
    assert seconds[1] / seconds[2] >= 1.8 and seconds[1] / seconds[4] >= 3.2


@pytest.mark.fault("fleets", "workers die, hang and lie at random")
@pytest.mark.slow
def test_a_fleet_in_chaos_does_every_job_once(started: Processes, port: int, key: str, measure: Measure) -> None:
    """Workers are killed and stopped at random, liars among them, and others take their places: every job has its right result."""
    rng = np.random.default_rng(11)
    behaviours = ["", "", "", "lie", "rubbish"]
    alive = [started.worker(port, key, **FAKE)[0] for _ in range(3)]
    with gathered(port, key, 3, silence_s=1.5, wait_s=60.0) as fleet:
        answers = [measure(fleet, f"ok {1 + place}" if place % 5 else "sleep 0.1") for place in range(400)]
        killed = 0
        while not all(one.done() for one in answers):
            time.sleep(0.2)
            if killed < 20:
                victim = alive.pop(int(rng.integers(len(alive))))
                started.kill(victim, signal.SIGKILL if rng.random() < 0.7 else signal.SIGSTOP)
                killed += 1
                behaviour = behaviours[int(rng.integers(len(behaviours)))]
                alive.append(started.worker(port, key, **FAKE, environment={"BEHAVIOUR": behaviour})[0])
            elif killed == 20:
                alive.append(started.worker(port, key, **FAKE)[0])
                killed += 1
        assert [ok_s(one)[0] for one in answers] == [1.0 + place if place % 5 else 1e-3 for place in range(400)]
        print(f"{killed - 1} workers killed or stopped; faults {sum(fleet.faults.values())}; jobs {sum(fleet.done.values())}")
