"""Compiled convolutions in the cache folder, so that the next model with the same layers compiles none of them.

``<folder>/<device>/objects/<artefact>.<digest>.o`` is an object file, and the JSON file of the same name says what it takes. The
artefact's name covers problem, algorithm, tile, the source of the method's kernels, device and versions (`im2win.builder.cache`); the
digest covers the function's name and the source of what makes object files of kernels. Which algorithm and tile a problem gets is kept as
for `im2win.torch.optimize` (`im2win.builder.selections`), and is looked up again when records or code change.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win.builder.cache import artefact_name
from im2win.builder.selections import Question, Selection, Selections
from im2win.common.files import default_folder, not_ours, replace_bytes
from im2win.common.json_text import parsed
from im2win.device.cpu import Machine
from im2win.frontends.models.program import Arguments
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.registry.sources import exporting_digest
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

_log = logging.getLogger("im2win")
_DIGITS = 12
_USE = "compiled"  # how selections of these kernels differ from those of operators, whose tiers have other names


@dataclass(frozen=True)
class Job:
    """Look up a problem's algorithm and tile on a CPU, and compile them into the object file `path` as the function `symbol`."""

    conv: Conv2d
    symbol: str
    machine: Machine
    logs: tuple[str, ...]
    accuracy: Accuracy
    path: Path


@dataclass(frozen=True)
class Built:
    """Result of a job: algorithm, tile and the tier of the look-up that they come from.

    Attributes:
        arguments: shape and dtype of every tensor that the function takes.
        workspace: bytes that the function takes in the C library (`im2win.export.c_abi`), for the whole call and for each of its tasks.
    """

    symbol: str
    path: Path
    algorithm: str
    tile: Any
    tier: str
    arguments: Arguments
    workspace: tuple[int, int]


def symbol_of(conv: Conv2d) -> str:
    """The function's name of a problem in every object file, so that models share them."""
    return f"conv_{hashlib.sha256(str(conv).encode()).hexdigest()[:_DIGITS]}"


def find(jobs: Sequence[Job]) -> list[Built | None]:
    """For each job what the cache has, its object file copied to the job's path; None where it must be compiled.

    All jobs are for one machine and search the same records.
    """
    if not jobs:
        return []
    selections = _selections(jobs[0])
    return [None if (kept := selections.find(_question(job))) is None else _selected(job, kept) for job in jobs]


def store(job: Job, built: Built) -> None:
    """Stores an object file. A folder that cannot be written is left as it is."""
    try:
        _write(job, built)
    except OSError as error:
        _log.info("a compiled kernel is not kept in %s (%s)", default_folder(), error)


def keep(done: Sequence[tuple[Job, Built]]) -> None:
    """Keeps what was selected for jobs of one machine, with the same records, whose object files are stored."""
    if done:
        chosen = {_question(job): Selection(built.algorithm, built.tile.as_dict(), built.tier, "") for job, built in done}
        _selections(done[0][0]).keep(chosen)


def _selections(job: Job) -> Selections:
    return Selections(default_folder(), job.machine, job.logs)


def _question(job: Job) -> Question:
    return Question(job.conv, job.accuracy, "default", _USE)


def _paths(job: Job, algorithm: str, tile: dict[str, Any]) -> tuple[Path, Path]:
    """Of the object file and of what is said of it."""
    digest = hashlib.sha256(f"{job.symbol} {exporting_digest()}".encode()).hexdigest()[:_DIGITS]
    name = f"{artefact_name(job.conv, algorithm, tile, job.machine)}.{digest}"
    folder = default_folder() / job.machine.name / "objects"
    return folder / f"{name}.o", folder / f"{name}.json"


def _selected(job: Job, kept: Selection) -> Built | None:
    try:
        tile = backend_for(job.machine).tile(schedule_of(kept.algorithm), kept.tile)
    except (ValueError, TypeError, KeyError):  # of a file that is damaged
        return None
    return held(job, kept.algorithm, tile, kept.tier)


def held(job: Job, algorithm: str, tile: Any, tier: str) -> Built | None:
    """What the cache has for a job whose algorithm and tile are known; see `find`.

    An object file is code: one that another user could have written, or that has changed, is not used.
    """
    try:
        code, facts = _paths(job, algorithm, tile.as_dict())
        if not code.exists() or not_ours(code) or not_ours(facts):
            return None
        content, said = code.read_bytes(), parsed(facts.read_text(encoding="utf-8"))
        if said["object"] != hashlib.sha256(content).hexdigest():
            return None
        arguments = [(tuple(int(extent) for extent in shape), str(dtype)) for shape, dtype in said["arguments"]]
        serial, task = map(int, said["workspace"])
        job.path.write_bytes(content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.info("%s is compiled again (%s)", job.conv, error)
        return None
    return Built(job.symbol, job.path, algorithm, tile, tier, arguments, (serial, task))


def _write(job: Job, built: Built) -> None:
    content = built.path.read_bytes()
    said = {"object": hashlib.sha256(content).hexdigest(), "arguments": built.arguments, "workspace": built.workspace}
    code, facts = _paths(job, built.algorithm, built.tile.as_dict())
    replace_bytes(code, content)
    replace_bytes(facts, json.dumps(said).encode())
