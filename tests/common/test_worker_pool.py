"""A tuning run on several devices at once: jobs are shared out, and a failure or an interrupt ends them all."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from paths import SUPPORT

from im2win.common.worker_pool import JobQueue, Worker, WorkerError, as_ready, in_order
from im2win.device import gpu
from im2win.device.cpu import Machine
from im2win.device.gpu import H200
from im2win.registry.backends import backend_for
from im2win.registry.cpu_backend import CpuBackend
from im2win.registry.cuda_backend import CudaBackend
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d
from im2win.tuner.layers import shared_out
from im2win.tuner.pool import Pool, pools


@pytest.mark.parametrize("count", [1, 3])
def test_every_job_is_done_once_and_no_pool_does_two_at_a_time(count: int) -> None:
    pools: list[Any] = [[] for _ in range(count)]
    busy = {id(pool): threading.Lock() for pool in pools}

    def one(job: int, pool: Any, stop: threading.Event) -> None:
        with_lock = busy[id(pool)].acquire(blocking=False)
        assert with_lock
        time.sleep(0.002)
        pool.append(job)
        busy[id(pool)].release()

    shared_out(range(20), pools, one)
    assert sorted(job for pool in pools for job in pool) == list(range(20)) and all(pools)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("failure", [ValueError("no tile"), KeyboardInterrupt()])
def test_a_failure_ends_all(count: int, failure: BaseException) -> None:
    begun: list[int] = []

    def one(job: int, pool: Any, stop: threading.Event) -> None:
        begun.append(job)
        if job == 1:
            raise failure
        stop.wait(5 if count > 1 else 0)  # asked to end long before that

    start = time.monotonic()
    with pytest.raises(type(failure)):
        shared_out(range(50), [object() for _ in range(count)], one)  # type: ignore[misc]
    assert len(begun) <= count + 1 and time.monotonic() - start < 4


class _Devices:
    """Stands for `tvm.cuda`: devices of these brands."""

    def __init__(self, *brands: str) -> None:
        self.brands = brands

    def __call__(self, index: int) -> Any:
        class Device:
            exist = index < len(self.brands)
            device_name = self.brands[index] if exist else ""

        return Device


def test_gpus_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm

    monkeypatch.setattr(tvm, "cuda", _Devices("NVIDIA H200", "NVIDIA L4", "NVIDIA H200"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.alike_gpus() == ["0", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,GPU-7")
    assert gpu.alike_gpus() == ["5", "GPU-7"]
    assert CudaBackend(H200).measurement_slots() == [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "GPU-7"}]


def test_pools_share_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes start when they get a job: none does here."""
    monkeypatch.setattr(CudaBackend, "measurement_slots", lambda self: [{"CUDA_VISIBLE_DEVICES": name} for name in "0123"])
    monkeypatch.setattr(CudaBackend, "check_tools", lambda self: None)
    monkeypatch.setattr("im2win.tuner.pool.check_cuda_runtime", lambda: None)
    monkeypatch.setattr("im2win.registry.cuda_backend.usable_cpus", lambda: 17)
    with pools(H200, 100) as all_of_them:
        assert [len(pool.builders) for pool in all_of_them] == [4, 4, 4, 4]
    with pools(H200, 2) as two:
        assert [len(pool.builders) for pool in two] == [8, 8]
    with Pool(H200) as alone:
        assert len(alone.builders) == 16


@pytest.mark.fault("processes", "a ranking process dies")
@pytest.mark.slow
def test_a_ranking_that_dies_is_done_here_and_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, machine = Conv2d.parse("n1-c8x6x6-k8x3x3"), Machine.host(1)
    names = ["direct/tiled", "im2win/stored", "im2col/tiled"]
    with Pool(machine) as pool:
        pool.builders = [Worker("im2win.tuner.build_worker", torch=False) for _ in names]
        monkeypatch.setattr(pool.builders[0], "result", _dies)
        found = pool.ranked(conv, names, machine, "float32")
        assert list(found) == names
        assert found["direct/tiled"] == backend_for(machine).ranked(conv, schedule_of("direct/tiled"))
        assert found["im2win/stored"] and found["im2col/tiled"]
        again = pool.ranked(conv, names[1:], machine, "float32")
        assert again == {name: found[name] for name in names[1:]}
        for worker in pool.builders:
            worker.close()


def _dies(timeout_s: float) -> Any:
    raise WorkerError("crashed", "the process ended")


def test_a_cpu_is_one_place() -> None:
    machine = Machine.host(1)
    with pools(machine, 5) as found:
        assert len(found) == 1 and CpuBackend(machine).measurement_slots() == [{"TVM_NUM_THREADS": "1"}]


def test_tvm_in_a_process_without_pytorch_finds_none() -> None:
    """Nor a None in its place, of which array libraries would ask for its classes. Others find PyTorch, and TVM takes its tensors."""
    pytest.importorskip("torch")
    path = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    with Worker("worker_jobs", path, torch=False) as worker:
        assert worker.call("torch", 60.0) == (False, True, [2, 3])


def test_who_stops_asking_leaves_no_answer_behind() -> None:
    """Two processes, four jobs, one answer taken: the next jobs get answers of their own; a process that dies has an error in its place."""
    path = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    with Worker("worker_jobs", path) as one, Worker("worker_jobs", path, torch=False) as other:
        answers = in_order([one, other], ["a", "b", "c", "d"], 60.0)
        assert next(answers)[0] == "did a"
        answers.close()
        first, died, last = in_order([one, other], ["e", "crash", "f"], 60.0)
    assert (first[0], last[0]) == ("did e", "did f") and isinstance(died, WorkerError) and "SIGSEGV" in str(died)


@pytest.mark.fault("processes", "the measuring process is killed once")
@pytest.mark.fault("candidates", "a candidate ends by a real-time signal")
def test_a_job_that_was_killed_from_outside_is_run_once_more(tmp_path: Path) -> None:
    """Alone and among others; a job whose process is killed each time is given up, and one that crashes by itself at once."""
    once = f"signal {signal.SIGKILL:d} {tmp_path}"
    with Worker("worker_jobs", {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}, torch=False) as worker:
        assert worker.call(f"{once}/alone", 60.0)[0].startswith("did signal")
        with pytest.raises(WorkerError, match="signal SIGTERM") as caught:
            worker.call(f"signal {signal.SIGTERM:d}", 60.0)
        assert caught.value.killed and caught.value.kind == "crashed"
        first, again, given_up, last = in_order([worker], ["a", f"{once}/among", f"signal {signal.SIGKILL:d}", "b"], 60.0)
        assert (first[0], last[0]) == ("did a", "did b") and again[0].startswith("did signal") and given_up.killed
        with pytest.raises(WorkerError, match="ended with signal 40") as caught:
            worker.call("signal 40", 60.0)
        assert not caught.value.killed


def test_answers_come_as_they_are_ready() -> None:
    """One process hangs until its time is up; meanwhile the other one does everything else."""
    path = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    with Worker("worker_jobs", path, torch=False) as one, Worker("worker_jobs", path, torch=False) as other:
        one.call("a", 60.0)
        other.call("a", 60.0)
        answers = list(as_ready([one, other], ["hang", "b", "c", "d"], 1.5))
        assert [place for place, _ in answers] == [1, 2, 3, 0]
        late = answers[-1][1]
        assert isinstance(late, WorkerError) and late.kind == "timeout" and str(late) == "no result within 2 s"
        assert [answer[0] for answer in in_order([one, other], ["e", "f", "g"], 60.0)] == ["did e", "did f", "did g"]


def test_jobs_run_while_the_caller_does_something_else(tmp_path: Path) -> None:
    """A job whose process dies has an error in its place, one that is killed from outside is done again; all end with the queue."""
    path = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    with Worker("worker_jobs", path, torch=False) as one, Worker("worker_jobs", path, torch=False) as other:
        queue = JobQueue([one, other], 60.0)
        jobs = ["a", "crash", f"signal {signal.SIGKILL:d} {tmp_path}/once", f"signal {signal.SIGKILL:d}", "b"]
        first, died, again, given_up, last = [one.result() for one in [queue.submit(job) for job in jobs]]
        assert (first[0], last[0]) == ("did a", "did b") and again[0].startswith("did signal")
        assert isinstance(died, WorkerError) and "SIGSEGV" in str(died) and given_up.killed
        hanging, waiting = [queue.submit("hang") for _ in range(2)], queue.submit("c")
        while not all(future.running() for future in hanging):
            time.sleep(0.01)
        start = time.monotonic()
        queue.close()
        assert time.monotonic() - start < 20 and waiting.cancelled() and all(future.result().killed for future in hanging)
        queue = JobQueue([one, other], 60.0)  # the workers serve others afterwards
        assert queue.submit("d").result()[0] == "did d"
        queue.close()


def test_a_job_of_a_queue_that_takes_too_long_is_ended() -> None:
    path = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    with Worker("worker_jobs", path, torch=False) as worker:
        worker.call("a", 60.0)
        queue = JobQueue([worker], 1.0)
        late, next_one = queue.submit("hang").result(), queue.submit("b").result()
        assert late.kind == "timeout" and next_one[0] == "did b"
        queue.close()
