"""A folder of tuning records: appending under a lock, reading, merging and pruning.

Layout: ``<folder>/<device>/<conv key>.jsonl``, one record a line. Reading never raises: a line or a file that cannot be used is reported as
a `Problem`. Writing raises `LogError`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win.common.json_text import parsed
from im2win.common.locking import LogError, locked, write_lines, writing
from im2win.records.record import SCHEMA, Record, RecordError, is_device, parse_key
from im2win.spec.conv2d import Conv2d

Accepts = Callable[[Record], str | None]

_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Problem:
    """A line (counted from 1) or a whole file (line 0) that reading skipped, and why."""

    path: Path
    line_number: int
    reason: str


@dataclass(frozen=True)
class Merged:
    """Result of `merge` in numbers of records; `broken` counts the lines of the sources that could not be read."""

    added: int = 0
    duplicates: int = 0
    broken: int = 0


@dataclass(frozen=True)
class Pruned:
    """Result of `Log.prune` in numbers of records kept and dropped (`broken` counts lines)."""

    kept: int = 0
    slower: int = 0
    stale: int = 0
    failing: int = 0
    broken: int = 0


@dataclass(frozen=True)
class _File:
    stamp: tuple[int, int, int]
    records: tuple[Record, ...] = ()
    problems: tuple[Problem, ...] = ()
    newer: tuple[bytes, ...] = ()  # lines of releases to come, which only they can judge


def _encode(records: Iterable[Record]) -> bytes:
    return "".join(record.to_line() + "\n" for record in records).encode("ascii")


def _is_newer(line: bytes) -> bool:
    """Whether a line is a JSON object that says that it has a later schema than this release reads."""
    try:
        schema = parsed(line)["schema"]
    except (ValueError, TypeError, KeyError):
        return False
    return type(schema) is int and schema > SCHEMA


def _replace_file(path: Path, records: Sequence[Record], newer: Sequence[bytes] = ()) -> None:
    """Rewrites a file atomically, so that a reader sees either the old or the new content. Without lines it removes the file.

    `newer`: lines behind the records, as they are.
    """
    if not records and not newer:
        path.unlink()
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(_encode(records) + b"".join(line + b"\n" for line in newer))
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _parse_line(path: Path, line: bytes) -> Record:
    record = Record.from_line(line.decode("utf-8"))
    for name, here in (("conv", path.name[: -len(_SUFFIX)]), ("device", path.parent.name)):
        if getattr(record, name) != here:
            raise RecordError(f"`{name}` (={getattr(record, name)!r}) must be {here!r}, as the path of its file says.")
    return record


def _parse_file(path: Path, stamp: tuple[int, int, int], data: bytes) -> _File:
    records, problems, newer = [], [], []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                records.append(_parse_line(path, line))
            except ValueError as error:  # RecordError, or UnicodeDecodeError
                problems.append(Problem(path, number, str(error)))
                newer += [line] if _is_newer(line) else []
    return _File(stamp, tuple(records), tuple(problems), tuple(newer))


def best_first(records: Iterable[Record]) -> list[Record]:
    """The records that have times, sorted by `Record.cost`."""
    return sorted((r for r in records if r.seconds is not None), key=lambda r: (r.cost, r.date))


def _best(records: Sequence[Record], keep: int) -> list[Record]:
    """The `keep` best records of each group that competes, in their original order."""
    places: Counter[tuple[Any, ...]] = Counter()
    best = set()
    for record in best_first(records):
        rivals = (record.method, record.target, record.threads, record.tvm, record.generator)
        places[rivals] += 1
        if places[rivals] <= keep:
            best.add(id(record))
    return [record for record in records if id(record) in best]


class Log:
    """A folder of records. It need not exist before the first `append`.

    Content is cached in memory. A file is read again when its time, size or identity changes.

    Args:
        folder: the folder that holds one folder for each device.
        lock_timeout_s: how long a writer waits for another one, in seconds.

    Raises:
        LogError: `folder` is a file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, lock_timeout_s: float = 30.0) -> None:
        self.folder = Path(folder)
        self.lock_timeout_s = lock_timeout_s
        self._files: dict[Path, _File] = {}
        self._strangers: dict[str, list[Problem]] = {}
        if self.folder.exists() and not self.folder.is_dir():
            raise LogError(f"`{self.folder}` is a file; choose a folder for the logs.")

    def __repr__(self) -> str:
        return f"Log({str(self.folder)!r})"

    # --- reading -------------------------------------------------------------------------------------------------

    @property
    def problems(self) -> list[Problem]:
        """Lines and files that could not be used in all that was read so far."""
        found = [problem for file in list(self._files.values()) for problem in file.problems]
        found += [problem for problems in list(self._strangers.values()) for problem in problems]
        return sorted(found, key=lambda problem: (problem.path, problem.line_number))

    def path(self, conv: Conv2d, device: str) -> Path:
        """The file of a layer on a device."""
        return self.folder / device / f"{conv}{_SUFFIX}"

    def devices(self) -> list[str]:
        """Slugs of the devices that have a folder here, sorted."""
        try:
            with os.scandir(self.folder) as entries:
                return sorted(entry.name for entry in entries if is_device(entry.name) and entry.is_dir())
        except OSError:
            return []

    def convs(self, device: str) -> list[Conv2d]:
        """The layers with a file under `device`, sorted by key. Files whose names do not match ``*.jsonl`` are ignored."""
        try:
            names = sorted(name for name in os.listdir(self.folder / device) if name.endswith(_SUFFIX) and not name.startswith("."))
        except OSError:
            names = []
        found: list[Conv2d] = []
        self._strangers[device] = strangers = []
        for name in names:
            try:
                found.append(parse_key(name[: -len(_SUFFIX)]))
            except ValueError as error:
                strangers.append(Problem(self.folder / device / name, 0, f"the file's name is no key: {error}"))
        return found

    def read(self, conv: Conv2d, device: str) -> list[Record]:
        """The valid records of a layer on a device, in the order they were written; [] if there are none."""
        return list(self._load(self.path(conv, device)).records)

    def __iter__(self) -> Iterator[Record]:
        """All records, by device and layer."""
        for device in self.devices():
            for conv in self.convs(device):
                yield from self.read(conv, device)

    def _load(self, path: Path) -> _File:
        stamp = (0, 0, 0)
        try:
            status = os.stat(path)
            stamp = status.st_mtime_ns, status.st_size, status.st_ino
            if (known := self._files.get(path)) and known.stamp == stamp:
                return known
            file = _parse_file(path, stamp, path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            self._files.pop(path, None)
            return _File(stamp)
        except OSError as error:
            file = _File(stamp, problems=(Problem(path, 0, f"cannot be read: {error.strerror}"),))
        self._files[path] = file
        return file

    # --- writing -------------------------------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """Adds one line, which is on the disk when this returns. Any number of processes may append at once.

        Raises:
            LogError: the folder cannot be written, the disk is full (nothing of the line remains then), or the lock is not released in
                time.
        """
        path = self.path(record.conv2d, record.device)
        with self._locked(record.device), writing(path):
            write_lines(path, _encode([record]))

    def _locked(self, device: str) -> contextlib.AbstractContextManager[None]:
        return locked(self.folder / device / ".lock", self.lock_timeout_s)

    def prune(self, keep: int = 1, *, accepts: Accepts | None = None, device: str | None = None, dry_run: bool = False) -> Pruned:
        """Keeps the `keep` best correct records (`Record.cost`) of each algorithm for every layer and device.

        Drops all others and broken lines. Lines of later schemas stay: another release wrote them.

        Only records with the same target, threads, TVM and generator compete. A file without remaining records is removed.

        Args:
            keep: records of an algorithm to keep, at least 1.
            accepts: returns the reason why a record is stale, or None; without it no record is stale.
            device: prune only this device's folder.
            dry_run: only count.

        Raises:
            ValueError: `keep` is less than 1.
            LogError: a file cannot be read or rewritten; the files before it are pruned, this one and those after it are unchanged.
        """
        if keep < 1:
            raise ValueError(f"`keep` (={keep}) must be at least 1.")
        total: Counter[str] = Counter()
        for name in self.devices() if device is None else [device]:
            if not (convs := self.convs(name)):
                continue
            with contextlib.nullcontext() if dry_run else self._locked(name):
                for conv in convs:
                    total.update(self._prune_file(self.path(conv, name), keep, accepts, dry_run))
        return Pruned(**total)

    def _prune_file(self, path: Path, keep: int, accepts: Accepts | None, dry_run: bool) -> Counter[str]:
        file = self._load(path)
        if unreadable := [problem.reason for problem in file.problems if problem.line_number == 0]:
            raise LogError(f"`{path}` {unreadable[0]}: change its permissions or remove it, then prune again.")
        fresh, count = [], Counter(broken=len(file.problems) - len(file.newer))
        for record in file.records:
            if record.outcome != "ok":
                count["failing"] += 1
            elif accepts is not None and accepts(record):
                count["stale"] += 1
            else:
                fresh.append(record)
        kept = _best(fresh, keep)
        count.update(kept=len(kept), slower=len(fresh) - len(kept))
        if not dry_run and (len(kept) < len(file.records) or len(file.problems) > len(file.newer)):
            with writing(path):
                _replace_file(path, kept, file.newer)
        return count


def _identity(record: Record) -> tuple[Any, ...]:
    """The key by which records from two folders are the same; date and message do not count."""
    r = record
    what = (r.conv, r.method, frozenset(r.tile.items()), r.device, r.target, r.threads)
    return (*what, r.tvm, r.fingerprint, r.seed, r.trial, r.outcome, r.samples_s)


def merge(sources: Sequence[Log], into: Log) -> Merged:
    """Adds to `into` every record of `sources` that it does not hold yet, in the sources' order.

    Raises:
        LogError: `into` cannot be written.
    """
    added = duplicates = broken = 0
    for source in sources:
        for device in source.devices():
            if not (convs := source.convs(device)):
                continue
            with into._locked(device):
                for conv in convs:
                    file, path = source._load(source.path(conv, device)), into.path(conv, device)
                    held = {_identity(record) for record in into.read(conv, device)}
                    new: dict[tuple[Any, ...], Record] = {}
                    for record in file.records:
                        if (identity := _identity(record)) not in held:
                            new.setdefault(identity, record)
                    if new:
                        with writing(path):
                            write_lines(path, _encode(new.values()))
                    added, duplicates = added + len(new), duplicates + len(file.records) - len(new)
                    broken += len(file.problems)
    return Merged(added, duplicates, broken)
