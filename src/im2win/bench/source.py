"""Digests of the source that made a result file. They prove more than a commit, which a copy of the source without its history lacks.

Comments, docstrings, layout and the files' names do not count.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from im2win.registry import sources

TARGET, SOURCE, KERNELS, CHOICE = "target", "source", "kernels", "choice"  # what a result file's `digests` hold
RUNTIME = "runtime"  # the same where threads of this package run the kernels
MODELS = "models"  # the same of files that time whole models

_SUFFIXES = (".py", ".hpp", ".cpp", ".h", ".c")


@functools.cache
def source_digest() -> str:
    """Digest of all Python and C++ source of the package, as it is on disk at the first call."""
    return _digest(_files(sources.ROOT))


def digests(target: str, models: bool = False) -> dict[str, str]:
    """What a result file carries: the target, digests of the whole source, of what generates its kernels, what chooses and what runs them.

    With `models` also that of what compiles everything else in a model.
    """
    made = {TARGET: target, SOURCE: source_digest(), KERNELS: sources.code_digest(target), CHOICE: sources.look_up_digest(target)}
    made |= {RUNTIME: runtime} if (runtime := sources.runtime_digest(target)) else {}
    return {**made, MODELS: sources.model_digest()} if models else made


def stale(found: Mapping[str, str]) -> str | None:
    """Why a result file is older than the kernels it times, or None if it is not.

    Args:
        found: its digests; empty in files from before they were written.
    """
    if not found:
        return "no digest"
    today = digests(found[TARGET], models=MODELS in found)
    changed = [name for name in (KERNELS, CHOICE, RUNTIME, MODELS) if found.get(name) != today.get(name)]
    return f"other {' and '.join(changed)}" if changed else None


def _files(folder: Path) -> list[Path]:
    # os.walk follows links to folders, which Path.rglob does only from Python 3.13 on.
    found = [Path(where, name) for where, _, names in os.walk(folder, followlinks=True) for name in names]
    return [path for path in found if path.suffix in _SUFFIXES]


def _digest(paths: Iterable[Path]) -> str:
    return sources.combined(path.read_text(encoding="utf-8") if path.suffix == ".py" else sources.cpp(path) for path in paths)
