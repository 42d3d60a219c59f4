"""From a problem to the record that applies: the user's logs, then those that ship with the package."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm

from im2win.algorithms import ALGORITHMS
from im2win.fingerprint import fingerprint
from im2win.logs import Found, Log, find
from im2win.machine import Machine
from im2win.problem import Conv2d
from im2win.records import Record, TileValue
from im2win.schedules.legality import problems
from im2win.schedules.tile import Tile

PACKAGED = Path(__file__).parent / "tuning_logs"


@dataclass(frozen=True)
class Choice:
    """An algorithm and a tile that a record recommends; `exact` if it was measured for this very layer on this device."""

    algorithm: str
    tile: Tile
    exact: bool
    rung: str


@functools.lru_cache(maxsize=16)
def _log(folder: Path) -> Log:
    return Log(folder)


def open_logs(logs: str | os.PathLike[str] | None) -> list[Log]:
    """The logs to look in, in order.

    Raises:
        LogError: `logs` is a file.
    """
    folders = [Path(logs).resolve()] if logs is not None else []
    return [_log(folder) for folder in (*folders, PACKAGED)]


def stale(record: Record) -> str | None:
    """Why a record no longer applies to this installation, device aside; None if it does."""
    if record.tvm != tvm.__version__:
        return f"recorded with TVM {record.tvm}, this is {tvm.__version__}"
    if record.algorithm not in ALGORITHMS:
        return f"no algorithm is called {record.algorithm!r}"
    if record.fingerprint != fingerprint(record.algorithm):
        return f"its schedule's code has changed since ({record.fingerprint}, now {fingerprint(record.algorithm)})"
    return None


def tile_problems(conv: Conv2d, algorithm: str, tile: dict[str, TileValue], machine: Machine) -> list[str]:
    """What is wrong with a recorded tile for a problem on a machine."""
    row = ALGORITHMS[algorithm]
    if (reason := row.supports(conv)) is not None:
        return [reason]
    try:
        return problems(conv, Tile.from_dict(tile), machine, matrix=row.plan(conv).matrix)
    except ValueError as error:
        return [str(error)]


def search(conv: Conv2d, machine: Machine, names: Sequence[str], logs: str | os.PathLike[str] | None) -> Found:
    """Walks the look-up ladder; the answer names the rung and every record refused on the way, with the reason."""

    def accepts(record: Record) -> str | None:
        return stale(record) or (None if record.algorithm in names else f"algorithm {record.algorithm} was not asked for")

    return find(
        conv,
        machine.name,
        logs=open_logs(logs),
        accepts=accepts,
        legal=lambda problem, name, tile: tile_problems(problem, name, tile, machine),
        threads=machine.threads,
    )


def choose(conv: Conv2d, machine: Machine, names: Sequence[str], logs: str | os.PathLike[str] | None) -> Choice | None:
    """What the ladder recommends; None if only the default tile is left."""
    found = search(conv, machine, names, logs)
    if found.record is None:
        return None
    return Choice(found.record.algorithm, Tile.from_dict(found.record.tile), found.rung == "exact", found.rung)
