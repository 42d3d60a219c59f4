"""Digests of the source that made a result file. They prove more than a commit, which a copy of the source without its history lacks.

Comments, docstrings, layout and the files' names do not count.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from im2win.registry import sources
from im2win.registry.schedules import SCHEDULES

TARGET, SOURCE, CHOICE = "target", "source", "choice"  # what a result file's `digests` hold, beside one for each method, by its name
RUNTIME = "runtime"  # the same where threads of this package run the kernels
MODELS = "models"  # the same of files that time whole models
KERNELS = "kernels"  # how `stale` calls the methods' digests; files of before held one of all methods under this name
_LADDER = "ladder-"  # suites whose rows time kernels beside those of the registry's methods

_SUFFIXES = (".py", ".hpp", ".cpp", ".h", ".c")


@functools.cache
def source_digest() -> str:
    """Digest of all Python and C++ source of the package, as it is on disk at the first call."""
    return _digest(_files(sources.ROOT))


def digests(target: str, models: bool = False) -> dict[str, str]:
    """What a result file carries: the target, digests of the whole source, of what chooses, runs and generates kernels.

    The last ones are by method, under the name of each that the target has. With `models` also that of what compiles everything else in a
    model.
    """
    kernels = {method: sources.code_digest(target, method) for method in methods_of(target)}
    return {TARGET: target, SOURCE: source_digest(), **_beside_kernels(target, models), **kernels}


def _beside_kernels(target: str, models: bool) -> dict[str, str]:
    made = {CHOICE: sources.look_up_digest(target)}
    made |= {RUNTIME: runtime} if (runtime := sources.runtime_digest(target)) else {}
    return {**made, MODELS: sources.model_digest()} if models else made


def methods_of(target: str) -> list[str]:
    """The methods that have kernels for a target, "cpu" or "cuda"."""
    return [key for key, row in SCHEDULES.items() if (row.cuda is not None if target == "cuda" else row.scheduler.family != "none")]


def kernels_of(found: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The methods that digests name, with theirs, in order: equal for equal kernels."""
    return tuple(sorted((name, digest) for name, digest in found.items() if "/" in name))


def same_kernels(found: Mapping[str, str], method: str) -> bool:
    """Whether today's source generates a method's kernels as the source with these digests did."""
    return sources.is_current(found[TARGET], method, found.get(method, ""))


def timed(suite: str, rows: Iterable[Mapping[str, Any]]) -> frozenset[str] | None:
    """The methods whose kernels the rows of a result time, as chosen and as the default; None if they do not name all of them.

    Args:
        suite: the result's.
        rows: with the fields of `im2win.bench.results.Row`.
    """
    named = frozenset(row[name] for row in rows for name in ("algorithm", "untuned_algorithm") if row.get(name))
    return None if suite.startswith(_LADDER) or not named else named


def stale(found: Mapping[str, str], methods: Iterable[str] | None = None) -> str | None:
    """Why a result file is older than the kernels it times, or None if it is not.

    Args:
        found: its digests; empty in files from before they were written.
        methods: those whose kernels it times (`timed`); None for all that its digests name. A file whose digests name none is older.
    """
    if not found:
        return "no digest"
    today = _beside_kernels(found[TARGET], MODELS in found)
    every = [name for name, _ in kernels_of(found)] if methods is None else list(methods)
    changed = [] if every and all(same_kernels(found, method) for method in every) else [KERNELS]
    changed += [name for name in (CHOICE, RUNTIME, MODELS) if found.get(name) != today.get(name)]
    return f"other {' and '.join(changed)}" if changed else None


def _files(folder: Path) -> list[Path]:
    # os.walk follows links to folders, which Path.rglob does only from Python 3.13 on.
    found = [Path(where, name) for where, _, names in os.walk(folder, followlinks=True) for name in names]
    return [path for path in found if path.suffix in _SUFFIXES]


def _digest(paths: Iterable[Path]) -> str:
    return sources.combined(path.read_text(encoding="utf-8") if path.suffix == ".py" else sources.cpp(path) for path in paths)
