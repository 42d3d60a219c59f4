"""Parallel loops of loaded kernels run on im2win's threads, those of the first loaded library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from im2win import Conv2d, build
from im2win.codegen import pool
from im2win.runtime import libraries

pytestmark = pytest.mark.skipif(pool.launcher() is None, reason="needs Linux and a C compiler")

CONV = Conv2d(1, 16, 28, 28, 32, 3, padding=1)  # so large that its loop is parallel on any machine
BODY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int32 * 4), ctypes.c_void_p)

IN_A_PROCESS = """
import os, sys
import numpy as np
from im2win.runtime import libraries
from im2win.runtime.load import load

op = load(sys.argv[1])
x, w = (np.ones(shape, np.float32) for shape in (op.conv.input_shape, op.conv.filter_shape))
"""


def launched(body: object, parts: int = 0) -> int:
    """The result of a parallel loop on the pool."""
    build(CONV)
    assert libraries._first is not None
    result: int = libraries._first.im2win_launch(BODY(body), None, parts)
    return result


def test_every_part_runs_once_and_threads_take_parts_as_they_come() -> None:
    seen: list[tuple[int, int, int]] = []

    def body(part: int, group: object, data: object) -> int:
        seen.append((part, group.contents[2], threading.get_ident()))  # type: ignore[attr-defined]
        return 0

    assert launched(body) == 0
    parts = seen[0][1]
    assert sorted(part for part, _, _ in seen) == list(range(parts)) and {group for _, group, _ in seen} == {parts}
    assert parts == 1 or parts >= 8 * len({thread for *_, thread in seen})
    seen.clear()
    assert launched(body, 3) == 0 and sorted(part for part, _, _ in seen) == [0, 1, 2]


def test_a_failed_part_is_the_loop_s_result() -> None:
    assert launched(lambda part, group, data: -7 if part == 2 else 0, 4) == -7


def run(code: str, *words: object, **environment: str) -> str:
    """What a program of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS + code, *map(str, words)], capture_output=True, text=True, env={**os.environ, **environment},
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CONV).export(tmp_path_factory.mktemp("pool") / "conv.so")


@pytest.mark.fault("compilers and devices", "a process forks after a kernel was loaded")
def test_a_child_of_a_fork_computes(library: Path) -> None:
    code = """
want = op(x, w)
child = os.fork()
if not child:
    os._exit(0 if np.array_equal(op(x, w), want) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert np.array_equal(op(x, w), want)
"""
    run(code, library)


def test_libraries_share_the_pool_of_the_first_which_outlives_it(library: Path) -> None:
    code = """
import gc
want = op(x, w)
other = load(sys.argv[1])
del op
gc.collect()
assert np.array_equal(other(x, w), want)
print(len(os.listdir("/proc/self/task")), libraries._first.im2win_threads())
"""
    tasks, threads = map(int, run(code, library, OPENBLAS_NUM_THREADS="1").split())
    assert threads == len(os.sched_getaffinity(0)) and tasks <= threads + 1
    assert run("print(libraries._first.im2win_threads())", library, TVM_NUM_THREADS="1").strip() == "1"


WORKERS = """
before = set(os.listdir("/proc/self/task"))
op(x, w)
workers = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_leave_the_caller_s_cpu_and_are_not_bound(library: Path) -> None:
    """The workers begin on the caller's CPU. Programs keep the others busy, so that the scheduler leaves them there."""
    code = f"""
import subprocess, time
{WORKERS}
def place(task):
    return int(open(f"/proc/self/task/{{task}}/stat").read().rpartition(")")[2].split()[36])
cpus, here, together = os.sched_getaffinity(0), place(os.getpid()), 0
os.sched_setaffinity(0, {{here}})
loop = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\\nwhile True: pass"
busy = [subprocess.Popen([sys.executable, "-c", loop, str(cpu)]) for cpu in cpus - {{here}}]
try:
    for _ in range(20):
        for task in workers:
            os.sched_setaffinity(task, {{here}})
        for _ in range(5):
            op(x, w)
        for task in workers:
            os.sched_setaffinity(task, cpus)
        for _ in range(5):
            op(x, w)
        together += place(workers[0]) == here
    time.sleep(0.5)  # a call does not wait for a thread that is about to move
    assert all(os.sched_getaffinity(task) == cpus for task in workers)
    print(together)
finally:
    for program in busy:
        program.kill()
"""
    larger = build(Conv2d(1, 64, 56, 56, 64, 3, padding=1)).export(library.with_name("larger.so"))
    assert int(run(code, larger, OPENBLAS_NUM_THREADS="1", TVM_NUM_THREADS="2")) < 10


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_caller_does_not_wait_for_a_worker_that_gets_no_cpu(library: Path) -> None:
    """The workers run only where a CPU is idle, and none is: with a loop of their own, programs keep all of them busy."""
    code = f"""
import subprocess, time
{WORKERS}
for task in workers:
    os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
try:
    start = time.perf_counter()
    for _ in range(300):
        time.sleep(2e-3)  # longer than workers spin
        op(x, w)
    print(time.perf_counter() - start)
finally:
    for program in busy:
        program.kill()
"""
    assert float(run(code, library, OPENBLAS_NUM_THREADS="1")) < 6.0
