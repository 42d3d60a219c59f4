"""Worker processes: a kernel may crash, hang or corrupt a worker, and the parent continues."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import IO, Any

from im2win.common.torch_import import BEGIN

STARTUP_S = 60.0
_GARBAGE = 50_000  # objects made until a process that compiles looks for those that hold each other; Python's own number is 700
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
"""Signals that end a process without a fault of its job: sent by a user, by a job scheduler, or by the system when memory is short."""


class MachineError(RuntimeError):
    """What this machine, and not a job, is to blame for: no space left, a GPU that is gone. The message says what to do."""


class WorkerError(RuntimeError):
    """A job without a result.

    Attributes:
        kind: "crashed" or "timeout".
        killed: whether a crash came from outside (`_FROM_OUTSIDE`), or the machine is to blame (`MachineError`), and not the job.
    """

    def __init__(self, kind: str, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.kind, self.killed = kind, killed


class Worker:
    """A process that runs jobs one at a time. It is started when first needed, and restarted after a crash or a time-out.

    It is a new interpreter that runs a module's `serve` loop. It is neither a fork nor one of multiprocessing's spawn, which would import
    the user's script again. It has its own session, so that Ctrl-C reaches the parent only.

    Args:
        module: with a function `main` that serves.
        env: environment variables in addition to the parent's.
        torch: whether TVM may import PyTorch (see `im2win.common.torch_import`). For a GPU it is needed, since it brings CUDA's libraries.
    """

    def __init__(self, module: str, env: dict[str, str] | None = None, *, torch: bool = True) -> None:
        self._module = module
        self._begin = "" if torch else BEGIN
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: Connection | None = None
        self._results: Connection | None = None
        self._stderr: IO[bytes] | None = None
        self._life: int | None = None  # the process ends when no process holds this any more

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Starts the process if it is not running."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        job_read, job_write = os.pipe()
        result_read, result_write = os.pipe()
        life_read, self._life = os.pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        bound = f"from im2win.common.worker_pool import end_with; end_with({life_read}); "
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{self._begin}{bound}from {self._module} import main; main({job_read}, {result_write})"],
            pass_fds=(job_read, result_write, life_read), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr,
            env=self._env, start_new_session=True,
        )  # fmt: skip
        os.close(job_read)
        os.close(result_write)
        os.close(life_read)
        self._jobs = Connection(job_write, readable=False)
        self._results = Connection(result_read, writable=False)

    def submit(self, job: Any) -> None:
        """Sends a job; `result` waits for it."""
        self.start()
        assert self._jobs is not None
        with contextlib.suppress(BrokenPipeError):  # `result` reports how the process died
            self._jobs.send(job)

    def result(self, timeout_s: float) -> Any:
        """The result of the submitted job.

        Raises:
            WorkerError: the process died, or took longer than `timeout_s` seconds and was ended.
        """
        try:
            if self.results.poll(timeout_s):
                result = self.results.recv()
                if isinstance(result, MachineError):
                    self.close()
                    raise WorkerError("crashed", str(result), killed=True)
                return result
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        raise self.overdue(timeout_s)

    def overdue(self, timeout_s: float) -> WorkerError:
        """Ends the process, which took longer than `timeout_s` seconds. Returns what its job has in place of a result."""
        self.close()
        return WorkerError("timeout", f"no result within {timeout_s:.0f} s")

    @property
    def results(self) -> Connection:
        """Where the submitted job's result arrives, or the process' end."""
        assert self._results is not None
        return self._results

    def call(self, job: Any, timeout_s: float) -> Any:
        """`submit` and `result`; once more if the process was killed from outside."""
        self.submit(job)
        try:
            return self.result(timeout_s)
        except WorkerError as error:
            if not error.killed:
                raise
        self.submit(job)
        return self.result(timeout_s)

    def _died(self) -> WorkerError:
        """How the process ended, with its last line on stderr."""
        assert self._process is not None and self._stderr is not None
        code = self._process.wait()
        try:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except ValueError:  # a real-time signal, which has no name
            how = f"signal {-code}"
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        self.close()
        message = f"the process ended with {how}" + (f": {said[-1][:300]}" if said else "")
        return WorkerError("crashed", message, killed=-code in _FROM_OUTSIDE)

    def kill(self) -> None:
        """Kills the process and those that it started; who waits for a result sees how it ended."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.killpg(process.pid, signal.SIGKILL)  # the worker leads a session, so its process group has its id

    def close(self) -> None:
        """Kills the process and those that it started, and lets go of what belongs to it."""
        if self._process is not None:
            self.kill()
            self._process.wait()
        for resource in (self._jobs, self._results, self._stderr):
            if resource is not None:
                resource.close()
        if self._life is not None:
            os.close(self._life)
        self._life = None
        self._process = self._jobs = self._results = self._stderr = None


class JobQueue:
    """Jobs that workers run in the background while the caller does something else, one at a time on each.

    Args:
        workers: which nobody else uses before `close`; they serve other users afterwards.
        timeout_s: seconds that a job may take.
    """

    def __init__(self, workers: Sequence[Worker], timeout_s: float) -> None:
        self._workers, self._timeout_s, self._closed = workers, timeout_s, False
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(max(1, len(workers)), "im2win-jobs")

    def submit(self, job: Any) -> Future[Any]:
        """Queues a job. Its result, or a `WorkerError` in the place of a missing one, is the future's.

        A job whose process was killed from outside is run once more.
        """
        return self._threads.submit(self._run, job)

    def _run(self, job: Any) -> Any:
        worker = self._free.get()
        try:
            answer = self._answer(worker, job)
            return self._answer(worker, job) if isinstance(answer, WorkerError) and answer.killed and not self._closed else answer
        finally:
            self._free.put(worker)

    def _answer(self, worker: Worker, job: Any) -> Any:
        worker.submit(job)
        try:
            return worker.result(self._timeout_s)
        except WorkerError as error:
            return error

    def close(self) -> None:
        """Drops what waits, ends the processes that are busy, and returns when all are."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        busy = set(self._workers)
        with contextlib.suppress(Empty):
            while True:
                busy.discard(self._free.get_nowait())
        for worker in busy:
            worker.kill()
        self._threads.shutdown()


def as_ready(workers: Sequence[Worker], jobs: Sequence[Any], timeout_s: float) -> Generator[tuple[int, Any]]:
    """Places and results of the jobs as they end, with one job at a time for each worker; a `WorkerError` in the place of a missing result.

    A job whose process was killed from outside is run once more. If the caller stops iterating, workers with unfinished jobs are ended, so
    that a later job does not receive another job's result.
    """
    waiting, running, again = iter(range(len(jobs))), dict[Worker, tuple[int, float]](), set[int]()

    def submit(worker: Worker, place: int | None) -> None:
        if place is not None:
            worker.submit(jobs[place])
            running[worker] = place, time.monotonic() + timeout_s

    try:
        for worker in workers:
            submit(worker, next(waiting, None))
        while running:
            results = {one.results: one for one in running}
            late = min(running, key=lambda one: running[one][1])
            ready = wait(list(results), max(0.0, running[late][1] - time.monotonic()))
            worker = results[ready[0]] if ready else late  # type: ignore[index]
            try:
                answer: Any = worker.result(timeout_s) if ready else worker.overdue(timeout_s)
            except WorkerError as error:
                answer = error
            place, _ = running.pop(worker)
            if isinstance(answer, WorkerError) and answer.killed and place not in again:
                again.add(place)
                submit(worker, place)
                continue
            submit(worker, next(waiting, None))
            yield place, answer
    finally:
        for worker in running:
            worker.close()


def in_order(workers: Sequence[Worker], jobs: Sequence[Any], timeout_s: float) -> Iterator[Any]:
    """As `as_ready`, but the results alone, in the order of the jobs."""
    early: dict[int, Any] = {}
    with contextlib.closing(as_ready(workers, jobs, timeout_s)) as answers:
        for place in range(len(jobs)):
            while place not in early:
                ready, answer = next(answers)
                early[ready] = answer
            yield early.pop(place)


def serve(handle: Callable[[Any], Any], job_fd: int, result_fd: int) -> None:
    """A worker's loop: answers jobs until the parent closes the pipe. A `MachineError` is an answer; other exceptions end the process."""
    jobs, results = Connection(job_fd, writable=False), Connection(result_fd, readable=False)
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        try:
            answer = handle(job)
        except MachineError as error:
            answer = error
        results.send(answer)


def compiles_only() -> None:
    """Says that this process only compiles, once it has loaded what it needs.

    Compiling makes so many objects that Python's garbage collector would look through TVM's modules again and again, for a tenth of a
    build's time. It is kept from them, and runs less often.
    """
    gc.freeze()
    gc.set_threshold(_GARBAGE, *gc.get_threshold()[1:])


def end_with(life: int) -> None:
    """Has the system end this process when the last one that holds the other end of a pipe is gone, whatever this one computes then.

    A parent that is killed closes nothing by itself, and a kernel that hangs reads no pipe. Where the system has no such signals (Linux has
    them) nothing happens: the process ends when its job does.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(life, select.POLLHUP)
    if gone.poll(0):  # the parent was gone before
        os.kill(os.getpid(), signal.SIGKILL)
