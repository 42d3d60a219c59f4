"""Judges deliberately broken kernels, each in a process that may crash or hang, and counts what became of them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from broken_cpu import Broken
from broken_cuda import BrokenCuda
from fuzz_campaign import isolated
from worker_broken import Verdict

from im2win.common.worker_pool import Worker, WorkerError

LIMIT_S = 150.0  # for a kernel, its build included
Job = Broken | BrokenCuda | int | str


def judge(worker: Worker, job: Job) -> Verdict:
    """The verdict on a kernel. As in tuning, one that crashes or does not end is caught."""
    try:
        worker.submit(job)
        verdict = worker.result(LIMIT_S)
        assert isinstance(verdict, Verdict)
        return verdict
    except WorkerError as error:
        return Verdict("caught", f"{error.kind}: {error}")


def judged(jobs: Iterable[Job], note: Callable[[Job, Verdict], None] = lambda job, verdict: None) -> list[tuple[Job, Verdict]]:
    """The verdicts on kernels. Kernels of one layer share a process, so that a wild write harms no other layer."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job if isinstance(job, int) else job.layer if isinstance(job, Broken) else "cuda", []).append(job)
    found: list[tuple[Job, Verdict]] = []
    for group in groups.values():
        with tempfile.TemporaryDirectory(prefix="im2win-broken-") as folder, isolated(Path(folder), "worker_broken") as worker:
            for job in group:
                found.append((job, judge(worker, job)))
                note(*found[-1])
    return found


def counts(found: Iterable[tuple[Job, Verdict]]) -> dict[str, Any]:
    """How many broken kernels were injected and caught, without equivalent ones and those that do not compile; by kind of mistake, too."""
    outcomes: dict[str, Counter[str]] = {}
    for job, verdict in found:
        assert isinstance(job, Broken | BrokenCuda)
        mistake = job.mistake if isinstance(job.mistake, str) else job.mistake.kind
        outcomes.setdefault(mistake, Counter())[verdict.outcome] += 1
    total = sum(outcomes.values(), Counter[str]())
    injected = total["caught"] + total["missed"]
    kinds = {mistake: dict(sorted(one.items())) for mistake, one in sorted(outcomes.items())}
    return {"injected": injected, "caught": total["caught"], "equivalent": total["equivalent"], "refused": total["refused"], "kinds": kinds}
