"""A campaign of deliberately broken kernels: each is judged in a process that may crash or hang, and a file counts what became of them."""

from __future__ import annotations

import functools
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import broken_cpu
import broken_cuda
import broken_units
from broken_cpu import LAYERS, Broken
from broken_cuda import BrokenCuda
from broken_units import BrokenUnit
from fuzz_campaign import CAMPAIGN, SUPPORT, isolated
from worker_broken import Verdict

from im2win.bench.cpu import commit, versions
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.common.json_text import parsed
from im2win.common.worker_pool import Worker, WorkerError
from im2win.device.cpu import Machine
from im2win.records.record import utc_now
from im2win.registry.sources import combined
from im2win.studies.entries import BROKEN, SCHEMA

LIMIT_S = 150.0  # for a kernel, its build included
PROCESS = 12  # kernels of a process at most: the right kernel is built once for them
Job = Broken | BrokenCuda | BrokenUnit | int | str
KERNELS = ("cpu", "cuda", "reconstructed")


class StateError(ValueError):
    """A file of another campaign. The message names the field."""


def jobs_of(kernels: str) -> list[Job]:
    """What a campaign judges: each kernel of `KERNELS` without a mistake, and with every mistake that is made in it."""
    if kernels == "cpu":
        return [*range(len(LAYERS)), *broken_cpu.injected()]
    if kernels == "cuda":
        return [*broken_cuda.ALL, *broken_cuda.injected()]
    return [*map(BrokenUnit, broken_units.SOURCES), *broken_units.injected()]


def named(job: Job) -> dict[str, Any]:
    """A job in words: kernel, kind of mistake ("" for a kernel without one), and its place."""
    if isinstance(job, int | Broken):
        layer = " ".join(LAYERS[job if isinstance(job, int) else job.layer])
        if isinstance(job, int):
            return {"kernel": layer, "mistake": "", "place": 0}
        mistake = job.mistake
        kind, place = (mistake, 0) if isinstance(mistake, str) else (mistake.kind, mistake.place)
        return {"kernel": layer, "mistake": kind, "place": place}
    if isinstance(job, str):
        return {"kernel": job, "mistake": "", "place": 0}
    return {"kernel": job.kernel, "mistake": job.mistake, "place": job.place}


@functools.cache
def judge_digest() -> str:
    """Digest of the source that makes the mistakes and judges them."""
    names = ("broken_cpu", "broken_cuda", "broken_units", "worker_broken", "oracle", "schedules_dot", "emulated", "waiting_kernels")
    return combined((SUPPORT / f"{name}.py").read_text(encoding="utf-8") for name in names)


@dataclass
class State:
    """What is known of a campaign; it is the result file, too.

    Attributes:
        facts: the study's name, whose `kernels`, machine, versions, commit, date and digests.
        jobs: all. verdicts: those that there are, by job.
    """

    path: Path
    facts: dict[str, Any]
    jobs: list[Job]
    verdicts: dict[Job, Verdict] = field(default_factory=dict)

    @classmethod
    def begun(cls, path: Path, kernels: str) -> State:
        """The state in a file, or a new one where there is none.

        Raises:
            StateError: the file is that of another campaign, or of other source.
        """
        host = Machine.host()
        facts = {
            "study": BROKEN, "schema": SCHEMA, "kernels": kernels, "device": host.name, "brand": host.brand, "versions": versions(),
            "digests": {**digests("cpu" if kernels == "cpu" else "cuda"), CAMPAIGN: judge_digest()},
        }  # fmt: skip
        state = cls(path, {**facts, "commit": commit(), "date": utc_now()}, jobs_of(kernels))
        if path.exists():
            values = parsed(path.read_text(encoding="utf-8"))
            for name, wanted in facts.items():
                held = values.get(name) if isinstance(values, dict) else None
                if held != wanted:
                    raise StateError(f"{path}: `{name}` (={held!r}) must be {wanted!r} to go on; remove the file, or name another one.")
            state.facts |= {name: values[name] for name in ("commit", "date")}
            done = {_key(row): row for row in values["rows"] if "outcome" in row}
            found = [(job, done[_key(named(job))]) for job in state.jobs if _key(named(job)) in done]
            state.verdicts = {job: Verdict(row["outcome"], row["why"]) for job, row in found}
        return state

    def save(self) -> None:
        """Writes the file atomically, with a row for each job; those without a verdict have no outcome."""
        rows = []
        for job in self.jobs:
            verdict = self.verdicts.get(job)
            rows.append({**named(job), **({"outcome": verdict.outcome, "why": verdict.why} if verdict else {})})
        replace_json(self.path, {**self.facts, "rows": rows})

    @property
    def wrong(self) -> list[tuple[Job, Verdict]]:
        """Broken kernels that were missed, and right ones that something was said against."""
        bad = {True: "caught", False: "missed"}
        return [(job, verdict) for job, verdict in self.verdicts.items() if verdict.outcome == bad[named(job)["mistake"] == ""]]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["kernel"], row["mistake"], row["place"]


def judge(worker: Worker, job: Job, until: float = math.inf) -> Verdict | None:
    """The verdict on a kernel; None if the time, by `time.monotonic`, was over before. As in tuning, one that crashes or hangs is caught.

    Raises:
        WorkerError: the process was killed from outside, twice.
    """
    try:
        verdict = worker.call(job, min(LIMIT_S, max(until - time.monotonic(), 0.1)))
        assert isinstance(verdict, Verdict)
        return verdict
    except WorkerError as error:
        if time.monotonic() >= until:
            return None
        if error.killed:
            raise
        return Verdict("caught", f"{error.kind}: {error}")


def judged(
    jobs: Iterable[Job], note: Callable[[Job, Verdict], None] = lambda job, verdict: None, processes: int = 1, until: float = math.inf
) -> list[tuple[Job, Verdict]]:
    """The verdicts on kernels, in the order of the jobs, without those for which the time was too short.

    Only kernels of one layer share a process, so that a wild write harms no other layer.

    Args:
        note: called with each verdict, by one thread at a time.
        processes: kernels at a time. until: when to end, by `time.monotonic`.
    """
    found, lock = dict[Job, Verdict](), threading.Lock()

    def run(group: Sequence[Job]) -> None:
        if time.monotonic() >= until:
            return
        with tempfile.TemporaryDirectory(prefix="im2win-broken-") as folder, isolated(Path(folder), "worker_broken") as worker:
            for job in group:
                verdict = judge(worker, job, until) if time.monotonic() < until else None
                if verdict is None:
                    return
                with lock:
                    found[job] = verdict
                    note(job, verdict)

    jobs = list(jobs)
    with ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(run, group) for group in _groups(jobs)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [(job, found[job]) for job in jobs if job in found]


def _groups(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    kernels: dict[str, list[Job]] = {}
    for job in jobs:
        kernels.setdefault(named(job)["kernel"], []).append(job)
    for group in kernels.values():
        yield from (group[at : at + PROCESS] for at in range(0, len(group), PROCESS))


def run(
    path: Path, kernels: str, *, processes: int = 1, seconds: float = math.inf,
    note: Callable[[Job, Verdict], None] = lambda job, verdict: None,
) -> State:  # fmt: skip
    """Judges the kernels of a campaign that a file lacks.

    Args:
        path: the file, written after each verdict.
        kernels: one of `KERNELS`.
        processes: kernels at a time. seconds: in all; what runs then has no verdict.
        note: called with each verdict.

    Raises:
        StateError: see `State.begun`.
    """
    until = time.monotonic() + seconds
    state = State.begun(path, kernels)

    def keep(job: Job, verdict: Verdict) -> None:
        state.verdicts[job] = verdict
        state.save()
        note(job, verdict)

    judged([job for job in state.jobs if job not in state.verdicts], keep, processes, until)
    state.save()
    return state
