"""Faults: what goes wrong while tuning, injected one by one. More are in other files; `tests/faults.py` lists all that are marked `fault`.

After each fault no record is lost, no wrong one is kept, nothing is left behind, and a message says what happened and what to do.
"""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import tvm_ffi
from paths import ROOT, SUPPORT
from sessions import SMALL, names, took

import im2win
from im2win.codegen.llvm import ToolchainError
from im2win.common.locking import LogError
from im2win.common.temporary import TemporaryFolder
from im2win.common.torch_import import BEGIN
from im2win.common.worker_pool import MachineError, Worker, WorkerError
from im2win.device.cpu import Machine
from im2win.device.gpu import H200
from im2win.records.log import Log
from im2win.records.record import SCHEMA, Record
from im2win.registry.cpu_backend import CpuBackend
from im2win.registry.cuda_backend import CudaBackend
from im2win.registry.interface import Kernel
from im2win.tuner import build_worker
from im2win.tuner.baseline import Baseline, measure_batch
from im2win.tuner.build_worker import BuildJob, Built
from im2win.tuner.cost_model import Choice
from im2win.tuner.measurement import Measurement
from im2win.tuner.pool import Pool
from im2win.tuner.runners import cuda
from im2win.tuner.runners.check import ROUNDS
from im2win.tuner.runners.cpu import Bench, Measurer, Outcome, RunJob
from im2win.tuner.session import MOST_UNDECIDED, Session

DEVICE = Machine("Some CPU", "znver4", "avx512f", 2, 16, 32, 32 << 10, 1 << 20, 32 << 20)


# --- sessions of which nothing runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranking() -> Any:
    session = Session(SMALL, names(), DEVICE, Log("a folder that nobody makes"), 4, 0)
    found: dict[str, list[tuple[float, Any]]] = {name: [] for name in names()}
    for choice in session.search.all:
        found[choice.algorithm].append((choice.cycles, choice.tile))
    return found


@pytest.fixture
def session(tmp_path: Path, ranking: Any) -> Callable[[], Session]:
    """Sessions on one log, as consecutive processes have them."""
    return lambda: Session(SMALL, names(), DEVICE, Log(tmp_path / "log"), 20, 0, ranking=ranking)


def records(tmp_path: Path) -> list[Record]:
    log = Log(tmp_path / "log")
    found = log.read(SMALL, DEVICE.name)
    assert not log.problems
    return found


KILLED = WorkerError("crashed", "the process ended with signal SIGKILL", killed=True)


def measured(session: Session, call: Any, builders: list[Any] | None = None) -> Measurement:
    """A measurement whose process answers with what `call` returns; without `builders` every candidate is built."""
    runner = SimpleNamespace(call=call, close=lambda: None)
    measurement = Measurement(session, SimpleNamespace(builders=builders or [], runner=runner, fleet=None))  # type: ignore[arg-type]
    for choice in session.search.all:
        measurement.libraries[choice.key] = Path(measurement.folder.name) / "1.so"
        measurement.kernels[choice.key] = Kernel(0, "0" * 16)
    return measurement


def right(job: RunJob, limit_s: float) -> list[Outcome]:
    return [Outcome("ok", error=0.0, samples_s=[1e-3] * job.samples) for _ in job.candidates]


@pytest.mark.fault("processes", "the measuring process is killed each time")
def test_a_measuring_process_that_is_killed_is_no_verdict(tmp_path: Path, session: Callable[[], Session]) -> None:
    """Memory is short, say: the system kills it again and again. The candidate is not recorded, and the next session tries it."""
    first = session()

    def killed(job: RunJob, limit_s: float) -> list[Outcome]:
        raise KILLED

    good, unlucky = first.search.all[:2]
    took(first, good, 1e-3)
    measurement = measured(first, killed)
    [outcome] = measurement.run([unlucky])
    assert outcome.undecided
    first.record(unlucky, outcome, measurement.kernels[unlucky.key])
    measurement.close()
    assert [one.outcome for one in records(tmp_path)] == ["ok"] and first.outcomes["undecided"] == 1
    assert unlucky.key not in {choice.key for choice, _ in session().tried}
    assert unlucky.key in {choice.key for choice, _ in first.tried}, "not again in this session"


@pytest.mark.fault("processes", "the measuring process is killed in the finals")
def test_finals_that_are_killed_change_no_record(tmp_path: Path, session: Callable[[], Session]) -> None:
    """The first process of the finals measures, and the second one is killed each time: what the first found counts."""
    one = session()
    choices = one.search.all[:3]
    for choice in choices:
        took(one, choice, 2e-3)
    calls = iter([right, None, None, None, None])

    def call(job: RunJob, limit_s: float) -> list[Outcome]:
        if (answer := next(calls)) is None:
            raise KILLED
        return answer(job, limit_s)

    measurement = measured(one, call)
    outcomes = measurement.run_finals(choices, samples=4, seconds=0.1)
    measurement.close()
    assert [found.samples_s for found in outcomes] == [[1e-3] * 2] * 3
    measurement = measured(one, lambda job, limit_s: (_ for _ in ()).throw(KILLED))
    for choice, outcome in zip(choices, measurement.run_finals(choices, samples=4, seconds=0.1), strict=True):
        one.record(choice, outcome, measurement.kernels[choice.key], again=True)
    measurement.close()
    assert [found.seconds for found in records(tmp_path)] == [2e-3] * 3 and one.best is not None and one.best[1] == pytest.approx(2e-3)


@pytest.mark.fault("processes", "a builder is killed")
def test_a_builder_that_is_killed_is_no_verdict(session: Callable[[], Session]) -> None:
    one = session()
    measurement = measured(one, right)
    outcome = measurement._failed(one.default, KILLED)  # type: ignore[arg-type]
    assert outcome is not None and outcome.undecided
    outcome = measurement._failed(one.default, WorkerError("crashed", "signal SIGSEGV"))  # type: ignore[arg-type]
    assert outcome is not None and not outcome.undecided and outcome.outcome == "build_error"
    measurement.close()


@pytest.mark.fault("disks and folders", "every build fails by the machine's fault")
def test_a_machine_that_fails_every_candidate_ends_the_run(tmp_path: Path, session: Callable[[], Session]) -> None:
    """And says why, instead of trying all candidates for nothing."""
    one = session()
    outcome = Outcome("build_error", "`/tmp` cannot be written (No space left on device): free some space there.", undecided=True)
    with pytest.raises(MachineError, match=r"8 candidates in a row failed, and none is to blame; `/tmp` cannot be written"):
        for choice in one.search.all:
            one.record(choice, outcome, None)
    assert records(tmp_path) == [] and len(one.tried) == MOST_UNDECIDED - 1
    took(one, one.default, 1e-3)
    one.record(one.search.all[1], outcome, None)


def _job(tmp_path: Path, machine: Machine = DEVICE) -> BuildJob:
    from im2win.registry.ranking import default_tile

    algorithm, tile = default_tile(SMALL, machine=machine)
    return BuildJob(SMALL, algorithm, tile, machine, tmp_path / "1.so")


def _raising(error: Exception) -> Any:
    def build(*arguments: Any, **named: Any) -> Kernel:
        raise error

    return build


@pytest.mark.fault("disks and folders", "the temporary folder is full")
@pytest.mark.fault("disks and folders", "there are no descriptors left")
@pytest.mark.fault("disks and folders", "there is no memory for a compiler")
@pytest.mark.fault("compilers and devices", "the compiler is missing")
@pytest.mark.parametrize(("error", "said"), [
    (MemoryError(), "the machine ran short"), (OSError(errno.EMFILE, "Too many open files"), "the machine ran short"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "end other programs"),
    (ToolchainError("there is no linker: install gcc."), "install gcc"),
], ids=["memory", "descriptors", "allocation", "toolchain"])  # fmt: skip
def test_what_the_machine_does_to_a_build_is_no_verdict(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "build", _raising(error))
    built = build_worker.build(_job(tmp_path))
    assert built.undecided and built.outcome == "build_error" and said in built.message


@pytest.mark.fault("disks and folders", "the compiler cannot write")
def test_a_compiler_that_cannot_write_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so in words of its own; the full disk is found by writing a file."""
    monkeypatch.setattr(CpuBackend, "build", _raising(RuntimeError("ld: final link failed")))
    monkeypatch.setattr("im2win.tuner.build_worker.tempfile.TemporaryFile", _raising(OSError(errno.ENOSPC, "No space left on device")))
    built = build_worker.build(_job(tmp_path))
    assert built.undecided and "cannot be written (No space left on device): free some space there" in built.message


@pytest.mark.fault("compilers and devices", "the compiler fails at a candidate")
def test_a_compiler_that_fails_is_a_build_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "build", _raising(RuntimeError("LLVM: cannot select")))
    built = build_worker.build(_job(tmp_path))
    assert built == Built("build_error", built.message) and "cannot select" in built.message and list(tmp_path.iterdir()) == []


@pytest.mark.fault("disks and folders", "files may not be longer than some bytes")
def test_a_limit_on_files_is_no_verdict(tmp_path: Path) -> None:
    """`ulimit -f`: LLVM ends the building process, and the tuner finds out that files cannot be written."""
    job = _job(tmp_path, Machine.host())

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, 8 << 10))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    code = (
        "import pickle, sys\nfrom im2win.common.worker_pool import Worker, WorkerError\n"
        "from im2win.tuner.build_worker import failed_build\njob = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "with Worker('im2win.tuner.build_worker', torch=False) as worker:\n"
        "    try:\n        built = worker.call(job, 60)\n"
        "    except WorkerError as error:\n        built = failed_build(error, job.path.parent)\n"
        "print(built.outcome, built.undecided, built.message)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}\n{code}", pickle.dumps(job).hex()],
        preexec_fn=limited, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.startswith("build_error True") and "raise the limit" in done.stdout, done.stdout + done.stderr


@pytest.mark.fault("disks and folders", "there is no temporary folder")
def test_without_a_temporary_folder_a_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="gone"):
        TemporaryFolder("tune")


@pytest.mark.fault("disks and folders", "the log's disk fills up in mid-session")
def test_a_disk_that_fills_up_in_mid_session_loses_no_record(
    tmp_path: Path, session: Callable[[], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with advice; its records are whole, and the next run goes on behind them."""
    one, write = session(), os.write
    written = [0]

    def full(descriptor: int, data: Any) -> int:
        written[0] += 1
        if written[0] == 4:
            write(descriptor, bytes(data[:40]))
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr("im2win.common.locking.os.write", full)
    with pytest.raises(LogError, match=r"No space left on device\): free some space there"):
        for choice in one.search.all:
            took(one, choice, 1e-3)
    monkeypatch.undo()
    assert len(records(tmp_path)) == 3
    again = session()
    assert len(again.tried) == 3
    took(again, again.search.all[5], 1e-3)
    assert len(records(tmp_path)) == 4


@pytest.mark.fault("disks and folders", "the log's file system becomes read-only")
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_log_that_becomes_read_only_is_named(
    number: int, tmp_path: Path, session: Callable[[], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, opened = session(), os.open
    took(one, one.search.all[0], 1e-3)

    def forbidden(path: Any, flags: int, *mode: int) -> int:
        if str(path).endswith(".jsonl"):
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *mode)

    monkeypatch.setattr("im2win.common.locking.os.open", forbidden)
    with pytest.raises(LogError, match="choose a folder for the logs that you may write, or change its permissions"):
        took(one, one.search.all[1], 1e-3)
    monkeypatch.undo()
    assert len(records(tmp_path)) == 1


@pytest.mark.fault("disks and folders", "the log's folder is removed in mid-session")
def test_a_log_that_is_removed_in_mid_session_is_made_again(tmp_path: Path, session: Callable[[], Session]) -> None:
    one = session()
    took(one, one.search.all[0], 1e-3)
    shutil.rmtree(tmp_path / "log")
    took(one, one.search.all[1], 2e-3)
    assert [found.seconds for found in records(tmp_path)] == [2e-3] and len(one.tried) == 2


@pytest.mark.fault("records", "a record is of a later release")
def test_two_releases_share_a_log(tmp_path: Path, session: Callable[[], Session]) -> None:
    """Lines of a later schema are skipped with a reason, kept by `prune`, and hide no line of today's."""
    one = session()
    for place in range(3):
        took(one, one.search.all[place], 1e-3 * (place + 1))
    log = Log(tmp_path / "log")
    path = log.path(SMALL, DEVICE.name)
    newer = json.dumps({"schema": SCHEMA + 1, "conv": str(SMALL), "joules": 3}).encode()
    path.write_bytes(newer + b"\n" + path.read_bytes() + b"not JSON\n" + newer)
    assert len(session().tried) == 3
    took(session(), one.search.all[4], 5e-3)
    log = Log(tmp_path / "log")
    assert len(log.read(SMALL, DEVICE.name)) == 4
    assert [bool(re.search(rf"schema.*must be {SCHEMA}", problem.reason)) for problem in log.problems] == [True, False, True]
    before = path.read_bytes()
    assert log.prune(dry_run=True).broken == 1 and path.read_bytes() == before
    pruned = log.prune()
    assert pruned.broken == 1 and path.read_bytes().split(b"\n").count(newer) == 2 and b"not JSON" not in path.read_bytes()
    after = path.read_bytes()
    assert log.prune() == replace(pruned, slower=0, broken=0) and path.read_bytes() == after
    path.write_bytes(newer + b"\n")
    assert Log(tmp_path / "log").prune().kept == 0 and path.read_bytes() == newer + b"\n"


HOSTILE = [
    b"[" * 100_000, b'{"schema": ' + b"9" * 5000 + b"}", b'{"schema": 1e999}', b'{"schema": NaN}', b"\x00\xff\xfe", b'"' + b"x" * 1_000_000,
    b'{"__reduce__": "os.system"}', b"!!python/object/apply:os.system ['touch hacked']", b"cos\nsystem\n(S'touch hacked'\ntR.",
    b'{"schema": 5, "conv": "../../../etc/passwd"}', b'{"schema": 5, "schema": 6}',
]  # fmt: skip


@pytest.mark.fault("records", "a record is hostile")
def test_hostile_records_are_data(tmp_path: Path, session: Callable[[], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = session()
    took(one, one.default, 1e-3)
    line = one.log.path(SMALL, DEVICE.name).read_bytes().strip()
    fields = json.loads(line)
    for name, value in (("device", "../x"), ("tile", {"rows": "__import__('os').system('touch hacked')"}), ("samples_s", [-1e-3])):
        HOSTILE.append(json.dumps({**fields, name: value}).encode())
    one.log.path(SMALL, DEVICE.name).write_bytes(b"\n".join([*HOSTILE, line, b""]))
    again = session()
    assert [choice.key for choice, _ in again.tried] == [one.default.key] and len(again.log.problems) >= len(HOSTILE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


@pytest.mark.fault("records", "the clock jumps")
def test_a_clock_that_jumps_changes_no_order(tmp_path: Path, session: Callable[[], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a candidate the record that was written last counts, whatever date it has."""
    dates = iter(["2031-01-01T00:00:00+00:00", "1970-01-01T00:00:00+00:00", "2026-01-01T00:00:00+00:00"])
    monkeypatch.setattr("im2win.tuner.session.utc_now", lambda: next(dates))
    one = session()
    one.record(one.default, Outcome("ok", samples_s=[1e-3], error=0.0), Kernel(0, "0" * 16))
    one.record(one.default, Outcome("wrong", "9 elements are NaN"), Kernel(0, "0" * 16), again=True)
    assert math.isinf(dict((choice.key, cost) for choice, cost in session().tried)[one.default.key])
    one.record(one.default, Outcome("ok", samples_s=[3e-3], error=0.0), Kernel(0, "0" * 16), again=True)
    assert session().seconds[one.default.key] == 3e-3


@pytest.mark.fault("records", "the clock jumps over a temporary folder's age")
@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_jumps_removes_no_folder_in_use(jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    now = time.time() + jump_s
    with TemporaryFolder("tune") as held:
        monkeypatch.setattr("im2win.common.temporary.time.time", lambda: now)
        with TemporaryFolder("tune"):
            assert Path(held).is_dir()
    assert list(tmp_path.iterdir()) == []


# --- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.fault("candidates", "a candidate returns NaN")
@pytest.mark.fault("candidates", "a candidate is right only at first")
@pytest.mark.parametrize(("later", "said"), [
    (np.nan, "after timing: 1024 elements of 1024 are NaN"), (0.0, "after timing: error"),
])  # fmt: skip
def test_a_candidate_that_is_right_only_at_first_is_wrong(later: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked again after it was timed."""
    class Fickle:
        def __init__(self, bench: Bench, candidate: Any) -> None:
            self.bench, self.calls, self.own = bench, 0, dict[str, Any]()

        def __call__(self) -> None:
            self.calls += 1
            self.bench.output[...] = self.bench.expected if self.calls <= 2 * ROUNDS else later

    for name in ("COLD_S", "WARM_S", "SAMPLE_S", "SETTLE_S"):
        monkeypatch.setattr(f"im2win.tuner.runners.cpu.{name}", 0.0)
    monkeypatch.setattr("im2win.tuner.runners.cpu.Kernel", Fickle)
    [outcome] = Measurer()(RunJob(SMALL, (None,), 0, samples=2, seconds=0.0, probe=((0, 0, 0),)))  # type: ignore[arg-type]
    assert outcome.outcome == "wrong" and outcome.message.startswith(said) and outcome.samples_s == [] and outcome.probed is None


@pytest.fixture
def jobs() -> Iterator[Worker]:
    with Worker("worker_jobs", {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}, torch=False) as worker:
        yield worker


@pytest.mark.fault("candidates", "a candidate exhausts memory")
def test_a_candidate_that_exhausts_memory_costs_its_trial(jobs: Worker) -> None:
    with pytest.raises(WorkerError, match="MemoryError") as caught:
        jobs.call("exhaust", 60)
    assert caught.value.kind == "crashed" and not caught.value.killed
    assert jobs.call("b", 60)[0] == "did b"


def test_what_a_worker_blames_its_machine_for_is_not_the_jobs(jobs: Worker) -> None:
    with pytest.raises(WorkerError, match="the GPU is gone") as caught:
        jobs.call("blame", 60)
    assert caught.value.killed
    assert jobs.call("b", 60)[0] == "did b"


@pytest.mark.fault("processes", "the tuner is killed while a candidate hangs")
def test_a_candidate_that_hangs_ends_with_a_killed_tuner() -> None:
    code = (
        "import time\nfrom im2win.common.worker_pool import Worker\nworker = Worker('worker_jobs', torch=False)\n"
        "worker.submit('a')\nprint(worker.result(60)[1], flush=True)\nworker.submit('hang')\ntime.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT / "src")])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as tuner:
        assert tuner.stdout is not None
        pid = int(tuner.stdout.readline())
        time.sleep(0.2)
        assert _runs(pid)
        tuner.kill()
    deadline = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.fault("processes", "building and measuring processes are killed at random")
@pytest.mark.slow
def test_a_run_whose_processes_are_killed_at_random_loses_nothing(tmp_path: Path) -> None:
    """Every half second or so one of the tuner's processes is killed: none of it is a verdict, and the next run makes what lacks."""
    code = f"{BEGIN}import sys, im2win; im2win.tune(sys.argv[1], trials=24, logs=sys.argv[2], patience=None)"
    rng, killed, temporary = np.random.default_rng(7), 0, tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", code, str(SMALL), str(tmp_path / "log")], env=environment) as tuner:
        while tuner.poll() is None:
            time.sleep(float(rng.uniform(0.2, 0.8)))
            try:
                children = [one for one in psutil.Process(tuner.pid).children() if "worker_pool" in " ".join(one.cmdline())]
                children[rng.integers(len(children))].kill()
                killed += 1
            except (psutil.NoSuchProcess, IndexError, ValueError):
                continue
            if killed > 20:  # enough: from now on it may end
                break
        assert tuner.wait(200) in (0, 1)  # 1: eight candidates in a row were killed twice
    assert list(temporary.iterdir()) == [] and killed >= 3
    im2win.tune(SMALL, trials=24, logs=tmp_path / "log", patience=None)  # those that were killed twice have their trials now
    log = Log(tmp_path / "log")
    found = log.read(SMALL, Machine.host().name)
    assert not log.problems and {one.outcome for one in found} == {"ok"} and len({(one.method, str(one.tile)) for one in found}) == 24


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_what_a_compiler_writes_beside_the_library_is_in_the_session_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Where the process is killed, the session removes it with its folder. Afterwards the process has its own folder again."""
    made: list[str] = []

    def compiles(*job: Any) -> None:
        made.append(tempfile.mkdtemp())
        made.append(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())

    monkeypatch.setattr(CpuBackend, "build", compiles)
    monkeypatch.setattr(tempfile, "tempdir", None)
    if before is None:
        monkeypatch.delenv("TMPDIR", raising=False)
    else:
        monkeypatch.setenv("TMPDIR", before)
    assert build_worker.build(_job(tmp_path)).outcome == "ok"
    assert sorted(made) == sorted(str(one) for one in tmp_path.iterdir())
    assert os.environ.get("TMPDIR") == before and tempfile.tempdir is None


@pytest.mark.fault("compilers and devices", "the GPU disappears")
def test_a_gpu_that_disappears_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="there is no GPU that PyTorch can use: see if `nvidia-smi` lists it"):
        cuda.Measurer()(RunJob(SMALL, (), 0))


@pytest.mark.fault("compilers and devices", "a GPU's driver library is missing")
def test_a_gpu_s_kernels_are_not_built_without_the_driver_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM would write libraries without machine code, and call them built."""
    monkeypatch.setattr(CudaBackend, "check_tools", lambda self: None)
    found = tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True)
    if found is not None:
        with Pool(H200) as pool:
            assert pool.builders
    monkeypatch.setattr(tvm_ffi, "get_global_func", lambda name, allow_missing=False: None)
    with pytest.raises(ToolchainError, match=r"libcuda\.so\.1.*install the driver, or run the tuner on a machine that has it"):
        Pool(H200)


@pytest.mark.fault("candidates", "every candidate fails")
def test_a_run_without_a_right_kernel_says_what_happened(tmp_path: Path, session: Callable[[], Session]) -> None:
    """Wrong, crashed, too slow: each is a record, and none is the best."""
    from im2win.tuner.tuning import TuneError, _winner

    one = session()
    outcomes = iter([Outcome("wrong", "9 elements are NaN"), Outcome("crashed", "signal SIGSEGV"), Outcome("timeout", "30 s")] * 2)
    measurement: Any = SimpleNamespace(
        each_built=lambda batch, built: ((choice, None) for choice in batch), kernels=dict.fromkeys(c.key for c in one.search.all),
        run=lambda choices, **how: [next(outcomes)],
    )  # fmt: skip
    batch: list[Choice] = one.search.all[:6]
    measure_batch(one, measurement, Baseline(lambda choice: Outcome("ok")), batch, 1.5, lambda n: None, lambda c: None, lambda: None)
    with pytest.raises(TuneError, match=r"no right kernel in 6 trials \(2 wrong, 2 crashed, 2 timeout\); see the log"):
        _winner(one)
    assert len(records(tmp_path)) == 6 and one.best is None


def test_a_pool_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "check_tools", _raising(ToolchainError("there is no compiler: install gcc.")))
    with pytest.raises(ToolchainError, match="install gcc"), Pool(DEVICE):
        pass
    with pytest.raises(ToolchainError, match="install gcc"):
        im2win.tune(SMALL, trials=1, logs=tmp_path)
