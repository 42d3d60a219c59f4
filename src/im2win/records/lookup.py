"""Look-up of the record that applies to a problem: tier by tier, in the named logs, the user's and those that ship with the package."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tvm

from im2win.records.emitted_before import emitted_once, known
from im2win.records.folders import PACKAGED, Logs, own_folders
from im2win.records.judge import DefaultOf, Judge, Outweighs, Settled, unsuited
from im2win.records.likeness import distance, family
from im2win.records.log import Accepts, Log, best_first
from im2win.records.proofs import proven, verdict
from im2win.records.record import Record, TileValue, parse_key
from im2win.records.tiers import OLDER
from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Tile
from im2win.registry.schedules import SCHEDULES, candidates, schedule_of
from im2win.registry.sources import is_current
from im2win.spec import methods
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

Legal = Callable[[Conv2d, str, dict[str, TileValue]], list[str]]
Alike = Callable[[Conv2d, Conv2d], bool]
Unearned = Callable[[Record, Sequence[Record], Log, Conv2d], "str | None"]

_NEAR_BEST = 1.25  # a borrowed tile's cost must be at most this many times the best one there; else the default tile may be better

_NEAR_HINTS = 4  # nearest layers whose records have not earned their place before the look-up gives up: each may take a ranked space


@dataclass(frozen=True)
class Found:
    """The result of `find`.

    It holds the record (None on the last tier), the tier, and the records that were refused on the way, with reasons.
    """

    record: Record | None
    tier: str
    skipped: list[tuple[Record, str]]


@dataclass(frozen=True)
class Choice:
    """An algorithm and a tile that a record recommends; `exact` if the record was measured for this very layer on this device."""

    algorithm: str
    tile: Tile
    exact: bool
    tier: str


@functools.lru_cache(maxsize=16)
def _log(folder: Path) -> Log:
    return Log(folder)


def open_logs(logs: Logs) -> list[Log]:
    """The logs to search, in order: those that the caller names, the user's own, and those that ship with the package.

    A folder that does not exist is left out.

    Raises:
        LogError: a folder is a file.
    """
    return [*(_log(Path(folder)) for folder in own_folders(logs) if os.path.exists(folder)), _log(PACKAGED)]


def stale(record: Record, logs: Sequence[Log] = ()) -> str | None:
    """The reason why a record no longer applies to this installation; None if it applies. The device is not compared.

    A record applies if its candidate emits the kernel that was timed. That is known without emitting it where today's source made the
    record, or where a proof of `logs` or of the shipped logs covers it. Any other candidate is emitted again, which takes up to half a
    second, once for this source (`records.emitted_before`).
    """
    if record.tvm != tvm.__version__:
        return f"recorded with TVM {record.tvm}, this is {tvm.__version__}"
    if record.method not in SCHEDULES:
        return f"there is no {methods.shown(record.method)} any more"
    if proven(record, (*logs, _log(PACKAGED))) or is_current(record.target, record.method, record.generator):
        return None
    return verdict(record, emitted_once).reason


def applies_at_once(record: Record, logs: Sequence[Log]) -> bool:
    """Whether a record is known to apply without emitting its kernel. False says nothing."""
    if record.tvm != tvm.__version__ or record.method not in SCHEDULES:
        return False
    here = is_current(record.target, record.method, record.generator)
    return here or known(record) == record.fingerprint or proven(record, logs)


def tile_violations(conv: Conv2d, algorithm: str, tile: dict[str, TileValue], device: Device, accuracy: Accuracy = "float32") -> list[str]:
    """The rules that a recorded tile breaks for a problem on a device."""
    row, backend = schedule_of(algorithm), backend_for(device, accuracy)
    if (reason := row.supports(conv, backend.target, accuracy)) is not None:
        return [reason]
    try:
        return backend.violations(conv, row, backend.tile(row, tile))
    except ValueError as error:
        return [str(error)]


def superseded(record: Record, records: Sequence[Record]) -> bool:
    """Whether a later record measures the same candidate again. The last record counts, since it was taken in the final rounds."""
    later = records[next(i for i, other in enumerate(records) if other is record) + 1 :]
    what = (record.method, record.tile, record.target, record.threads, record.tvm, record.fingerprint)
    return any((r.method, r.tile, r.target, r.threads, r.tvm, r.fingerprint) == what for r in later)


def _kinship(a: str, b: str) -> int:
    """Number of leading words that two slugs share. A slug begins with vendor and model."""
    return next((i for i, (x, y) in enumerate(zip(a.split("-"), b.split("-"), strict=False)) if x != y), a.count("-") + 1)


def _ladder(conv: Conv2d, device: str, logs: Sequence[Log], alike: Alike) -> Iterator[tuple[str, Log, list[Record]]]:
    """The tiers, each with its log and records. A file is read only when its tier is reached."""
    for log in logs:
        yield "exact", log, log.read(conv, device)
    others = [(-_kinship(other, device), other, log) for log in logs for other in log.devices() if other != device]
    for _, other, log in sorted(others, key=lambda row: row[:2]):
        yield "compatible device", log, log.read(conv, other)
    kind = family(conv)
    others_here = ((log, near) for log in logs for near in log.convs(device) if near != conv)
    layers = [(log, near) for log, near in others_here if family(near) == kind and alike(conv, near)]
    for log, near in sorted(layers, key=lambda row: distance(conv, row[1])):
        yield "nearest layer", log, log.read(near, device)


def find(
    conv: Conv2d,
    device: str,
    *,
    logs: Sequence[Log],
    accepts: Accepts,
    legal: Legal,
    alike: Alike = lambda conv, other: True,
    unearned: Unearned = lambda record, records, log, conv: None,
    settled: Settled = lambda record, records, log: record,
    outweighs: Outweighs = lambda record, conv: False,
    target: str = "cpu",
    threads: int | None = None,
) -> Found:
    """The best record for a layer on a device, from the first of these tiers that has one. Each tier searches the logs in order.

    In every tier a record must have earned its place against the default tile of its layer (`im2win.records.merit`). Otherwise the best
    record of that file is refused, and so are the slower ones.

    1. "exact": this device and this layer; the best record (`Record.cost`) to which `accepts` does not object. Where none has earned its
       place, "older record": the first one that `outweighs` the estimate of today's default tile; one of the same convolution with another
       epilogue may do so in tier 3.
    2. "compatible device": this layer on another device, the one with the most similar slug first. The tile must be legal here.
    3. "nearest layer": this device and another layer of the same kernel, stride, dilation, layout and dtype, grouped or not like this one,
       that is `alike`. The layer with the nearest sizes whose tile is legal for this layer comes first. Only algorithm and tile apply to
       this layer, the recorded time does not.

    4. "none".

    On a GPU `search` asks once more for a problem in a type that has a twin (`spec.dtypes`), in that type: "other type".

    What is borrowed in tiers 2 and 3 must also promise to beat this layer's default tile here, unless only the epilogue differs.

    Args:
        conv, device: the layer and this machine's slug.
        logs: the user's own first.
        accepts: returns the reason why a record does not apply, or None (see `records.record.validate`). It also sees records of other
            devices, so it must not compare the device.
        legal: ``legal(conv, algorithm, tile)`` returns the rules that a tile breaks for this layer on this machine.
        unearned: ``unearned(record, records, log, conv)`` returns the reason why the best record of a file is but a hint for this layer, or
            None.
        settled: ``settled(record, records, log)`` returns the record to use of a file of the exact tier: its best or the default tile's.
        outweighs: ``outweighs(record, conv)`` says whether a record that has not earned its place is better, by its measured time, than
            what today's default tile promises.
        alike: ``alike(conv, other)`` says whether another layer's tile is likely to be better than the analytic model's.
        target: only records of this kind of target count.
        threads: only records with this many threads apply; None leaves that to `accepts`.
    """
    skipped: list[tuple[Record, str]] = []
    hints: set[str] = set()
    older: Record | None = None
    for tier, log, records in _ladder(conv, device, logs, alike):
        if older is not None and tier != "exact":
            break
        best = math.inf
        for record in best_first(record for record in records if record.target == target):
            if superseded(record, records):
                continue
            reason = _thread_mismatch(record, threads) or accepts(record)
            if not reason:
                best = min(best, record.cost)
                if tier != "exact" and record.cost > _NEAR_BEST * best:
                    break
                problems = [] if tier == "exact" else legal(conv, record.method, record.tile)
                if not problems:
                    hint = unearned(record, records, log, conv)
                    if hint is None:
                        return Found(settled(record, records, log) if tier == "exact" else record, tier, skipped)
                    if older is None and outweighs(record, conv):
                        older = record
                        break
                    skipped.append((record, hint))
                    hints |= {record.conv} if tier == "nearest layer" else set()
                    break
                reason = f"its tile is not legal for {conv}: {'; '.join(problems)}"
            skipped.append((record, reason))
        if len(hints) == _NEAR_HINTS:
            break
    return Found(older, "none" if older is None else OLDER, skipped)


def _thread_mismatch(record: Record, threads: int | None) -> str | None:
    if threads is None or record.threads == threads:
        return None
    return f"recorded with {record.threads} threads, here there are {threads}"


def search(
    conv: Conv2d,
    device: Device,
    names: Sequence[str],
    logs: Logs,
    accuracy: Accuracy = "float32",
    default: DefaultOf | None = None,
) -> Found:
    """Runs the look-up. The result names the tier and every record that was refused on the way, with the reason.

    Args:
        names: the algorithms that may be used.
        default: the default tile of a problem, from a caller that keeps them; None to rank the tiles of a layer whose records do not say
            how they stand against it.
    """
    opened = open_logs(logs)
    backend, accepts = backend_for(device, accuracy), accepting(device, names, opened, accuracy)
    able = {row.key for row in candidates("auto", conv, backend.target, accuracy)} if names else set()
    asked = None if able <= set(names) else tuple(names)
    judge = Judge(device, accuracy, asked, accepting(device, None, opened, accuracy), default, opened)

    def legal(problem: Conv2d, name: str, tile: dict[str, TileValue]) -> list[str]:
        broken = tile_violations(problem, name, tile, device, accuracy)
        if broken or backend.proven(problem, backend.tile(schedule_of(name), tile)):
            return broken
        return ["its errors may be above the tolerance: only tuning, which measures them, takes it"]

    found = find(
        conv,
        backend.name,
        logs=opened,
        accepts=accepts,
        legal=legal,
        alike=backend.alike,
        unearned=judge.unearned,
        settled=judge.settled,
        outweighs=judge.outweighs,
        target=backend.target,
        threads=backend.threads,
    )
    twin = ELEMENT_TYPES[conv.dtype].twin if backend.target == "cuda" else ""
    if found.tier == "exact" or not twin:
        return found
    other = search(conv.with_(dtype=twin, out_dtype=None), device, names, logs, accuracy, default)
    if other.record is None or (found.record is not None and other.tier != "exact"):
        return found
    return _of_twin(conv, other, legal) or found


def _of_twin(conv: Conv2d, found: Found, legal: Legal) -> Found | None:
    """What a look-up found for a problem in another type, as a tile of this problem's; None if that is not legal."""
    assert found.record is not None
    tile = schedule_of(found.record.method).on_gpu.tile(found.record.tile).in_type(conv.dtype).as_dict()
    if legal(conv, found.record.method, tile):
        return None
    return Found(replace(found.record, tile=tile), "other type" if found.tier == "exact" else found.tier, found.skipped)


def accepting(device: Device, names: Sequence[str] | None, logs: Sequence[Log], accuracy: Accuracy) -> Accepts:
    """The rule by which a record of this or another device applies to a look-up, its own layer's tile asked alone.

    Args:
        names: the algorithms that may be used; None for all.
    """
    backend = backend_for(device, accuracy)

    def accepts(record: Record) -> str | None:
        if record.device != backend.name and (reason := unsuited(record, device)) is not None:
            return reason
        if (reason := stale(record, logs)) is not None:
            return reason
        if names is not None and record.method not in names:
            return f"{methods.shown(record.method)} was not asked for"
        if backend.target == "cuda" and (broken := tile_violations(parse_key(record.conv), record.method, record.tile, device, accuracy)):
            return "; ".join(broken)
        return None

    return accepts


def choose(
    conv: Conv2d, device: Device, names: Sequence[str], logs: Logs, accuracy: Accuracy = "float32"
) -> Choice | None:
    """The algorithm and tile that the look-up recommends; None if it finds no record, so that only the default tile is left."""
    found = search(conv, device, names, logs, accuracy)
    if found.record is None:
        return None
    tile = backend_for(device).tile(schedule_of(found.record.method), found.record.tile)
    return Choice(found.record.method, tile, found.tier == "exact", found.tier)
