"""What an HTML page is made from: result files and tuning records of the user, each checked, with a reason for each that cannot be used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from im2win.bench.memory_result import PREFIX, MemoryResult
from im2win.bench.results import Result, ResultError, peak_name, read_values
from im2win.common.json_text import parsed
from im2win.records.log import Log
from im2win.records.record import Record, is_device
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

AnyResult = TypeVar("AnyResult", Result, MemoryResult)
Layer = tuple[str, str, int, str]
"""Device, kind of target, threads and key of a tuned layer."""
LEAST, MOST = 1e-6, 1e9  # of plausible ms (a nanosecond, eleven days), ratios, GFLOPS and GB/s


class SourceError(ValueError):
    """A name of a device or layer that no file holds. The message names the argument, its value and what there is."""


@dataclass(frozen=True)
class Unusable:
    """A file, or a line of it, that a page leaves out, and why."""

    path: str
    reason: str


@dataclass
class Sources:
    """What was read.

    Attributes:
        results, memory: results of times and of memory by name, which is the path below its folder without the suffix.
        tuned: records of each tuned layer, in the order they were written.
        unusable: what was left out.
        notes: what is missing, as sentences with the command that makes it.
    """

    results: dict[str, Result] = field(default_factory=dict)
    memory: dict[str, MemoryResult] = field(default_factory=dict)
    tuned: dict[Layer, list[Record]] = field(default_factory=dict)
    unusable: list[Unusable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def devices(self) -> list[str]:
        """Slugs of all devices, sorted."""
        measured = {one.device for one in self.measured}
        return sorted(measured | {device for device, *_ in self.tuned})

    @property
    def measured(self) -> list[Result | MemoryResult]:
        """All results, of times and of memory."""
        return [*self.results.values(), *self.memory.values()]


def read(results: Sequence[Path], logs: Sequence[Path]) -> Sources:
    """Reads result files and records. Files that cannot be used are listed, never an error.

    Args:
        results: result files, or folders in which all files that end in .json are read.
        logs: folders of tuning records.
    """
    found = Sources()
    for place in results:
        for name, path in _files(place):
            _read_result(found, _free(name, {*found.results, *found.memory}), path)
    for folder in logs:
        _read_records(found, folder)
    if not results:
        found.notes.append("No result files were named: `im2win bench KEY --json FILE` makes one, and `--results` names it or its folder.")
    elif not found.results and not found.memory:
        places = ", ".join(map(str, results))
        found.notes.append(f"There are no results in {places}: `im2win bench KEY --json FILE` makes one.")
    if not logs:
        found.notes.append("No tuning records were named: `im2win tune KEY --logs DIR` makes some, and `--logs DIR` names their folder.")
    return found


def only(sources: Sources, device: str | None, layers: Iterable[str] | None) -> Sources:
    """The part of some devices and layers.

    Args:
        device: its slug; None for all.
        layers: names of layers in results, or keys; None for all.

    Raises:
        SourceError: there is no such device or layer.
    """
    known = sources.devices
    if device is not None and device not in known:
        raise SourceError(f"`--device` (={device!r}) must be a device of the results or records: {', '.join(known) or 'there are none'}.")
    wanted = None if layers is None else set(layers)
    if wanted is not None:
        _check_layers(sources, wanted)
    results = {name: _part(one, wanted) for name, one in sources.results.items() if device in (None, one.device)}
    memory = {name: _part(one, wanted) for name, one in sources.memory.items() if device in (None, one.device)}
    left = replace(sources, results=results, memory=memory).measured
    keys = {row.conv for one in left for row in one.layers if wanted and row.layer in wanted}
    tuned = {
        layer: records for layer, records in sources.tuned.items()
        if device in (None, layer[0]) and (wanted is None or layer[3] in wanted | keys)
    }  # fmt: skip
    return replace(
        sources, results={name: one for name, one in results.items() if one.layers or wanted is None},
        memory={name: one for name, one in memory.items() if one.layers or wanted is None}, tuned=tuned,
    )  # fmt: skip


def _part(result: AnyResult, wanted: set[str] | None) -> AnyResult:
    if wanted is None:
        return result
    rows: Any = [row for row in result.layers if row.layer in wanted or row.conv in wanted]
    return replace(result, layers=rows)


def _check_layers(sources: Sources, wanted: set[str]) -> None:
    rows = [(row.layer, row.conv) for one in sources.measured for row in one.layers]
    known = {*itertools.chain(*rows), *(layer[3] for layer in sources.tuned)}
    if not wanted or wanted - known:
        unknown = ", ".join(sorted(wanted - known))
        shown = ", ".join(sorted(known)[:20]) or "there are none"
        more = f" and {len(known) - 20} more" if len(known) > 20 else ""
        raise SourceError(f"`--layers` (={unknown!r}) must name layers of the results or records: {shown}{more}.")


def _files(place: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of each file that may hold a result."""
    if place.is_file():
        yield place.stem, place
        return
    for path in sorted(place.rglob("*.json")):
        if path.is_file():
            yield path.relative_to(place).with_suffix("").as_posix(), path


def _free(name: str, taken: set[str]) -> str:
    return name if name not in taken else next(f"{name} ({i})" for i in itertools.count(2) if f"{name} ({i})" not in taken)


def _read_result(found: Sources, name: str, path: Path) -> None:
    try:
        if path.name.startswith(PREFIX) or _holds_memory(path):
            found.memory[name] = _checked(MemoryResult.load(path), _check_memory)
        else:
            found.results[name] = _checked(Result.load(path), _check_times)
    except (ResultError, SourceError) as error:
        reason = "a study, whose table `im2win report` writes into texts; it is not shown here." if _is_study(path) else str(error)
        found.unusable.append(Unusable(str(path), reason.removeprefix(f"{path}: ")))


def _holds_memory(path: Path) -> bool:
    rows = read_values(path).get("layers")
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], dict) and "formula_bytes" in rows[0]


def _is_study(path: Path) -> bool:
    try:
        values = parsed(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and isinstance(values.get("study"), str)


def _checked(result: AnyResult, check: Callable[[AnyResult], None]) -> AnyResult:
    """The result, if it holds what a page computes with.

    Raises:
        SourceError: a device or a layer that is none, or what `check` raises.
    """
    if not is_device(result.device):
        raise SourceError(f"`device` (={result.device!r:.80}) must be a device's slug: letters, digits, dots, dashes and underscores.")
    for row in result.layers:
        try:
            Conv2d.parse(row.conv)
        except ValueError as error:
            raise SourceError(f"`conv` (={row.conv!r:.80}) must be the key of a valid Conv2d: {error}") from None
    check(result)
    return result


def _check_times(result: Result) -> None:
    types = result.dtype.partition("-")[0]
    if types not in ELEMENT_TYPES:
        raise SourceError(f"`dtype` (={result.dtype!r:.80}) must begin with one of {', '.join(ELEMENT_TYPES)}.")
    for ceiling in ("copy_gbs", "fma_gflops", peak_name(result.dtype, result.ceilings)):
        if not LEAST <= result.ceilings.get(ceiling, 0) <= MOST:
            raise SourceError(f"`ceilings[{ceiling!r}]` (={result.ceilings.get(ceiling)}) must be from {LEAST:g} to {MOST:g}.")
    for row in result.layers:
        medians = {f"spread[{name!r}].median": one.median for name, one in row.spread.items()}
        times = {"ours_ms": row.ours_ms, "untuned_ms": row.untuned_ms, "ratio": row.ratio, "untuned_ratio": row.untuned_ratio}
        for name, value in {**times, **row.peers, **medians}.items():
            if value is not None and not LEAST <= value <= MOST:
                raise SourceError(f"`{name:.80}` (={value}) of layer {row.layer!r:.80} must be from {LEAST:g} to {MOST:g}.")
        if row.best_peer is not None and row.best_peer not in row.peers:
            raise SourceError(f"`best_peer` (={row.best_peer!r:.80}) of layer {row.layer!r:.80} must be one of its peers.")


def _check_memory(result: MemoryResult) -> None:
    for row in result.layers:
        for values in (row.formula_bytes, row.measured_bytes, row.torch_bytes, row.cudnn_bytes, {"tensors": row.tensor_bytes}):
            for name, value in values.items():
                if value < 0:
                    raise SourceError(f"bytes of `{name:.80}` (={value}) of layer {row.layer!r:.80} must be at least 0.")


def _read_records(found: Sources, folder: Path) -> None:
    log, before = Log(folder), len(found.tuned)
    for record in log:
        found.tuned.setdefault((record.device, record.target, record.threads, record.conv), []).append(record)
    for problem in log.problems:
        line = f", line {problem.line_number}" if problem.line_number else ""
        found.unusable.append(Unusable(f"{problem.path}{line}", problem.reason))
    if len(found.tuned) == before and not log.problems:
        inside = next(folder.glob("*.jsonl"), None)
        hint = f" Name the folder above it: {folder.absolute().parent}." if inside else " `im2win tune KEY --logs DIR` makes some."
        found.notes.append(f"There are no tuning records in {folder}.{hint}")
