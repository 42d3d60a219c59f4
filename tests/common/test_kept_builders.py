"""Processes that build, kept from one test to the next: whom they serve, and which are not kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from kept_builders import MOST, Kept, kept
from paths import SUPPORT

from im2win.common.worker_pool import Worker

PATH = os.pathsep.join([str(SUPPORT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Those of `worker_jobs` are kept."""
    monkeypatch.setattr("kept_builders.MODULES", ("worker_jobs",))
    found = Kept()
    with kept(found):
        yield found
    found.end()
    assert not found._idle


def worker(**environment: str) -> Worker:
    return Worker("worker_jobs", {"PYTHONPATH": PATH, **environment}, torch=False)


def served(**environment: str) -> int:
    """The process that serves a new worker, which is closed."""
    with worker(**environment) as one:
        return int(one.call("a", 60)[1])


def test_a_process_serves_workers_of_its_kind_one_after_the_other(processes: Kept) -> None:
    first = served()
    assert served() == first != served(OMP_NUM_THREADS="3")
    with worker() as one, worker() as other:
        pids = [one.call("a", 60)[1], other.call("a", 60)[1]]
    assert pids[0] == first != pids[1]
    for count in range(MOST):
        served(NAME=str(count))
    assert len(processes._idle) == MOST and served() not in pids, "the oldest have ended"


def test_what_is_busy_or_has_ended_is_not_kept(processes: Kept) -> None:
    one: Any = worker()
    one.submit("hang")
    one.close()
    assert not processes._idle
    first = served()
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert served() != first
