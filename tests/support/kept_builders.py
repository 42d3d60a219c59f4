"""Processes that build, kept from one test to the next: each imports TVM, which takes longer than what most tests have it build.

A process is kept when its worker is closed without a job under way, and serves the next worker that would start one like it: of the same
module, environment, folder and CPUs. Processes that measure are always new ones.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from im2win.common.worker_pool import Worker

MODULES = ("im2win.tuner.build_worker", "im2win.builder.batch", "im2win.frontends.models.convolutions")
MOST = 4
_PARTS = ("_process", "_jobs", "_results", "_stderr", "_life")


class Kept:
    """The processes that are kept, and the worker's methods as they are."""

    def __init__(self) -> None:
        self._idle: list[tuple[Hashable, dict[str, Any]]] = []
        self._lock = threading.Lock()  # workers of one queue start in several threads
        self._start, self._submit, self._result, self._close = Worker.start, Worker.submit, Worker.result, Worker.close

    def methods(self) -> dict[str, Any]:
        """What stands for the methods of `Worker`."""

        def start(worker: Any) -> None:
            if worker._process is None or worker._process.poll() is not None:
                worker.__dict__["kind"] = _kind(worker)
                parts = self._taken(worker.kind)
                if parts is not None:
                    self._close(worker)
                    worker.__dict__.update(parts)
                    return
            self._start(worker)

        def submit(worker: Any, job: Any) -> None:
            worker.__dict__["busy"] = True
            self._submit(worker, job)

        def result(worker: Any, timeout_s: float) -> Any:
            answer = self._result(worker, timeout_s)
            worker.__dict__["busy"] = False
            return answer

        def close(worker: Any) -> None:
            healthy = worker._process is not None and worker._process.poll() is None and not worker.__dict__.get("busy")
            if worker._module in MODULES and healthy and "kind" in worker.__dict__:
                with self._lock:
                    self._idle.append((worker.kind, {name: getattr(worker, name) for name in _PARTS}))
                worker.__dict__.update(dict.fromkeys(_PARTS))
                self.end(MOST)
            else:
                self._close(worker)

        return {"start": start, "submit": submit, "result": result, "close": close}

    def _taken(self, wanted: Hashable) -> dict[str, Any] | None:
        """A process of this kind, which is kept no longer; None if there is none."""
        with self._lock:
            for index, (kind, parts) in enumerate(self._idle):
                if kind == wanted and parts["_process"].poll() is None:
                    del self._idle[index]
                    return parts
        return None

    def end(self, left: int = 0) -> None:
        """Ends the processes that are kept, oldest first, until so many are left."""
        with self._lock:
            ended = self._idle[: max(0, len(self._idle) - left)]
            del self._idle[: len(ended)]
        for _, parts in ended:
            worker: Any = Worker("")
            worker.__dict__.update(parts)
            self._close(worker)


def _kind(worker: Any) -> Hashable:
    """What makes two processes equal."""
    environment = {name: value for name, value in worker._env.items() if name != "PYTEST_CURRENT_TEST"}
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return worker._module, worker._begin, frozenset(environment.items()), os.getcwd(), frozenset(cpus)


@contextlib.contextmanager
def kept(found: Kept) -> Iterator[None]:
    """A context in which workers keep their processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, method in found.methods().items():
            patch.setattr(Worker, name, method)
        yield
