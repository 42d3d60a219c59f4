"""The CPU harness: subjects in separate processes, timed in interleaved rounds.

Separate processes are needed because in one process the thread pools of TVM, PyTorch and ONNX Runtime slow each other down. Measured on two
cores for a 64-channel 56x56 layer, batch 8, alone and in plain rounds A B C D of one process, in ms: a TVM kernel 5.2 and 12.0, PyTorch 5.8
and 38, ONNX Runtime 5.3 and 14.7. A warm call before each timed one, a pause, and disabled spinning each helped some subjects and left
others at twice their time alone.

Each subject therefore runs in its own worker. Only one worker runs at a time. The others are stopped (SIGSTOP), so that no pool spins on a
core that is being measured. To time a worker, the harness continues it, warms it up by time (its threads spread over the cores again), and
times it. On the three layers tried (batch 1 and 8) medians of such rounds were within about 5 % of each subject's time alone.

One process in ten still started with two threads on one core and stayed so, at half speed. A worker whose threads got less than
`LEAST_SHARE` of their CPUs during warm-up is therefore restarted. A sample in which that happens, or in which another process took a core,
is repeated a few times at most. This holds for every subject alike.

Freed memory stays with the process (`KEEP_MEMORY`). Otherwise a library that allocates its output in each call, as PyTorch does, requests
fresh pages from the system or not, depending on the layers that ran before. The benchmark compares with the faster case.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from im2win.bench.peers.cpu import Array
from im2win.bench.peers.subject import Subject
from im2win.common.torch_import import BEGIN
from im2win.spec.conv2d import Conv2d

LEAST_SHARE = 0.7  # CPU time over threads * elapsed time; pools spin while they wait, so threads with a core each give nearly 1
RESTARTS = 3
PATIENCE = 4
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # read by glibc at start
SAMPLE_SECONDS = 0.002  # a sample lasts at least this long: calls under 1 ms are repeated inside it


class WorkerError(RuntimeError):
    """A subject that failed. The message is that of its library, or how its process ended."""


@dataclass(frozen=True)
class Prepared:
    """What a worker reports of a prepared layer: its output, and the facts of the `Trial`."""

    output: Array
    algorithm: str
    tuned: bool
    extra_bytes: int
    tile: dict[str, Any] = field(default_factory=dict)
    tier: str = ""


class Worker:
    """The process of one subject. It is started at first use, restarted after a crash, and stopped except while it serves a request.

    Args:
        subject: the subject; it is pickled, so its class must be importable.
        threads: of the subject; also set in the environment of the process for OpenMP and TVM.
        timeout: seconds for one request.
    """

    def __init__(self, subject: Subject, threads: int, timeout: float = 3600.0) -> None:
        self.subject, self.threads, self.timeout = subject, threads, timeout
        self._layer: tuple[Conv2d, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = Pipe()
        count = str(self.threads)
        environment = {
            **os.environ,
            **KEEP_MEMORY,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": count,
            "TVM_NUM_THREADS": count,
        }
        command = [sys.executable, "-c", f"{BEGIN}from im2win.bench.harness_worker import main; main()", str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._pipe = ours

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _ask(self, request: str, *arguments: Any) -> Any:
        if self._process is None:
            self._start()
        process, pipe = self._process, self._pipe
        assert process is not None and pipe is not None
        try:
            process.send_signal(signal.SIGCONT)
            pipe.send((request, arguments))
            if not pipe.poll(self.timeout):
                raise WorkerError(f"{self.subject.name}: no answer to {request} within {self.timeout:g} s.")
            fine, answer = pipe.recv()
        except (EOFError, OSError) as error:
            code = process.wait()
            self.close()
            raise WorkerError(f"{self.subject.name}: its process ended with code {code} during {request}.") from error
        except BaseException:
            self.close()
            raise
        process.send_signal(signal.SIGSTOP)
        if not fine:
            raise WorkerError(answer)
        return answer

    def prepare(self, conv: Conv2d, seed: int) -> Prepared:
        """Prepares the layer on random tensors of this seed and runs it once.

        Raises:
            WorkerError: the subject refused, failed, crashed or took too long.
        """
        with tempfile.TemporaryDirectory(prefix="im2win-bench-") as folder:
            path = Path(folder) / "output.npy"
            facts = self._ask("prepare", self.subject, conv, seed, self.threads, path)
            self._layer = conv, seed
            return Prepared(np.load(path), *facts)

    def warm(self, seconds: float) -> float:
        """Runs the layer for this long. Returns the seconds of its fastest call. Restarts the process while its threads share a core."""
        for _ in range(RESTARTS):
            fastest, share = self._ask("warm", seconds)
            if share >= LEAST_SHARE * self.threads or self._layer is None:
                break
            self.close()
            self.prepare(*self._layer)
        else:
            fastest, _ = self._ask("warm", seconds)
        return float(fastest)

    def restart(self, warmup: float) -> None:
        """Prepares the layer again in a new process, and runs it for `warmup` seconds."""
        assert self._layer is not None
        self.close()
        self.prepare(*self._layer)
        self.warm(warmup)

    def sample(self, settle: float, calls: int) -> float:
        """Warms up for `settle` seconds, then times `calls` calls. Returns seconds per call."""
        return float(self._ask("sample", settle, calls, LEAST_SHARE * self.threads))


def interleaved(
    workers: Mapping[str, Worker],
    rounds: int,
    warmup: float = 0.5,
    settle: float = 0.03,
    unclear: Callable[[Mapping[str, Sequence[float]]], bool] = lambda samples: False,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times prepared workers in rounds A B C, A B C, ...

    Args:
        workers: by name, each with a layer prepared.
        rounds: samples of each subject.
        warmup: seconds that each runs before the first round.
        settle: seconds that each runs before every sample, since it was stopped in between.
        unclear: whether samples leave open what they are taken for. All subjects are then sampled again, `rounds` times, in new processes:
            where memory lies differs between processes, and makes the same kernel some per cent faster or slower. Each subject is in
            `PATIENCE` processes at most.

    Returns:
        Samples in seconds per call, and the message of each subject that failed on the way (which then has no samples).
    """
    samples: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    calls: dict[str, int] = {}
    for name, worker in workers.items():
        with _kept(failed, name):
            calls[name] = max(1, int(np.ceil(SAMPLE_SECONDS / worker.warm(warmup))))
    for done in range(PATIENCE * rounds):
        if done and done % rounds == 0:
            if not unclear(samples):
                break
            for name in calls:
                with _kept(failed, name):
                    workers[name].restart(warmup)
        for name in calls:
            if name not in failed:
                with _kept(failed, name):
                    samples.setdefault(name, []).append(workers[name].sample(settle, calls[name]))
    return {name: values for name, values in samples.items() if name not in failed}, failed


@contextlib.contextmanager
def _kept(failed: dict[str, str], name: str) -> Any:
    try:
        yield
    except WorkerError as error:
        failed[name] = str(error)
