"""A mutation run: every mutant of a sample in a copy of the source, against the tests that should catch it, in parallel processes.

The working tree stays as it is. Each of the parallel places has its own copy, and each pytest its own folder for temporary files, built
operators and tuning records, so that nothing that another mutant left is used. The copies' byte code is checked by the text's hash: a
changed file of the same size and time is compiled anew.
"""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from mutants import Mutant
from mutation_plugin import EVENTS, TREE

from im2win.common.files import replace_json
from im2win.common.json_text import parsed
from im2win.studies.entries import INCOMPETENT, KILLED, SURVIVED, TIMEOUT

COPIED = ("src", "compute", "schedules", "reconstruct", "tests", "pyproject.toml")  # a tree's own; it links to everything else
_LEFT_OUT = ("build", "dist", *COPIED)
PACKAGE = "src/im2win"
BASELINE_S = 900.0  # seconds that a file of tests may take without a mutant
_COLLECTED_NOT = 2  # pytest's exit status where a file cannot be imported


class CampaignError(RuntimeError):
    """A run that cannot go on. The message says why."""


@dataclass(frozen=True)
class Limits:
    """Seconds that pytest may take beyond its share, and the share: so many times what the same files took without a mutant.

    Attributes:
        until: when the whole run ends, by `time.monotonic`.
    """

    start_s: float = 30.0
    factor: float = 3.0
    until: float = math.inf

    def of(self, seconds: float) -> float:
        """The limit of what takes `seconds` without a mutant."""
        return min(self.start_s + self.factor * seconds, self.left)

    @property
    def left(self) -> float:
        """Seconds until the run ends, at least one."""
        return max(self.until - time.monotonic(), 1.0)

    @property
    def over(self) -> bool:
        """Whether the run's time is over: what was ended says nothing."""
        return time.monotonic() >= self.until


@dataclass(frozen=True)
class Ran:
    """How pytest ended: its exit status (None: it ran out of time), seconds, and what the plugin noted."""

    status: int | None
    seconds: float
    events: tuple[dict[str, str], ...] = ()
    output: str = ""

    def of(self, kind: str) -> list[dict[str, str]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def last(self) -> str:
        """The test that ran last."""
        return next((event["test"] for event in reversed(self.events) if event["kind"] == "started"), "")


@dataclass(frozen=True)
class Baseline:
    """A file of tests, or a test, without a mutant: its seconds, and what fails, which is then left out.

    Attributes:
        skipped: tests that this machine cannot run. refused: why no test of the file can be run here; "" where they can.
    """

    seconds: float
    tests: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        outcome: "killed": a test failed, or the process died; "survived": none did; "timeout": it did not end; "incompetent": the
            changed file cannot even be imported.
        test: the test that failed, died or did not end. reason: its message.
        left_out: tests of a survivor that could not be run here, or not in the time.
    """

    outcome: str
    seconds: float
    test: str = ""
    reason: str = ""
    left_out: list[str] = field(default_factory=list)


class Tree:
    """A copy of the source in which mutants are applied one at a time, with the CPUs of its processes (None: all)."""

    def __init__(self, root: Path, folder: Path, cpus: Collection[int] | None = None) -> None:
        self.folder, self.cpus = folder, cpus
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped = False
        folder.mkdir(parents=True)
        for entry in root.iterdir():
            if entry.name in COPIED:
                ignored = shutil.ignore_patterns("__pycache__")
                _copy(entry, folder / entry.name, ignored)
            elif not entry.name.startswith(".") and entry.name not in _LEFT_OUT:
                (folder / entry.name).symlink_to(entry)
        words = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *(name for name in COPIED if (folder / name).is_dir())]
        subprocess.run([sys.executable, *words], cwd=folder, stdout=subprocess.DEVNULL, check=False)

    def pytest(self, tests: Sequence[str], *, limit_s: float, test_s: float, first: bool, without: Iterable[str] = ()) -> Ran:
        """Runs tests of the tree.

        Args:
            tests: files or tests below the tree, in order.
            limit_s: seconds in all. test_s: of one test.
            first: whether to end with the first failure.
            without: tests to leave out.
        """
        with tempfile.TemporaryDirectory(prefix="run-", dir=self.folder.parent) as place:
            own = Path(place)
            events = own / "events"
            events.touch()
            left_out = [word for name in without for word in ("--deselect", name)]
            command = [
                sys.executable, "-m", "pytest", *tests, *(["-x"] if first else []), *left_out, "-q", "-m", "not slow",
                "-p", "no:cacheprovider", "-p", "mutation_plugin", "--basetemp", str(own / "tests"), "--rootdir", str(self.folder),
                "-c", str(self.folder / "pyproject.toml"), "-o", "addopts=--import-mode=importlib", "-o", f"timeout={test_s:.0f}",
            ]  # fmt: skip
            started = time.monotonic()
            with open(own / "output", "wb") as output:
                process = subprocess.Popen(
                    command, cwd=self.folder, env=self._environment(own, events), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                self._running = process
                if self.cpus is not None:
                    os.sched_setaffinity(process.pid, self.cpus)
                try:
                    status: int | None = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    status = None
                finally:
                    self._running = None
                    _end(process)
            if self._stopped:
                raise CampaignError("stopped")
            seconds = time.monotonic() - started
            noted = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
            text = (own / "output").read_text(encoding="utf-8", errors="replace")
            return Ran(status, round(seconds, 2), tuple(noted), text[-4000:])

    def stop(self) -> None:
        """Ends what runs, from another thread, which then has no result."""
        self._stopped = True
        if (process := self._running) is not None:
            _end(process)

    def imports(self, file: str) -> bool:
        """Whether a file of the package can be imported; files elsewhere need not be."""
        inside = (self.folder / PACKAGE).resolve()
        for path, _, names in os.walk(inside, followlinks=True):
            where = Path(path)
            if (self.folder / file).name in names and (where / Path(file).name).resolve() == (self.folder / file).resolve():
                module = ".".join(["im2win", *where.relative_to(inside).parts, Path(file).stem])
                break
        else:
            return True
        with tempfile.TemporaryDirectory(prefix="run-", dir=self.folder.parent) as place:
            environment = self._environment(Path(place), Path(place, "events"))
            command = [sys.executable, "-c", f"import {module.removesuffix('.__init__')}"]
            done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, timeout=120, check=False)
        return done.returncode == 0

    def _environment(self, own: Path, events: Path) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(self.folder / "src"), str(self.folder / "tests" / "support"), *filter(None, given)]
        folders = {"TMPDIR": own / "tmp", "IM2WIN_CACHE": own / "cache", "IM2WIN_LOGS": own / "logs", "XDG_CACHE_HOME": own / "xdg",
                   "XDG_DATA_HOME": own / "data"}  # fmt: skip
        (own / "tmp").mkdir()
        added = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", EVENTS: str(events)}
        return {**os.environ, **added, TREE: str(self.folder), **{name: str(path) for name, path in folders.items()}}


def _copy(entry: Path, to: Path, ignored: Callable[..., Any]) -> None:
    if entry.is_dir():
        shutil.copytree(entry, to, symlinks=True, ignore=ignored)
    else:
        shutil.copy2(entry, to)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started, which may have sessions of their own."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for one in (process, *family):
        try:
            one.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    process.wait()


def baseline(tree: Tree, test: str, limit_s: float = BASELINE_S, without: Sequence[str] = ()) -> Baseline:
    """Runs a file of tests, or one test, without a mutant; `without`: tests to leave out."""
    ran = tree.pytest([test], limit_s=limit_s, test_s=limit_s, first=False, without=without)
    if ran.status not in (0, 1):
        noted = ran.of("not collected")
        why = noted[0]["reason"] if noted else ran.output.strip().rpartition("\n")[2]
        return Baseline(ran.seconds, refused=f"no end in {limit_s:.0f} s" if ran.status is None else why or f"exit status {ran.status}")
    failed = sorted({event["test"] for event in ran.of("failed")})
    return Baseline(ran.seconds, len(ran.of("started")), len({event["test"] for event in ran.of("skipped")}), failed)


def judged(
    tree: Tree, mutant: Mutant, tests: Mapping[str, Baseline], limits: Limits = Limits(), without: Sequence[str] = ()
) -> Verdict:
    """What becomes of a mutant in a tree.

    Args:
        tests: the files or tests that should catch it, in order, with how they run without it.
        without: tests to leave out, beside those that fail without it.
    """
    usable = _usable(tests)
    path = tree.folder / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(before), encoding="utf-8")
    try:
        ran = tree.pytest(
            list(usable),
            limit_s=limits.of(sum(known.seconds for known in usable.values())),
            test_s=limits.of(max(known.seconds for known in usable.values())),
            first=True,
            without=[*without, *(name for known in usable.values() for name in known.failed)],
        )
        found = _verdict(tree, mutant, ran)
        return replace(found, left_out=[name for name in tests if name not in usable]) if found.outcome == SURVIVED else found
    finally:
        path.write_text(before, encoding="utf-8")


def _usable(tests: Mapping[str, Baseline]) -> dict[str, Baseline]:
    """The tests that can be run here."""
    return {name: known for name, known in tests.items() if not known.refused}


def _verdict(tree: Tree, mutant: Mutant, ran: Ran) -> Verdict:
    if ran.status == 0:
        return Verdict(SURVIVED, ran.seconds)
    if ran.status is None:
        return Verdict(TIMEOUT, ran.seconds, ran.last)
    if failed := [*ran.of("failed"), *ran.of("not collected")]:
        reason = failed[0]["reason"]
        if ran.status == _COLLECTED_NOT and not tree.imports(mutant.file):
            return Verdict(INCOMPETENT, ran.seconds, failed[0]["test"], reason)
        return Verdict(TIMEOUT if reason.startswith("Failed: Timeout") else KILLED, ran.seconds, failed[0]["test"], reason)
    if ran.status < 0 or ran.status >= 128:
        return Verdict(KILLED, ran.seconds, ran.last, f"the process died (exit status {ran.status})")
    if not tree.imports(mutant.file):  # a module that the tests' own helpers import
        return Verdict(INCOMPETENT, ran.seconds, "", ran.output.strip().rpartition("\n")[2])
    raise CampaignError(f"{mutant.name}: pytest ended with status {ran.status}:\n{ran.output}")


@dataclass
class State:
    """What is known of a run; it is the result file, too.

    Attributes:
        facts: the study's name, machine, versions, digests of source and tests, date.
        baselines: by file or test. verdicts: by mutant.
    """

    path: Path
    facts: dict[str, Any]
    mutants: list[Mutant]
    baselines: dict[str, Baseline] = field(default_factory=dict)
    verdicts: dict[Mutant, Verdict] = field(default_factory=dict)

    @classmethod
    def begun(cls, path: Path, facts: Mapping[str, Any], mutants: Sequence[Mutant], again: Collection[str] = ()) -> State:
        """The state in a file, without mutants of the outcomes in `again`, or a new one where there is none.

        Raises:
            CampaignError: the file is another study's, another machine's, or of other source; or of other tests and `again` is empty.
        """
        state = cls(path, dict(facts), list(mutants))
        if not path.exists():
            return state
        try:
            values = parsed(path.read_text(encoding="utf-8"))
            held = {name: values.get(name) for name in facts}
            rows, known = values["mutants"], values["baselines"]
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise CampaignError(f"{path}: not a file of a mutation run ({error!r}).") from error
        for name in ("study", "schema", "device", "digests", *(() if again else ("tests",))):
            if held[name] != facts[name]:
                raise CampaignError(
                    f"{path}: `{name}` (={held[name]!r}) must be {facts[name]!r} to go on; remove the file, or name another one."
                    + (" With `--again survived` what survived runs against today's tests." if name == "tests" else "")
                )
        if held["tests"] == facts["tests"]:
            state.baselines = {name: Baseline(**one) for name, one in known.items()}
        for row in rows:
            mutant = Mutant(*(row[name] for name in Mutant.__dataclass_fields__))
            if mutant in state.mutants and "outcome" in row and row["outcome"] not in again:
                state.verdicts[mutant] = Verdict(*(row[name] for name in Verdict.__dataclass_fields__))
        return state

    def save(self, equivalent: Callable[[Mutant], str]) -> None:
        """Writes the file atomically.

        Args:
            equivalent: the reason why a mutant computes the same, or "".
        """
        rows = []
        for mutant in self.mutants:
            row = asdict(mutant)
            if verdict := self.verdicts.get(mutant):
                row |= asdict(verdict)
                if verdict.outcome == SURVIVED and (reason := equivalent(mutant)):
                    row["equivalent"] = reason
            rows.append(row)
        known = {name: asdict(one) for name, one in sorted(self.baselines.items())}
        replace_json(self.path, {**self.facts, "baselines": known, "mutants": rows})


def run(
    root: Path, state: State, tests: Callable[[str], Sequence[str]], *, without: Sequence[str] = (), processes: int = 1,
    folder: Path | None = None, equivalent: Callable[[Mutant], str] = lambda mutant: "", limits: Limits = Limits(),
    say: Callable[[str], None] = print, seconds: float = math.inf, most_s: float = BASELINE_S,
) -> State:  # fmt: skip
    """Runs the mutants of a state that have no verdict yet.

    Mutants whose tests take longest come first, so that all processes end at about the same time. With a limit on the time those whose
    tests are quickest come first. What runs when the time is over is ended and has no verdict: the next call runs it again.

    Args:
        root: of the repository. It is only read.
        tests: the files or tests that should catch a mutant of a file, in order.
        without: tests to leave out.
        processes: pytests at a time. Each has two CPUs, as far as there are so many, and shares them with its neighbours.
        folder: for the copies; a temporary one if None. It is empty again at the end.
        say: called with a line for each verdict.
        seconds: in all, after which the run ends.
        most_s: seconds that a file of tests may take without a mutant; one that takes longer is left out.

    Raises:
        MutantError: a mutant is not one of this source. CampaignError: pytest itself failed.
    """
    missing = [mutant for mutant in state.mutants if mutant not in state.verdicts]
    for mutant in missing:
        mutant.applied((root / mutant.file).read_text(encoding="utf-8"))
    started, lock = time.monotonic(), threading.Lock()
    limits = replace(limits, until=started + seconds)

    def of(mutant: Mutant) -> dict[str, Baseline]:
        return {name: state.baselines[name] for name in tests(mutant.file)}

    with tempfile.TemporaryDirectory(prefix="im2win-mutation-", dir=folder) as place:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()

        def in_a_tree(job: Callable[[Tree], None]) -> None:
            tree = trees.get()
            try:
                if not limits.over:
                    job(tree)
            finally:
                trees.put(tree)

        def keep(line: str) -> None:
            with lock:
                state.save(equivalent)
                say(f"{time.monotonic() - started:6.0f} s  {line}")

        def run_baseline(name: str) -> None:
            def job(tree: Tree) -> None:
                known = baseline(tree, name, min(most_s, limits.left), without)
                if limits.over:
                    return
                with lock:
                    state.baselines[name] = known
                lost = known.refused or (f"{len(known.failed)} fail here and are left out" if known.failed else "")
                keep(f"without a mutant: {name}: {known.tests} tests, {known.seconds:.0f} s{'; ' if lost else ''}{lost}")

            in_a_tree(job)

        def run_mutant(mutant: Mutant) -> None:
            def job(tree: Tree) -> None:
                found = judged(tree, mutant, of(mutant), limits, without)
                if limits.over:
                    return
                with lock:
                    state.verdicts[mutant] = found
                keep(f"{len(state.verdicts)}/{len(state.mutants)} {found.outcome}: {mutant.name} {found.test}".rstrip())

            in_a_tree(job)

        with ThreadPoolExecutor(processes) as pool:
            every = list(pool.map(lambda index: Tree(root, Path(place, str(index)), _cpus(index)), range(processes)))
            for tree in every:
                trees.put(tree)
            needed = dict.fromkeys(name for mutant in missing for name in tests(mutant.file))
            _all(pool, run_baseline, [name for name in needed if name not in state.baselines], every)
            known = [mutant for mutant in missing if all(name in state.baselines for name in tests(mutant.file))]
            able = [mutant for mutant in known if _usable(of(mutant))]
            for mutant in set(known).difference(able):
                say(f"not run, since none of its tests can be run here: {mutant.name}")
            longest = math.isinf(seconds)
            able.sort(key=lambda mutant: sum(one.seconds for one in _usable(of(mutant)).values()), reverse=longest)
            _all(pool, run_mutant, able, every)
    state.save(equivalent)
    return state


def _all(pool: ThreadPoolExecutor, job: Callable[[Any], None], items: Iterable[Any], trees: Iterable[Tree]) -> None:
    futures = [pool.submit(job, item) for item in items]
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        for tree in trees:
            tree.stop()
        raise


def _cpus(index: int) -> set[int] | None:
    """Two neighbouring CPUs of those that this process may use; None where the system cannot say."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus = sorted(os.sched_getaffinity(0))
    return {cpus[index % len(cpus)], cpus[(index + 1) % len(cpus)]}
