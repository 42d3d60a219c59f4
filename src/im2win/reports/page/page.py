"""Writes the HTML page: one file without external resources, in which every text of a file is escaped."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win import __version__
from im2win.bench.memory_result import MemoryResult
from im2win.bench.results import Result
from im2win.common.files import replace_text
from im2win.common.markdown import Table
from im2win.common.quantities import counted
from im2win.records.record import Record, utc_now
from im2win.reports.page import memory, results, tuning
from im2win.reports.page.bars import speed
from im2win.reports.page.sources import Sources
from im2win.reports.page.text import LONGEST, printable, shortened
from im2win.reports.page.tuned import tuned
from im2win.reports.tables import summary_rows

MOST_SEARCHES = 60  # searches that are drawn; of more layers the page would be many megabytes
OPENED = 3  # most tuned layers of a page that are open at first
MOST_UNUSABLE = 30  # lines on what could not be used
_PROSE = re.compile(r"`([^`]*)`|\*\*(.+?)\*\*")


@dataclass(frozen=True)
class DevicePart:
    """All of one device on the page; `facts` are (name, values)."""

    anchor: str
    name: str
    facts: Sequence[tuple[str, str]]
    summary: Table
    results: Sequence[results.ResultPart]
    memory: Sequence[memory.MemoryPart]
    tuned: Sequence[tuning.TunedPart]
    overview: Table
    failures: Sequence[tuple[str, int]]


def write(sources: Sources, path: Path, step: Callable[[int, int], Any] = lambda done, total: None) -> Path:
    """Writes the page and returns its path. `step` is called with the number of parts that are done, and of all.

    Needs matplotlib and jinja2 (the `report` extra).

    Raises:
        OSError: the file cannot be written.
    """
    return replace_text(path, render(sources, step))


def render(sources: Sources, step: Callable[[int, int], Any] = lambda done, total: None) -> str:
    """The text of the page; see `write`."""
    total = len(sources.results) + len(sources.memory) + len(sources.tuned)
    done = iter(range(1, total + 1))
    drawn = set(itertools.islice(sources.tuned, MOST_SEARCHES))

    def made(part: Any) -> Any:
        step(next(done), total)
        return part

    devices = [_device(sources, place, name, made, drawn) for place, name in enumerate(sources.devices, 1)]
    notes = list(sources.notes)
    if len(sources.tuned) > MOST_SEARCHES:
        whole = f"{MOST_SEARCHES} of {len(sources.tuned)} tuned layers"
        notes.append(f"Searches are drawn for {whole}; `--layers` and `--device` choose others.")
    unusable = sources.unusable
    text: str = _environment().get_template("page.html").render(
        devices=devices, notes=notes, unusable=unusable[:MOST_UNUSABLE], more_unusable=max(0, len(unusable) - MOST_UNUSABLE),
        counts=_counts(sources), opened=len(sources.tuned) <= OPENED, version=__version__, date=utc_now()[:16].replace("T", " "),
        style=(Path(__file__).parent / "page.css").read_text(encoding="utf-8"),
    )  # fmt: skip
    return text


def _counts(sources: Sources) -> str:
    layers, records = len(sources.tuned), sum(map(len, sources.tuned.values()))
    found = [counted(len(sources.devices), "device"), counted(len(sources.results) + len(sources.memory), "result file")]
    return ", ".join([*found, *([f"{counted(layers, 'tuned layer')} with {counted(records, 'record')}"] if layers else [])])


def _device(sources: Sources, place: int, name: str, made: Callable[[Any], Any], drawn: set[Any]) -> DevicePart:
    anchor = f"device-{place}"
    times = {key: one for key, one in sources.results.items() if one.device == name}
    sizes = {key: one for key, one in sources.memory.items() if one.device == name}
    layers = {key: tuned(records) for key, records in sources.tuned.items() if key[0] == name}
    parts = [made(results.part(key, one, f"{anchor}-result-{i}")) for i, (key, one) in enumerate(times.items(), 1)]
    of_memory = [made(memory.part(key, one, f"{anchor}-memory-{i}")) for i, (key, one) in enumerate(sizes.items(), 1)]
    of_layers = [made(tuning.part(one, f"{anchor}-layer-{i}", draw=key in drawn)) for i, (key, one) in enumerate(layers.items(), 1)]
    records = [record for key in layers for record in sources.tuned[key]]
    return DevicePart(
        anchor, name, _facts(list(times.values()), list(sizes.values()), records), summary_rows(times), parts, of_memory, of_layers,
        tuning.overview(of_layers, list(layers.values())), tuning.failures_by_kind(list(layers.values())),
    )  # fmt: skip


def _facts(times: Sequence[Result], sizes: Sequence[MemoryResult], records: Sequence[Record]) -> list[tuple[str, str]]:
    """What the device is, and the versions that took part."""
    measured: list[Result | MemoryResult] = [*times, *sizes]
    values: dict[str, list[str]] = {"processor": [one.brand for one in measured]}
    values["threads"] = [str(one.threads) for one in times] + [str(record.threads) for record in records if record.target == "cpu"]
    for name in dict.fromkeys(name for one in times for name in one.ceilings):
        ceilings = sorted(one.ceilings[name] for one in times if name in one.ceilings)
        values[f"ceiling, {name.partition('_')[0]}"] = [_range(ceilings, "GB/s" if name.endswith("_gbs") else "GFLOPS")]
    for one in measured:
        for name, version in one.versions.items():
            values.setdefault(name, []).append(version)
    values.setdefault("apache-tvm", []).extend(record.tvm for record in records)
    values.setdefault("im2win", []).extend(record.im2win for record in records)
    dates = sorted([*(one.date[:10] for one in measured), *(record.date[:10] for record in records)])
    values["measured"] = [dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"] if dates else []
    return [(name, ", ".join(sorted(set(found)))) for name, found in values.items() if found]


def _range(values: Sequence[float], unit: str) -> str:
    least, most = (speed(value) if unit == "GFLOPS" else f"{value:.0f} {unit}" for value in (values[0], values[-1]))
    return least if least == most else f"{least} to {most}"


def _environment() -> Any:
    """jinja2's environment: texts are escaped, printable and not too long, and an unknown name is an error."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=loader, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: shortened(printable(value)) if type(value) is str else value,
    )  # fmt: skip
    environment.filters["prose"] = _prose
    return environment


def _prose(text: str) -> Any:
    """A sentence or cell in which `code` and **bold** stand as in Markdown; the rest is escaped."""
    from markupsafe import Markup, escape

    found, end, whole = Markup(), 0, shortened(printable(text), 4 * LONGEST)
    for match in _PROSE.finditer(whole):
        tag, inner = ("code", match[1]) if match[1] is not None else ("strong", match[2])
        found += escape(whole[end : match.start()]) + Markup(f"<{tag}>") + escape(inner) + Markup(f"</{tag}>")
        end = match.end()
    return found + escape(whole[end:])
