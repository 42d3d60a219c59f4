"""What the look-up selected for layers, kept so that a later process neither reads records nor ranks tiles nor imports TVM's compiler.

A file of the artefact cache holds a device's selections, ``<folder>/<device>/selections.json``. They are valid while everything that the
look-up reads is unchanged: the package's files, TVM, and the folders of records that are searched. Path, size and time of change of every
file tell whether it is.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from im2win.common.files import replace_text
from im2win.common.json_text import parsed
from im2win.common.locking import LogError, locked
from im2win.records.folders import Logs, own_folders
from im2win.records.tiers import Untuned
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from im2win.registry.backends import Device

_log = logging.getLogger("im2win")
_PACKAGE = Path(__file__).parent.parent
_DIGITS = 16
_MOST_STATES = 4  # of records and code, whose selections a file holds


@dataclass(frozen=True)
class Selection:
    """The selection for a layer as plain values.

    Attributes:
        algorithm: algorithm and schedule in one word; "" if the layer gets no operator, for the reason in `tier`.
        tile: the schedule's tile as plain values.
        tier: tier of the look-up.
        name: of the artefact.
    """

    algorithm: str
    tile: Mapping[str, Any]
    tier: str
    name: str


@dataclass(frozen=True)
class Question:
    """What is asked of the look-up, beside device and records. `use` keeps selections apart whose tiers are called otherwise."""

    conv: Conv2d
    accuracy: Accuracy
    untuned: Untuned
    use: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.conv), self.accuracy, self.untuned, self.use)))


class Selections:
    """The kept selections of a device for folders of records as they are now.

    Args:
        folder: of the artefact cache.
        device: `Machine` or `Gpu`.
        logs: as for `im2win.build`.
    """

    def __init__(self, folder: Path, device: Device, logs: Logs) -> None:
        self._path = folder / device.name / "selections.json"
        self._state = _digest([_installed(), repr(device), [[folder, _files(folder)] for folder in own_folders(logs)]])

    def find(self, question: Question) -> Selection | None:
        """The kept selection; None if there is none, or if it is out of date."""
        values = _read(self._path).get(self._state, {}).get(str(question))
        try:
            return None if values is None else Selection(**values)
        except TypeError:  # of another version, or damaged
            return None

    def keep(self, found: Mapping[Question, Selection]) -> None:
        """Adds selections to the file. A folder that cannot be written is left as it is."""
        if not found:
            return
        try:
            with locked(self._path.parent / ".lock"):
                states = dict(_read(self._path))
                mine = {**states.pop(self._state, {}), **{str(question): asdict(one) for question, one in found.items()}}
                states = dict([*states.items(), (self._state, mine)][-_MOST_STATES:])
                replace_text(self._path, json.dumps(states) + "\n")
        except (LogError, OSError) as error:
            _log.info("no selection is kept in %s (%s)", self._path, error)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = os.stat(path)
        return _parsed(path, (found.st_ino, found.st_mtime_ns, found.st_size))
    except (OSError, ValueError):
        return {}


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, version: tuple[int, ...]) -> dict[str, Any]:
    values = parsed(path.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) and all(isinstance(one, dict) for one in values.values()) else {}


@functools.cache
def _installed() -> str:
    """A digest of what this process runs: the package's files, the shipped records among them, and TVM."""
    spec = importlib.util.find_spec("tvm")  # does not import it
    origin = spec.origin if spec is not None else None
    return _digest([_files(_PACKAGE), [] if origin is None else _stamp(origin)])


def _files(folder: str | Path) -> list[tuple[str, int, int]]:
    """Every file below a folder, links followed, but for what Python compiles and for locks; a file that stands in the folder's place."""
    return sorted(_stamp(path) for path in _below(folder))


def _below(folder: str | Path) -> Iterator[str]:
    if os.path.isfile(folder):
        yield str(folder)
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.join(parent, name) for name in names if not name.endswith((".lock", ".pyc")))


def _stamp(path: str) -> tuple[str, int, int]:
    try:
        found = os.stat(path)
    except OSError:  # it has gone since the folder was listed
        return path, -1, -1
    return path, found.st_mtime_ns, found.st_size


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:_DIGITS]
