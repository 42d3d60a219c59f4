"""A campaign of random kernels: batches of indices in processes that end, a state file after each batch, failures that can be replayed.

A campaign that may take so many seconds notes what is done by then, and goes on where it was.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz_jobs import Answer, Job, Target

from im2win.bench.cpu import commit, versions
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.common.json_text import parsed
from im2win.common.worker_pool import Worker, WorkerError
from im2win.device.cpu import Machine
from im2win.device.gpu import H200
from im2win.records.record import utc_now
from im2win.registry.sources import combined
from im2win.studies.entries import FUZZ, SCHEMA

SUPPORT = Path(__file__).parent
CAMPAIGN = "campaign"  # in `digests`: of the source that draws cases and compares outputs
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of numpy, of which many processes run
DIED = ("crashed", "timeout")
REFUSED = "refused"
RIGHT = ("equal", "close", REFUSED)


def campaign_digest() -> str:
    """Digest of the source that draws cases, runs them and compares outputs."""
    names = ("fuzz_cases", "fuzz_worker", "oracle", "schedules_dot", "emulated")
    return combined((SUPPORT / f"{name}.py").read_text(encoding="utf-8") for name in names)


class StateError(ValueError):
    """A state file of another campaign. The message names the field."""


@dataclass
class State:
    """What is known of a campaign; it is the result file, too.

    Attributes:
        count: indices that are done. next: all below are done. beyond: ranges that are done behind it, first index and end of each.
        outcomes: how many cases ended how. covered: how many cases had what, by the words of `fuzz_cases.words`.
        refused: why no algorithm computes a problem, with the number of such cases.
        failures: a mapping for each failed case: index, kind, message, case, replay (the command that runs it again).
        peak_bytes: largest resident memory of a process, or of a compiler that it ran. cpu_s: processor time of all of them, seconds.
        device, brand: the CPU's name and model; the emulator runs on it, too. gpu: the GPU whose kernels are emulated; "" on a CPU.
        versions, commit, digests: as other studies hold them, and the digest `CAMPAIGN`.
    """

    target: Target
    seed: int
    count: int = 0
    next: int = 0
    beyond: list[list[int]] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    covered: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    peak_bytes: int = 0
    cpu_s: float = 0.0
    device: str = ""
    brand: str = ""
    gpu: str = ""
    date: str = ""
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    study: str = FUZZ
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        replace_json(path, {"study": self.study, "schema": self.schema, **dataclasses.asdict(self)})

    @classmethod
    def begun(cls, path: Path, target: Target, seed: int) -> State:
        """The state in a file, or a new one where there is none.

        Raises:
            StateError: the file is that of another campaign, or of other source: what it counts was not found by today's.
        """
        host = Machine.host()
        facts: dict[str, Any] = {"device": host.name, "brand": host.brand, "gpu": H200.name if target == "cuda" else ""}
        facts |= {"versions": versions(), "digests": {**digests(target), CAMPAIGN: campaign_digest()}}
        if not path.exists():
            return cls(target, seed, date=utc_now(), commit=commit(), **facts)
        values = parsed(path.read_text(encoding="utf-8"))
        for name, wanted in ({"study": FUZZ, "schema": SCHEMA, "target": target, "seed": seed} | facts).items():
            if not isinstance(values, dict) or values.get(name) != wanted:
                held = values.get(name) if isinstance(values, dict) else None
                raise StateError(f"{path}: `{name}` (={held!r}) must be {wanted!r} to go on; remove the file, or name another one.")
        return cls(**values)

    def missing(self, count: int, size: int) -> list[range]:
        """Batches of at most `size` of the first `count` indices that are not done."""
        starts, ends = zip(*self.beyond, strict=True) if self.beyond else ((), ())
        gaps = [range(first, min(end, count)) for first, end in zip((self.next, *ends), (*starts, count), strict=True)]
        return [gap[at : at + size] for gap in gaps for at in range(0, len(gap), size)]

    def note(self, indices: range, answers: list[Answer]) -> None:
        """Adds the answers of a batch."""
        outcomes, covered, refused = Counter(self.outcomes), Counter(self.covered), Counter(self.refused)
        if any(answer.case is not None for answer in answers):
            from fuzz_cases import words  # imports TVM
        for index, answer in zip(indices, answers, strict=True):
            outcomes[answer.outcome] += 1
            refused.update([answer.message] if answer.outcome == REFUSED else ())
            covered.update(words(answer.case) if answer.case is not None else ())
            self.peak_bytes, self.cpu_s = max(self.peak_bytes, answer.peak_bytes), round(self.cpu_s + answer.cpu_s, 2)
            if answer.outcome not in RIGHT:
                self.failures.append(self._failure(index, answer))
        self.outcomes, self.covered = dict(sorted(outcomes.items())), dict(sorted(covered.items()))
        self.refused = dict(refused.most_common())
        self.failures.sort(key=lambda one: int(one["index"]))
        self._done(indices)

    def _done(self, indices: range) -> None:
        joined: list[list[int]] = [[0, 0]]
        for first, end in sorted([[0, self.next], *self.beyond, [indices.start, indices.stop]]):
            if first <= joined[-1][1]:
                joined[-1][1] = end
            else:
                joined.append([first, end])
        self.next, self.beyond = joined[0][1], joined[1:]
        self.count = sum(end - first for first, end in joined)

    def _failure(self, index: int, answer: Answer) -> dict[str, Any]:
        case = answer.case
        drawn_again = f"--target {self.target} --seed {self.seed} --replay {index}"
        replay = f"--case '{case.to_json()}'" if case is not None else drawn_again
        facts = {"index": index, "seed": self.seed, "kind": answer.outcome, "message": answer.message}
        return {**facts, "case": dataclasses.asdict(case) if case else None, "replay": f"python tests/fuzz/kernels.py {replay}"}


@dataclass(frozen=True)
class Limits:
    """Seconds that a case may take, and those of the first one, which loads and compiles what the others share.

    Attributes:
        until: when the campaign ends, by `time.monotonic`.
    """

    case_s: float = 120.0
    first_s: float = 240.0
    until: float = math.inf

    def of(self, first: bool) -> float:
        """The limit of a case, which may be a process's first."""
        return min(self.first_s if first else self.case_s, max(self.until - time.monotonic(), 0.1))

    @property
    def over(self) -> bool:
        """Whether the campaign's time is over: a case that was ended says nothing."""
        return time.monotonic() >= self.until


def isolated(folder: Path, module: str) -> Worker:
    """A process for cases whose temporary files and caches lie in a folder."""
    paths = [str(SUPPORT), *(path for path in sys.path if path)]
    own = {"TMPDIR": str(folder), "IM2WIN_CACHE": str(folder / "cache"), "IM2WIN_LOGS": str(folder / "logs"), **ONE_THREAD}
    return Worker(module, {"PYTHONPATH": os.pathsep.join(paths), **own}, torch=False)


def answered(worker: Worker, job: Job, limit_s: float) -> Answer:
    """The answer to a job; of a process that died or hung an answer that says so."""
    try:
        answer = worker.call(job, limit_s)
        assert isinstance(answer, Answer)
        return answer
    except WorkerError as error:
        return Answer(error.kind, job.case, str(error))


def checked(job: Job, limits: Limits = Limits(), module: str = "fuzz_worker") -> Answer:
    """Runs one case in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="im2win-fuzz-") as folder, isolated(Path(folder), module) as worker:
        return answered(worker, job, limits.of(first=True))


def batch(target: Target, seed: int, indices: range, limits: Limits = Limits(), module: str = "fuzz_worker") -> list[Answer]:
    """Runs a batch in one process, whose files are then removed. A process that dies or hangs is blamed on the case that it ran.

    Such a case runs once more by itself: the message says whether it fails there, too. When the campaign's time is over there are answers
    to the first indices only, if any.
    """
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory(prefix="im2win-fuzz-") as folder, isolated(Path(folder), module) as worker:
        for index in indices:
            if limits.over:
                break
            job = Job(target, seed, index)
            fresh = not answers or answers[-1].outcome in DIED
            answer = answered(worker, job, limits.of(fresh))
            if answer.outcome in DIED:
                from fuzz_cases import drawn

                job = dataclasses.replace(job, case=drawn(target, seed, index))
                alone = checked(job, limits, module)
                if limits.over:
                    break
                again = "the same" if alone.outcome == answer.outcome else f"{alone.outcome} {alone.message}".strip()
                message = f"{answer.message}; by itself: {again}; cases before it in its process: {indices.start} to {index - 1}"
                answer = dataclasses.replace(answer, case=job.case, message=message)
            answers.append(answer)
    return answers


def run(
    path: Path, target: Target, count: int, seed: int = 0, *, processes: int = 1, size: int = 50, limits: Limits = Limits(),
    module: str = "fuzz_worker", report: Callable[[State], None] = lambda state: None, seconds: float = math.inf,
) -> State:  # fmt: skip
    """Runs the first `count` cases of a seed, or those that a state file lacks.

    Args:
        path: the state file, written after each batch.
        processes: batches at a time. size: cases of a batch.
        module: what the processes run, see `fuzz_worker`.
        report: called after each batch.
        seconds: in all, after which the campaign ends. What runs then has no answer: the next call runs it again.

    Raises:
        StateError: see `State.begun`.
    """
    limits = dataclasses.replace(limits, until=time.monotonic() + seconds)
    state, lock = State.begun(path, target, seed), threading.Lock()

    def done(indices: range) -> None:
        answers = batch(target, seed, indices, limits, module) if not limits.over else []
        if not answers:
            return
        with lock:
            state.note(indices[: len(answers)], answers)
            state.save(path)
            report(state)

    missing = state.missing(count, size)
    with ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(done, indices) for indices in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return state

